#include "client/modelctl/flow_test_daemon.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/fd_channel.h"

namespace modelhost::modelctl::testing {
namespace {

namespace fs = std::filesystem;

const std::string kTicket(abi::kTicketBytes, 't');

std::string ReadAll(const UniqueFd& fd) {
  std::string text;
  char buffer[65536];
  ssize_t got = 0;
  while ((got = ::pread(fd.get(), buffer, sizeof(buffer), static_cast<off_t>(text.size()))) > 0) {
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

v1::Version MakeVersion(const std::string& model, uint64_t version, v1::VersionPhase phase) {
  v1::Version out;
  out.set_model(model);
  out.set_version(version);
  out.set_name(absl::StrCat(version));
  out.set_phase(phase);
  out.set_health(phase == v1::READY ? v1::OK : v1::HEALTH_UNSPECIFIED);
  out.set_digest("ab12cd34ef5600112233445566778899aabbccddeeff00112233445566778899");
  out.set_format("safetensors");
  out.set_file_bytes(uint64_t{4} << 30);
  if (phase == v1::READY) out.set_host_bytes(uint64_t{4} << 30);
  out.set_residency("pinned");
  out.set_tier("pinned");
  return out;
}

v1::Operation MakeOperation(const std::string& id, v1::OperationKind kind,
                            v1::OperationState state) {
  v1::Operation operation;
  operation.set_id(id);
  operation.set_kind(kind);
  operation.set_state(state);
  return operation;
}

FakeDaemon::FakeDaemon() {
  std::string path = fs::temp_directory_path() / "mh-ctl-XXXXXX";
  runtime_dir_ = ::mkdtemp(path.data());
  status.set_version("0.1.0");
  status.set_epoch(12);
  status.set_ready(true);
  status.set_pid(::getpid());
  status.mutable_uptime()->set_seconds(7325);
  status.set_device_mode("host_only");
  status.set_device_reason("this build has no device tier");
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", (runtime_dir_ / "control.sock").string()),
                           grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) std::abort();
}

FakeDaemon::~FakeDaemon() {
  stop_ = true;
  StopControl();
  if (handles_.joinable()) handles_.join();
  fs::remove_all(runtime_dir_);
}

void FakeDaemon::StopControl() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  server_.reset();
}

void FakeDaemon::StartHandles() {
  listener_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (runtime_dir_ / "handles.sock").c_str(),
               sizeof(address.sun_path) - 1);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener_.get(), 8) != 0) {
    std::abort();
  }
  handles_ = std::thread([this] { ServeHandles(); });
}

void FakeDaemon::ServeHandles() {
  while (!stop_) {
    pollfd entry{listener_.get(), POLLIN, 0};
    if (::poll(&entry, 1, 20) != 1) continue;
    const UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.valid()) ServeOne(connection);
  }
}

