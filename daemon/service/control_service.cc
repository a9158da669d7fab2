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

std::optional<ControlService::Slot> ControlService::Slot::Take(std::atomic<int>& used, int most) {
  if (++used > most) {
    --used;
    return std::nullopt;
  }
  return Slot(&used);
}

absl::StatusOr<Peer> ControlService::Admit(const grpc::ServerContext& context, Right right,
                                           absl::string_view verb) {
  std::optional<Peer> peer = deps_.connections.Find(context.peer());
  if (!peer.has_value()) {
    return absl::UnauthenticatedError(
        absl::StrCat(verb, ": the kernel did not say who is at the other end (connect again)"));
  }
  const bool command = right == Right::kCommand;
  const bool allowed = command ? deps_.access.MayCommand(*peer) : deps_.access.MayRead(*peer);
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
  return *std::move(peer);
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
  const auto peer = Admit(context, Right::kCommand, verb);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), metadata);
  const auto slot = Slot::Take(streams_, kMostStreams);
  if (!slot.has_value()) {
    return ToGrpcStatus(absl::ResourceExhaustedError(absl::StrCat(
                            verb, ": ", kMostStreams, " streams are open (try again later)")),
                        metadata);
  }
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
