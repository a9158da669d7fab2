#include "daemon/service/control_server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace modelhost {
namespace {

constexpr int kMostReceivedBytes = 2 << 20;  // A chunk, or the announcement of a big publish.
constexpr size_t kMostBufferedBytes = size_t{64} << 20;

ConnectionTable::Limits TableLimits(size_t most_of_uid) {
  ConnectionTable::Limits limits = ConnectionTable::LimitsFor(sysconf(_SC_OPEN_MAX));
  limits.most_of_uid = std::min(limits.most_of_uid, most_of_uid);
  limits.most_of_stranger = std::min(limits.most_of_stranger, most_of_uid);
  return limits;
}

}  // namespace

ControlServer::ControlServer(Deps deps, ServerInfo info, Interceptors interceptors,
                             CallGuard::Options call_options, size_t most_connections_of_uid)
    : deps_(deps),
      info_(std::move(info)),
      connections_(deps.clock, TableLimits(most_connections_of_uid)),
      calls_(deps.loop, deps.clock, call_options),
      admission_({deps.manager, deps.loop, deps.access, connections_, calls_, info_}),
      service_({deps.manager, deps.loop, deps.clock, admission_, deps.publisher, deps.watcher,
                deps.config, info_}),
      workers_({deps.manager, deps.loop, deps.clock, admission_, deps.workers, info_}),
      interceptors_(std::move(interceptors)) {}

ControlServer::~ControlServer() { Shutdown(absl::ZeroDuration()); }

absl::Status ControlServer::Start() {
  // Both are switches of gRPC's own, for every server that this process makes.
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  grpc::ResourceQuota quota("control");
  quota.SetMaxThreads(CallGuard::MostThreads());
  quota.Resize(kMostBufferedBytes);

  grpc::ServerBuilder builder;
  builder.RegisterService(&service_);
  builder.RegisterService(&workers_);
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kMostReceivedBytes);
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 32);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  interceptors_.push_back(calls_.MakeInterceptors([this](const grpc::ServerContextBase& context) {
    return service_.AdmitReflection(context);
  }));
  builder.experimental().SetInterceptorCreators(std::move(interceptors_));

  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::InternalError("control server: gRPC did not start (see its own messages)");
  }
  deps_.health.Attach(server->GetHealthCheckService());
  absl::MutexLock lock(&mutex_);
  server_ = std::move(server);
  accepting_ = true;
  return absl::OkStatus();
}

void ControlServer::AddConnection(const UniqueFd& socket, const Peer& peer) {
  absl::MutexLock lock(&mutex_);
  if (!accepting_) return;  // Closed, as by a daemon that is not there.
  using Standing = ConnectionTable::Standing;
  const Standing standing = deps_.access.MayCommand(peer)     ? Standing::kCommander
                            : deps_.manager.MayReadSome(peer) ? Standing::kReader
                                                              : Standing::kStranger;
  absl::StatusOr<UniqueFd> admitted = absl::ResourceExhaustedError("out of descriptors");
  if (auto own = socket.Duplicate(); own.ok()) {
    admitted = connections_.Admit(*std::move(own), peer, standing);
  }
  if (!admitted.ok()) {
    deps_.manager.ReportRefused(peer, absl::StrCat("connect: ", admitted.status().message()),
                                RefusedFor::kConnections);
    return;
  }
  served_ = true;
  grpc::AddInsecureChannelFromFd(server_.get(), std::move(*admitted).Release());
}

void ControlServer::Shutdown(absl::Duration grace) {
  std::unique_ptr<grpc::Server> server;
  bool served = false;
  {
    absl::MutexLock lock(&mutex_);
    accepting_ = false;
    server = std::move(server_);
    served = served_;
  }
  if (server == nullptr) return;
  if (served && deps_.loop.InThread()) std::abort();  // Calls in flight wait for that thread.
  admission_.Stop();
  deps_.health.Detach();
  if (served) workers_.EndSessions();
  server->Shutdown(absl::ToChronoTime(absl::Now() + grace));
  server->Wait();
  // What the last callbacks have posted names this server's parts.
  if (served) RunAndWait(deps_.loop, [] {});
}

}  // namespace modelhost
