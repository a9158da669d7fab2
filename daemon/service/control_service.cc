// What all handlers share: rights, streams of operations.
#include "daemon/service/control_service.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/service/operation_queue.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

std::string GroupsText(const std::vector<std::string>& groups) {
  if (groups.empty()) return "the daemon's own user or root";
  return absl::StrCat("group ", absl::StrJoin(groups, " or "));
}

}  // namespace

absl::StatusOr<Peer> ControlService::Admit(const grpc::ServerContextBase& context, Right right,
                                           absl::string_view verb, CallGuard::Kind kind) {
  std::optional<Peer> peer = deps_.connections.Find(context.peer());
  if (!peer.has_value()) {
    return absl::UnauthenticatedError(
        absl::StrCat(verb, ": the kernel did not say who is at the other end (connect again)"));
  }
  const bool command = right == Right::kCommand;
  const bool may_command = deps_.access.MayCommand(*peer);
  // Most may read by the daemon's policy; only for others the models' own are looked at.
  const bool allowed =
      may_command || (!command && (deps_.access.MayRead(*peer) || RunAndWait(deps_.loop, [&] {
                                     return deps_.manager.MayReadSome(*peer);
                                   })));
  if (!allowed) {
    deps_.loop.Post([&manager = deps_.manager, peer = *peer, what = std::string(verb)] {
      manager.ReportRefused(peer, what);
    });
    std::vector<std::string> groups = deps_.info.admin_groups;
    if (!command) {
      groups.insert(groups.begin(), deps_.info.read_groups.begin(), deps_.info.read_groups.end());
    }
    return absl::PermissionDeniedError(
        absl::StrCat(verb, ": uid ", peer->uid, " may not ", command ? "command" : "read",
                     ": needs ", GroupsText(groups), " (an administrator can add the user to it)"));
  }
  if (stopping_) return absl::UnavailableError("the daemon is stopping");
  if (auto status = deps_.calls.Enter(context, kind, *peer, may_command); !status.ok()) {
    if (absl::IsResourceExhausted(status)) {
      deps_.loop.Post([&manager = deps_.manager, peer = *peer, what = std::string(verb)] {
        manager.ReportRefused(peer, what, RefusedFor::kCalls);
      });
    }
    return absl::Status(status.code(), absl::StrCat(verb, ": ", status.message()));
  }
  return *std::move(peer);
}

absl::Status ControlService::CheckMayRead(const Peer& peer, const std::string& model) const {
  if (deps_.manager.MayReadModel(peer, model)) return absl::OkStatus();
  deps_.manager.ReportRefused(peer, absl::StrCat("read ", SafeText(model, 64)));
  return absl::PermissionDeniedError(
      absl::StrCat(SafeText(model, 64), ": uid ", peer.uid,
                   " may not read this model (its read_groups, or those of [access], decide)"));
}

absl::Status ControlService::CheckMayRead(const Peer& peer,
                                          const OperationSnapshot& operation) const {
  if (auto status = CheckMayRead(peer, operation.model); !status.ok()) return status;
  for (const LabelChange& change : operation.result.changes) {
    if (auto status = CheckMayRead(peer, change.model); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ControlService::StillWanted(const grpc::ServerContext& context) const {
  if (context.IsCancelled()) return absl::CancelledError("the caller has gone");
  if (stopping_) return absl::UnavailableError("the daemon is stopping");
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
