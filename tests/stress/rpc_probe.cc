// Any call of modelhost.v1.Control and Worker, with any request, for tests that have no gRPC of
// their own.
//
//   rpc_probe --runtime-dir=D
//
// Lines on stdin: {"method": "Load", "request": {...}, "hold": true, "deadline_s": 60}. One line
// for each on stdout:
// {"code": N, "reason": "...", "message": "...", "responses": [...]}. Requests and responses are
// in Protobuf's JSON. Every method is called with one request; of a stream all responses are read,
// or only the first, when a request says "hold": the stream then stays open, unread, until the
// program ends. `--describe` prints {"Method": {"request": {"field": "type"}}} and ends.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/generic/generic_stub.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "modelhost/v1/control.pb.h"
#include "modelhost/v1/error_info.pb.h"
#include "modelhost/v1/worker.pb.h"
#include "tests/stress/stress_util.h"

namespace modelhost::bench {
namespace {

namespace pb = google::protobuf;

std::vector<const pb::ServiceDescriptor*> Services() {
  return {v1::GetStatusRequest::descriptor()->file()->FindServiceByName("Control"),
          v1::ResolveRequest::descriptor()->file()->FindServiceByName("Worker")};
}

// Null: there is none. No two of them have one name.
const pb::MethodDescriptor* FindMethod(const std::string& name) {
  for (const pb::ServiceDescriptor* service : Services()) {
    if (const auto* method = service->FindMethodByName(name); method != nullptr) return method;
  }
  return nullptr;
}

std::string Json(const pb::Message& message) {
  std::string text;
  if (!pb::util::MessageToJsonString(message, &text).ok()) return "{}";
  return text;
}

void SetText(pb::Struct& object, const std::string& name, const std::string& text) {
  (*object.mutable_fields())[name].set_string_value(text);
}

struct Open {
  grpc::ClientContext context;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
};

class Probe {
 public:
  explicit Probe(const std::string& runtime_dir)
      : stub_(grpc::CreateChannel("unix:" + runtime_dir + "/control.sock",
                                  grpc::InsecureChannelCredentials())) {}
  ~Probe() {
    for (const auto& open : held_) open->context.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  std::string Call(const std::string& line) {
    pb::Struct order, answer;
    if (!pb::util::JsonStringToMessage(line, &order).ok()) Die("line", "is no JSON: " + line);
    const std::string method = order.fields().at("method").string_value();
    const pb::MethodDescriptor* found = FindMethod(method);
    if (found == nullptr) Die(method, "is no method");
    pb::DynamicMessageFactory factory(pb::DescriptorPool::generated_pool());
    const std::unique_ptr<pb::Message> request(factory.GetPrototype(found->input_type())->New());
    const auto json = order.fields().find("request");
    if (json != order.fields().end()) {
      const auto parsed = pb::util::JsonStringToMessage(Json(json->second), request.get());
      if (!parsed.ok()) Die(method, parsed.ToString());
    }
    const auto hold = order.fields().find("hold");
    const bool held = hold != order.fields().end() && hold->second.bool_value();

    auto open = std::make_unique<Open>();
    const auto deadline = order.fields().find("deadline_s");
    SetDeadline(open->context, deadline == order.fields().end()
                                   ? 60
                                   : static_cast<int>(deadline->second.number_value()));
    open->stream = stub_.PrepareCall(&open->context,
                                     "/" + found->service()->full_name() + "/" + method, &queue_);
    open->stream->StartCall(this);
    bool ok = Wait();
    if (ok) {
      const std::string bytes = request->SerializeAsString();
      const grpc::Slice slice(bytes);
      open->stream->Write(grpc::ByteBuffer(&slice, 1), this);
      ok = Wait();
    }
    if (ok) {
      open->stream->WritesDone(this);
      Wait();
    }
    auto* responses = (*answer.mutable_fields())["responses"].mutable_list_value();
    grpc::ByteBuffer buffer;
    open->stream->Read(&buffer, this);
    while (Wait()) {
      std::vector<grpc::Slice> slices;
      if (!buffer.Dump(&slices).ok()) break;
      std::string bytes;
      for (const grpc::Slice& slice : slices) {
        bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      }
      const std::unique_ptr<pb::Message> response(
          factory.GetPrototype(found->output_type())->New());
      if (!response->ParseFromString(bytes)) Die(method, "its response cannot be read");
      pb::util::JsonStringToMessage(Json(*response), responses->add_values());
      if (held) break;
      open->stream->Read(&buffer, this);
    }
    auto& code = (*answer.mutable_fields())["code"];
    code.set_number_value(0);
    if (held) {
      held_.push_back(std::move(open));
    } else {
      grpc::Status status;
      open->stream->Finish(&status, this);
      Wait();
      code.set_number_value(status.error_code());
      SetText(answer, "message", status.error_message());
      v1::RpcStatus rich;
      v1::ErrorInfo info;
      if (rich.ParseFromString(status.error_details()) && rich.details_size() == 1) {
        (void)info.ParseFromString(rich.details(0).value());
      }
      SetText(answer, "reason", info.reason());
    }
    return Json(answer);
  }

 private:
  bool Wait() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Open>> held_;
};

void Describe() {
  pb::Struct methods;
  std::vector<const pb::MethodDescriptor*> all;
  for (const pb::ServiceDescriptor* service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) all.push_back(service->method(i));
  }
  for (const pb::MethodDescriptor* method : all) {
    pb::Struct& one = *(*methods.mutable_fields())[method->name()].mutable_struct_value();
    for (int f = 0; f < method->input_type()->field_count(); ++f) {
      const pb::FieldDescriptor* field = method->input_type()->field(f);
      std::string type = field->type() == pb::FieldDescriptor::TYPE_MESSAGE
                             ? field->message_type()->full_name()
                             : field->type_name();
      if (field->is_repeated()) type += "[]";
      SetText(one, field->name(), type);
    }
  }
  std::cout << Json(methods) << "\n" << std::flush;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--describe") {
      Describe();
      return 0;
    }
  }
  Probe probe(Flag(argc, argv, "runtime-dir", ""));
  std::string line;
  while (std::getline(std::cin, line)) std::cout << probe.Call(line) << "\n" << std::flush;
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