void FakeDaemon::ServeOne(const UniqueFd& connection) {
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  while (!stop_) {
    const auto frame =
        ReceiveFrame(connection, buffer, ReceiveWait::kUntilDeadline,
                     std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    if (!frame.ok()) {
      if (frame.error().code == Code::kDeadlineExceeded) continue;
      return;
    }
    const uint32_t request = frame->header.request_id;
    if (frame->header.type == static_cast<uint16_t>(abi::FrameType::kHello)) {
      abi::HelloReply reply{};
      reply.header = MakeHeader(abi::FrameType::kHelloReply, sizeof(reply), request, 0);
      reply.abi = abi::kFrameAbi;
      (void)SendFrame(connection, AsBytes(reply), {}, {});
      continue;
    }
    abi::Upload upload{};
    std::memcpy(&upload, buffer.data(), sizeof(upload));
    if (std::memcmp(upload.ticket, kTicket.data(), kTicket.size()) != 0) {
      const std::string text = "ticket: not one of ours";
      abi::Error error{};
      error.header = MakeHeader(abi::FrameType::kError, sizeof(error) + text.size(), request, 0);
      error.code = static_cast<uint32_t>(Code::kPermissionDenied);
      error.length = static_cast<uint32_t>(text.size());
      (void)SendFrame(connection, AsBytes(error), std::as_bytes(std::span(text)), {});
      continue;
    }
    const std::lock_guard<std::mutex> hold(lock_);
    for (size_t i = 0; i < frame->fds.size(); ++i) {
      uploaded[upload.first + static_cast<uint32_t>(i)] = ReadAll(frame->fds[i]);
    }
    largest_frame = std::max(largest_frame, static_cast<uint32_t>(frame->fds.size()));
    complete_ = complete_ || upload.last == 1;
    abi::Ack ack{};
    ack.header = MakeHeader(abi::FrameType::kAck, sizeof(ack), request, 0);
    (void)SendFrame(connection, AsBytes(ack), {}, {});
    changed_.notify_all();
  }
}

bool FakeDaemon::WaitForCancel(grpc::ServerContext& context) {
  std::unique_lock<std::mutex> hold(lock_);
  while (!cancelled_) {
    if (context.IsCancelled()) return false;
    changed_.wait_for(hold, std::chrono::milliseconds(10));
  }
  return true;
}

bool FakeDaemon::cancel_called() {
  const std::lock_guard<std::mutex> hold(lock_);
  return cancelled_;
}

grpc::Status FakeDaemon::Find(const std::string& model, v1::Model* found) {
  const auto it = models.find(model);
  if (it == models.end()) {
    return {grpc::NOT_FOUND, absl::StrCat(model, ": no such model (see `modelctl ls`)")};
  }
  *found = it->second;
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                                   v1::GetStatusResponse* response) {
  *response = status;
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                                    v1::ListModelsResponse* response) {
  for (const auto& [name, model] : models) *response->add_models() = model;
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::GetModel(grpc::ServerContext*, const v1::GetModelRequest* request,
                                  v1::Model* response) {
  return Find(request->model(), response);
}

grpc::Status FakeDaemon::ListVersions(grpc::ServerContext*, const v1::ListVersionsRequest* request,
                                      v1::ListVersionsResponse* response) {
  v1::Model model;
  if (const grpc::Status found = Find(request->model(), &model); !found.ok()) return found;
  *response->mutable_versions() = model.versions();
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::GetVersion(grpc::ServerContext*, const v1::GetVersionRequest* request,
                                    v1::Version* response) {
  v1::Model model;
  if (const grpc::Status found = Find(request->model(), &model); !found.ok()) return found;
  uint64_t number = request->version();
  for (const v1::Label& label : model.labels()) {
    if (number == 0 && label.label() == request->label()) number = label.version();
  }
  for (const v1::Version& version : model.versions()) {
    if (version.version() != number) continue;
    *response = version;
    return grpc::Status::OK;
  }
  return {grpc::NOT_FOUND, absl::StrCat(request->model(), "@", number, ": no such version")};
}

grpc::Status FakeDaemon::WatchModels(grpc::ServerContext* context, const v1::WatchModelsRequest*,
                                     grpc::ServerWriter<v1::Model>* writer) {
  for (const auto& [name, model] : models) writer->Write(model);
  (void)WaitForCancel(*context);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::ListLeases(grpc::ServerContext*, const v1::ListLeasesRequest*,
                                    v1::ListLeasesResponse* response) {
  *response = leases;
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::EvictLease(grpc::ServerContext*, const v1::EvictLeaseRequest* request,
                                    v1::Lease* response) {
  evicted = *request;
  response->set_id(request->lease());
  response->set_model("planner");
  response->set_version(7);
  response->set_pid(42);
  response->set_comm("node");
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::SetLabel(grpc::ServerContext*, const v1::SetLabelRequest* request,
                                  v1::LabelChange* response) {
  set_label = *request;
  response->set_model(request->model());
  response->set_label(request->label());
  response->set_from(7);
  response->set_to(request->version());
  response->set_generation(3);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Swap(grpc::ServerContext* context, const v1::SwapRequest* request,
                              OperationWriter* writer) {
  return swap(*context, *request, *writer);
}

grpc::Status FakeDaemon::Unload(grpc::ServerContext* context, const v1::UnloadRequest* request,
                                OperationWriter* writer) {
  return unload(*context, *request, *writer);
}

grpc::Status FakeDaemon::PlanSwap(grpc::ServerContext*, const v1::SwapRequest* request,
                                  v1::SwapPlan* response) {
  v1::SwapPlanRow* row = response->add_rows();
  row->set_model(request->targets(0).model());
  row->set_from(7);
  row->set_to(request->targets(0).version());
  row->set_to_phase("STAGED");
  row->set_need_bytes(uint64_t{4} << 30);
  response->set_need_bytes(uint64_t{4} << 30);
  response->set_free_bytes(uint64_t{request->targets(0).version()} << 30);
  response->set_fits(response->need_bytes() <= response->free_bytes());
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Publish(grpc::ServerContext*,
                                 grpc::ServerReader<v1::PublishRequest>* reader,
                                 v1::PublishResponse* response) {
  v1::PublishRequest request;
  while (reader->Read(&request)) {
    if (request.has_begin()) publish_begin = request.begin();
    if (request.has_chunk()) uploaded[request.chunk().file()] += request.chunk().data();
  }
  response->set_operation_id("op-7");
  if (publish_begin.descriptors_follow()) {
    response->set_ticket(kTicket);
  } else {
    *response->mutable_result() = publish_result;
  }
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::WatchOperation(grpc::ServerContext* context,
                                        const v1::GetOperationRequest* request,
                                        OperationWriter* writer) {
  v1::OperationEvent event;
  *event.mutable_operation() = MakeOperation(request->id(), v1::PUBLISH, v1::RUNNING);
  event.mutable_operation()->set_phase("stage");
  writer->Write(event);
  std::unique_lock<std::mutex> hold(lock_);
  while (!complete_) {
    if (context->IsCancelled()) return grpc::Status::OK;
    changed_.wait_for(hold, std::chrono::milliseconds(10));
  }
  event.mutable_operation()->set_state(v1::SUCCEEDED);
  event.mutable_operation()->set_model(publish_begin.model());
  event.mutable_operation()->set_version(publish_begin.version());
  *event.mutable_operation()->mutable_result() = publish_result;
  writer->Write(event);
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::CancelOperation(grpc::ServerContext*,
                                         const v1::GetOperationRequest* request,
                                         v1::Operation* response) {
  const std::lock_guard<std::mutex> hold(lock_);
  cancelled_ = true;
  changed_.notify_all();
  *response = MakeOperation(request->id(), v1::SWAP, v1::RUNNING);
  return grpc::Status::OK;
}

}  // namespace modelhost::modelctl::testing
