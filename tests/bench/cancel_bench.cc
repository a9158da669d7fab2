// How long after the call that cancels it an operation has ended, seen by somebody who watches it.
//
//   cancel_bench --runtime-dir=D --kind=load|verify|swap --model=M --version=N --tries=N
//   cancel_bench --runtime-dir=D --kind=publish --tries=N COMMAND...
//
// COMMAND starts the operation, and is run anew for each try. Each is cancelled at another moment
// of its first 50 ms. Prints one JSON object.
#include <grpcpp/grpcpp.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "modelhost/v1/control.grpc.pb.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

using Stub = v1::Control::Stub;

void Limit(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

// Starts it, and leaves when its id is known: it goes on without the caller.
template <typename Reader>
std::string IdOf(grpc::ClientContext& context, const std::unique_ptr<Reader>& reader) {
  v1::OperationEvent event;
  const bool came = reader->Read(&event);
  context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!came) Die("start", status.error_message());
  return event.operation().id();
}

std::string StartOne(Stub& stub, const std::string& kind, const std::string& model,
                     uint64_t version) {
  grpc::ClientContext context;
  Limit(context);
  if (kind == "load") {
    v1::LoadRequest request;
    request.set_model(model);
    request.set_version(version);
    return IdOf(context, stub.Load(&context, request));
  }
  if (kind == "verify") {
    v1::VerifyRequest request;
    request.set_model(model);
    request.set_version(version);
    return IdOf(context, stub.Verify(&context, request));
  }
  if (kind != "swap") Die("--kind", kind + ": not known");
  v1::SwapRequest request;
  v1::SwapTarget* target = request.add_targets();
  target->set_model(model);
  target->set_version(version);
  return IdOf(context, stub.Swap(&context, request));
}

// The publish that runs and has its descriptors.
std::string RunningPublish(Stub& stub) {
  for (const uint64_t start = NowNs(); NowNs() - start < 30'000'000'000u;) {
    grpc::ClientContext context;
    Limit(context);
    v1::ListOperationsResponse response;
    const grpc::Status status = stub.ListOperations(&context, {}, &response);
    if (!status.ok()) Die("ListOperations", status.error_message());
    for (const v1::Operation& operation : response.operations()) {
      if (operation.state() == v1::RUNNING && operation.kind() == v1::PUBLISH &&
          operation.phase() == "copy") {
        return operation.id();
      }
    }
    Pause(1'000'000);
  }
  Die("publish", "no operation in 30 s");
}

// From the call to the end that a watcher sees, in ns; 0: it was over already.
uint64_t CancelOne(Stub& stub, const std::string& id) {
  v1::GetOperationRequest request;
  request.set_id(id);
  grpc::ClientContext watching;
  Limit(watching);
  const auto watcher = stub.WatchOperation(&watching, request);
  v1::OperationEvent event;
  if (!watcher->Read(&event)) Die("WatchOperation", watcher->Finish().error_message());
  const uint64_t start = NowNs();
  grpc::ClientContext context;
  Limit(context);
  v1::Operation answer;
  const grpc::Status status = stub.CancelOperation(&context, request, &answer);
  v1::Operation last = event.operation();
  while (watcher->Read(&event)) last = event.operation();
  const uint64_t end = NowNs();
  (void)watcher->Finish();
  if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) return 0;
  if (!status.ok()) Die("CancelOperation", status.error_message());
  if (last.state() != v1::CANCELLED) Die(id, "cancelled, and did not end as such");
  return end - start;
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string kind = Flag(argc, argv, "kind", "load");
  const std::string model = Flag(argc, argv, "model", "");
  const uint64_t version = std::stoull(Flag(argc, argv, "version", "1"));
  const int tries = std::stoi(Flag(argc, argv, "tries", "100"));
  int first = 1;
  while (first < argc && std::string(argv[first]).rfind("--", 0) == 0) ++first;
  const auto stub = v1::Control::NewStub(grpc::CreateChannel(
      "unix:" + runtime_dir + "/control.sock", grpc::InsecureChannelCredentials()));
  std::vector<uint64_t> took;
  int over = 0;
  for (int i = 0; i < tries; ++i) {
    pid_t child = 0;
    std::string id;
    if (kind == "publish") {
      if (first == argc) Die("publish", "no command");
      if (::posix_spawnp(&child, argv[first], nullptr, nullptr, argv + first, environ) != 0) {
        Die(argv[first], "cannot be started");
      }
      id = RunningPublish(*stub);
    } else {
      id = StartOne(*stub, kind, model, version);
    }
    Pause(static_cast<uint64_t>(i % 10) * 5'000'000u);
    const uint64_t ns = CancelOne(*stub, id);
    ns == 0 ? static_cast<void>(++over) : took.push_back(ns);
    int status = 0;
    if (child != 0) (void)::waitpid(child, &status, 0);
  }
  std::printf(
      "{\"p50_ms\": %.3f, \"p99_ms\": %.3f, \"most_ms\": %.3f, \"cancelled\": %zu, "
      "\"over\": %d}\n",
      Percentile(took, 0.5) / 1e6, Percentile(took, 0.99) / 1e6, Percentile(took, 1) / 1e6,
      took.size(), over);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
