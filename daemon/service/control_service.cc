// What all handlers share: rights, streams of operations.
#include "daemon/service/control_service.h"

#include "absl/cleanup/cleanup.h"
#include "daemon/service/operation_queue.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {

absl::Status ControlService::CheckMayRead(const Peer& peer,
                                          const OperationSnapshot& operation) const {
  if (auto status = CheckMayRead(peer, operation.model); !status.ok()) return status;
  for (const LabelChange& change : operation.result.changes) {
    if (auto status = CheckMayRead(peer, change.model); !status.ok()) return status;
  }
  return absl::OkStatus();
}

grpc::Status ControlService::RunOperation(grpc::ServerContext& context, absl::string_view verb,
                                          const ErrorMetadata& about, const Start& start,
                                          grpc::ServerWriter<v1::OperationEvent>& writer) {
  ErrorMetadata metadata = about;
  metadata["verb"] = std::string(verb);
  const auto peer = Admit(context, Right::kCommand, verb, CallGuard::Kind::kCommand);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), metadata);
  const auto operation = RunAndWait(deps_.loop, [&] { return start(deps_.manager, peer->uid); });
  if (!operation.ok()) return ToGrpcStatus(operation.status(), metadata);
  return StreamOperation(context, *operation, writer);
}

absl::Status ControlService::FollowOperation(
    const grpc::ServerContext& context, OperationId operation,
    const std::function<bool(const OperationSnapshot&)>& tell) {
  auto queue = std::make_shared<OperationQueue>();
  const auto watch = RunAndWait(deps_.loop, [&] {
    return deps_.manager.SubscribeOperation(
        operation, [queue](const OperationSnapshot& snapshot) { queue->Push(snapshot); });
  });
  if (!watch.ok()) return watch.status();
  const absl::Cleanup unsubscribe = [&] {
    RunAndWait(deps_.loop, [&] { deps_.manager.UnsubscribeOperation(*watch); });
  };
  while (true) {
    if (auto status = StillWanted(context); !status.ok()) return status;
    const std::optional<OperationSnapshot> step = queue->Pop(kStreamTick);
    if (!step.has_value()) continue;
    if (!tell(*step)) return absl::CancelledError("the caller has gone");
    if (step->finished_state()) return absl::OkStatus();
  }
}

grpc::Status ControlService::StreamOperation(grpc::ServerContext& context, OperationId operation,
                                             grpc::ServerWriter<v1::OperationEvent>& writer) {
  const absl::Status status =
      FollowOperation(context, operation, [&](const OperationSnapshot& step) {
        v1::OperationEvent event;
        *event.mutable_operation() = ToProto(step);
        return writer.Write(event);
      });
  return ToGrpcStatus(status, {{"operation", OperationName(operation)}});
}

}  // namespace modelhost
