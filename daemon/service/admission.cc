#include "daemon/service/admission.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/service/grpc_status.h"

namespace modelhost {
namespace {

std::string GroupsText(const std::vector<std::string>& groups) {
  if (groups.empty()) return "the daemon's own user or root";
  return absl::StrCat("group ", absl::StrJoin(groups, " or "));
}

}  // namespace

absl::StatusOr<Peer> Admission::PeerOf(const grpc::ServerContextBase& context,
                                       absl::string_view verb) const {
  std::optional<Peer> peer = deps_.connections.Find(context.peer());
  if (peer.has_value()) return *std::move(peer);
  return absl::UnauthenticatedError(
      absl::StrCat(verb, ": the kernel did not say who is at the other end (connect again)"));
}

absl::StatusOr<Peer> Admission::Admit(const grpc::ServerContextBase& context, Right right,
                                      absl::string_view verb, CallGuard::Kind kind) {
  auto peer = PeerOf(context, verb);
  if (!peer.ok()) return peer;
  const bool command = right == Right::kCommand;
  const bool may_command = deps_.access.MayCommand(*peer);
  // Most may read by the daemon's policy; only for others the models' own are looked at.
  const bool allowed =
      may_command || (!command && (deps_.access.MayRead(*peer) || RunAndWait(deps_.loop, [&] {
                                     return deps_.manager.MayReadSome(*peer);
                                   })));
  if (!allowed) return NoRight(*peer, right, verb);
  if (auto status = Enter(context, *peer, may_command, verb, kind); !status.ok()) return status;
  return peer;
}

absl::Status Admission::AdmitOnLoop(const grpc::ServerContextBase& context, const Peer& peer,
                                    Right right, absl::string_view verb, CallGuard::Kind kind) {
  const bool may_command = deps_.access.MayCommand(peer);
  const bool allowed = may_command || (right == Right::kRead && deps_.manager.MayReadSome(peer));
  if (!allowed) return NoRight(peer, right, verb);
  return Enter(context, peer, may_command, verb, kind);
}

absl::Status Admission::NoRight(const Peer& peer, Right right, absl::string_view verb) const {
  const bool command = right == Right::kCommand;
  deps_.loop.Post([&manager = deps_.manager, peer, what = std::string(verb)] {
    manager.ReportRefused(peer, what);
  });
  std::vector<std::string> groups = deps_.info.admin_groups;
  if (!command) {
    groups.insert(groups.begin(), deps_.info.read_groups.begin(), deps_.info.read_groups.end());
  }
  return absl::PermissionDeniedError(
      absl::StrCat(verb, ": uid ", peer.uid, " may not ", command ? "command" : "read", ": needs ",
                   GroupsText(groups), " (an administrator can add the user to it)"));
}

absl::Status Admission::Enter(const grpc::ServerContextBase& context, const Peer& peer,
                              bool may_command, absl::string_view verb, CallGuard::Kind kind) {
  if (stopping_) return absl::UnavailableError("the daemon is stopping");
  const absl::Status status = deps_.calls.Enter(context, kind, peer, may_command);
  if (status.ok()) return status;
  if (absl::IsResourceExhausted(status)) {
    deps_.loop.Post([&manager = deps_.manager, peer, what = std::string(verb)] {
      manager.ReportRefused(peer, what, RefusedFor::kCalls);
    });
  }
  return absl::Status(status.code(), absl::StrCat(verb, ": ", status.message()));
}

absl::Status Admission::CheckMayRead(const Peer& peer, const std::string& model) const {
  if (deps_.manager.MayReadModel(peer, model)) return absl::OkStatus();
  deps_.manager.ReportRefused(peer, absl::StrCat("read ", SafeText(model, 64)));
  return absl::PermissionDeniedError(
      absl::StrCat(SafeText(model, 64), ": uid ", peer.uid,
                   " may not read this model (its read_groups, or those of [access], decide)"));
}

absl::Status Admission::StillWanted(const grpc::ServerContext& context) const {
  if (context.IsCancelled()) return absl::CancelledError("the caller has gone");
  if (stopping_) return absl::UnavailableError("the daemon is stopping");
  return absl::OkStatus();
}

}  // namespace modelhost
