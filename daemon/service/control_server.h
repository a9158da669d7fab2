// control.sock, behind the accept: gRPC over connections that we accepted ourselves, so that the
// kernel tells who is there.
//
// Serves modelhost.v1.Control and Worker, grpc.health.v1.Health and server reflection. Threads,
// connections, calls, streams and message sizes are bounded, and so is the time that a caller may
// take to be told something; a peer that says nothing is pinged and dropped.
#pragma once

#include <grpcpp/server.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"
#include "daemon/service/admission.h"
#include "daemon/service/call_guard.h"
#include "daemon/service/config_control.h"
#include "daemon/service/connection_table.h"
#include "daemon/service/control_service.h"
#include "daemon/service/health_reporter.h"
#include "daemon/service/model_watcher.h"
#include "daemon/service/worker_service.h"
#include "daemon/service/worker_sessions.h"
#include "daemon/store/publish.h"

namespace modelhost {

class ControlServer {
 public:
  // All outlive the server. `health`, `watcher` and `workers` are observers of `manager`; whoever
  // makes the manager adds them.
  struct Deps {
    ModelManager& manager;
    ControlLoop& loop;
    Clock& clock;
    const AccessPolicy& access;
    Publisher& publisher;
    HealthReporter& health;
    ModelWatcher& watcher;
    ConfigControl& config;
    WorkerSessions& workers;
  };
  using Interceptors =
      std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>;

  ControlServer(Deps deps, ServerInfo info, Interceptors interceptors,
                CallGuard::Options call_options = {}, size_t most_connections_of_uid = SIZE_MAX);
  ~ControlServer();  // Shutdown(0), if it was not.
  ControlServer(const ControlServer&) = delete;

  // Once. INTERNAL: gRPC would not start. RLIMIT_NOFILE should be raised before.
  absl::Status Start();

  // Takes a connection that was just accepted (non-blocking). `peer` is what the kernel said of it.
  // One that cannot be served (too many) is counted and logged. `socket` is lent: closing it is the
  // caller's, who may not have the time (FdCloser). Control thread.
  void AddConnection(const UniqueFd& socket, const Peer& peer);

  // Ends streams, lets other calls finish for `grace`, cancels the rest, waits for them. The
  // control loop must run meanwhile: never on its thread, once there was a connection.
  void Shutdown(absl::Duration grace);

 private:
  const Deps deps_;
  const ServerInfo info_;
  ConnectionTable connections_;
  CallGuard calls_;
  Admission admission_;
  ControlService service_;
  WorkerService workers_;
  Interceptors interceptors_;  // Until Start.

  absl::Mutex mutex_;
  std::unique_ptr<grpc::Server> server_ ABSL_GUARDED_BY(mutex_);
  bool accepting_ ABSL_GUARDED_BY(mutex_) = false;
  bool served_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace modelhost
