// The Worker service: leases for programs in any language.
//
// Session streams hold no thread: gRPC's callbacks post to the control thread, which owns the
// WorkerSession of each and tells gRPC what to do next. Resolve and GetIndex run on gRPC's threads,
// as the handlers of Control do. Errors are those of Control.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"
#include "daemon/service/admission.h"
#include "daemon/service/grpc_status.h"
#include "daemon/service/worker_sessions.h"
#include "modelhost/v1/worker.grpc.pb.h"

namespace modelhost {

// Sessions come as bytes: how many they are is looked at before they are parsed.
class WorkerService final : public v1::Worker::WithRawCallbackMethod_Session<v1::Worker::Service> {
 public:
  // All outlive the service.
  struct Deps {
    ModelManager& manager;
    ControlLoop& loop;
    Clock& clock;
    Admission& admission;
    WorkerSessions& sessions;
    const ServerInfo& info;
  };
  explicit WorkerService(Deps deps) : deps_(deps) {}

  // Tells every stream that the daemon stops, and ends it. Not on the loop's thread.
  void EndSessions();

  using v1::Worker::WithRawCallbackMethod_Session<v1::Worker::Service>::Session;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::Status Resolve(grpc::ServerContext* context, const v1::ResolveRequest* request,
                       v1::Resolved* response) override;
  grpc::Status GetIndex(grpc::ServerContext* context, const v1::GetIndexRequest* request,
                        grpc::ServerWriter<v1::IndexPage>* writer) override;

 private:
  class Stream;
  struct Found {
    VersionSnapshot version;
    uint64_t generation = 0;
    uint64_t epoch = 0;
  };

  // Control thread.
  void Begin(grpc::CallbackServerContext& context, const Peer& peer, Stream& stream);
  absl::StatusOr<Found> Find(const Peer& peer, const AcquireRef& ref) const;

  const Deps deps_;
  std::atomic<WorkerSessions::Key> next_key_{1};
};

}  // namespace modelhost
