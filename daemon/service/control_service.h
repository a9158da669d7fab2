// The Control service: each RPC is a thin, checked call of the ModelManager.
//
// Handlers run on gRPC's threads and ask the control thread (RunAndWait), never the other way
// round. Every call first finds out who asks, from the connection, and what that peer may do, and
// takes its place (CallGuard); refusals are counted. What is about one model is told only to those
// who may read that model; who reads some model may see the daemon's own state. A stream looks at
// least every kStreamTick whether its caller has gone or the daemon stops; losing a stream never
// stops the operation that it tells of.
//
// Errors are ToGrpcStatus of the manager's, and besides: UNAUTHENTICATED (not a known connection),
// PERMISSION_DENIED (names the verb, the uid and the groups), RESOURCE_EXHAUSTED (too many
// calls or streams), UNAVAILABLE (stopping), INVALID_ARGUMENT (a malformed request).
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"
#include "daemon/service/call_guard.h"
#include "daemon/service/config_control.h"
#include "daemon/service/connection_table.h"
#include "daemon/service/grpc_status.h"
#include "daemon/service/model_watcher.h"
#include "daemon/store/publish.h"
#include "modelhost/v1/control.grpc.pb.h"

namespace modelhost {

// What GetStatus says about the daemon itself, and the groups that refusals name.
struct ServerInfo {
  std::string version;
  std::string revision;
  std::string runtime_dir;
  std::string metrics_address;  // Empty when off.
  int32_t pid = 0;
  std::vector<std::string> read_groups;
  std::vector<std::string> admin_groups;
};

class ControlService final : public v1::Control::Service {
 public:
  static constexpr absl::Duration kStreamTick = absl::Milliseconds(100);
  static constexpr size_t kMostPublishFiles = 4096;
  static constexpr size_t kMostChunkBytes = size_t{1} << 20;
  static constexpr absl::Duration kPublishIdle = absl::Seconds(60);

  // All outlive the service.
  struct Deps {
    ModelManager& manager;
    ControlLoop& loop;
    Clock& clock;
    const AccessPolicy& access;
    Publisher& publisher;
    const ConnectionTable& connections;
    CallGuard& calls;
    ModelWatcher& watcher;
    ConfigControl& config;
    const ServerInfo& info;
  };
  explicit ControlService(Deps deps) : deps_(deps) {}

  // From now on streams end and calls are answered UNAVAILABLE. Any thread.
  void Stop() { stopping_ = true; }

  // Whether this connection's peer may have one more reflection stream. Any thread but the loop's.
  absl::Status AdmitReflection(const grpc::ServerContextBase& context) {
    return Admit(context, Right::kRead, "reflection", CallGuard::Kind::kReflection).status();
  }

  // control_service_read.cc
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest* request,
                         v1::GetStatusResponse* response) override;
  grpc::Status ListModels(grpc::ServerContext* context, const v1::ListModelsRequest* request,
                          v1::ListModelsResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        v1::Model* response) override;
  grpc::Status ListVersions(grpc::ServerContext* context, const v1::ListVersionsRequest* request,
                            v1::ListVersionsResponse* response) override;
  grpc::Status GetVersion(grpc::ServerContext* context, const v1::GetVersionRequest* request,
                          v1::Version* response) override;
  grpc::Status WatchModels(grpc::ServerContext* context, const v1::WatchModelsRequest* request,
                           grpc::ServerWriter<v1::Model>* writer) override;
  grpc::Status GetOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                            v1::Operation* response) override;
  grpc::Status ListOperations(grpc::ServerContext* context,
                              const v1::ListOperationsRequest* request,
                              v1::ListOperationsResponse* response) override;
  grpc::Status WatchOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                              grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status ListClients(grpc::ServerContext* context, const v1::ListClientsRequest* request,
                           v1::ListClientsResponse* response) override;
  grpc::Status ListLeases(grpc::ServerContext* context, const v1::ListLeasesRequest* request,
                          v1::ListLeasesResponse* response) override;

  grpc::Status GetConfig(grpc::ServerContext* context, const v1::GetConfigRequest* request,
                         v1::Config* response) override;

  // control_service_verbs.cc
  grpc::Status ReloadConfig(grpc::ServerContext* context, const v1::ReloadConfigRequest* request,
                            v1::ReloadConfigResponse* response) override;
  grpc::Status Verify(grpc::ServerContext* context, const v1::VerifyRequest* request,
                      grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status Load(grpc::ServerContext* context, const v1::LoadRequest* request,
                    grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status Unload(grpc::ServerContext* context, const v1::UnloadRequest* request,
                      grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status Swap(grpc::ServerContext* context, const v1::SwapRequest* request,
                    grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status PlanSwap(grpc::ServerContext* context, const v1::SwapRequest* request,
                        v1::SwapPlan* response) override;
  grpc::Status Rollback(grpc::ServerContext* context, const v1::RollbackRequest* request,
                        grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status SetLabel(grpc::ServerContext* context, const v1::SetLabelRequest* request,
                        v1::LabelChange* response) override;
  grpc::Status RemoveLabel(grpc::ServerContext* context, const v1::RemoveLabelRequest* request,
                           v1::LabelChange* response) override;
  grpc::Status Rescan(grpc::ServerContext* context, const v1::RescanRequest* request,
                      v1::RescanResponse* response) override;
  grpc::Status CancelOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                               v1::Operation* response) override;
  grpc::Status EvictLease(grpc::ServerContext* context, const v1::EvictLeaseRequest* request,
                          v1::Lease* response) override;

  // control_service_remove.cc
  grpc::Status DeleteVersion(grpc::ServerContext* context, const v1::DeleteVersionRequest* request,
                             grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status PlanDelete(grpc::ServerContext* context, const v1::DeleteVersionRequest* request,
                          v1::DeletePlan* response) override;
  grpc::Status CollectGarbage(grpc::ServerContext* context,
                              const v1::CollectGarbageRequest* request,
                              grpc::ServerWriter<v1::OperationEvent>* writer) override;
  grpc::Status PlanGarbage(grpc::ServerContext* context, const v1::CollectGarbageRequest* request,
                           v1::GarbagePlan* response) override;

  // control_service_events.cc
  grpc::Status WatchEvents(grpc::ServerContext* context, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::Event>* writer) override;

  // control_service_publish.cc
  grpc::Status Publish(grpc::ServerContext* context, grpc::ServerReader<v1::PublishRequest>* reader,
                       v1::PublishResponse* response) override;

 private:
  enum class Right { kRead, kCommand };

  // Who asks, if that peer has the right and there is a place for the call.
  absl::StatusOr<Peer> Admit(const grpc::ServerContextBase& context, Right right,
                             absl::string_view verb, CallGuard::Kind kind = CallGuard::Kind::kCall);
  // Control thread: OK, or PERMISSION_DENIED for the one model.
  absl::Status CheckMayRead(const Peer& peer, const std::string& model) const;
  absl::Status CheckMayRead(const Peer& peer, const OperationSnapshot& operation) const;
  // OK, CANCELLED (the caller has gone) or UNAVAILABLE (the daemon stops).
  absl::Status StillWanted(const grpc::ServerContext& context) const;

  using Start = std::function<absl::StatusOr<OperationId>(ModelManager&, uint32_t uid)>;
  // Admit, start on the control thread, tell until it is finished.
  grpc::Status RunOperation(grpc::ServerContext& context, absl::string_view verb,
                            const ErrorMetadata& about, const Start& start,
                            grpc::ServerWriter<v1::OperationEvent>& writer);
  // Hands every step to `tell` until the operation is finished; false from `tell`: nobody listens.
  absl::Status FollowOperation(const grpc::ServerContext& context, OperationId operation,
                               const std::function<bool(const OperationSnapshot&)>& tell);
  grpc::Status StreamOperation(grpc::ServerContext& context, OperationId operation,
                               grpc::ServerWriter<v1::OperationEvent>& writer);

  // Waits for a result that the control thread gives later. The work goes on when the caller
  // leaves.
  template <typename T>
  absl::StatusOr<T> Await(const grpc::ServerContext& context,
                          std::function<void(std::function<void(absl::StatusOr<T>)>)> start);

  absl::StatusOr<PublishResult> ReceiveFiles(grpc::ServerContext& context,
                                             grpc::ServerReader<v1::PublishRequest>& reader,
                                             const PublishRequest& request, OperationId operation);

  const Deps deps_;
  std::atomic<bool> stopping_{false};
};

}  // namespace modelhost
