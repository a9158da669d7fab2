// Registry values as messages, and back. Pure, any thread; only AddDetails looks at memory
// (mincore), which is not for the control thread.
//
// Text that came from outside (names on disk, process names, reasons) is made UTF-8 here: a
// protobuf string that is not UTF-8 fails the whole reply. Times that are not set stay unset.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/registry/model_manager.h"
#include "modelhost/v1/control.pb.h"
#include "modelhost/v1/types.pb.h"

namespace modelhost {

void ToProto(absl::Time time, google::protobuf::Timestamp* out);
void ToProto(absl::Duration duration, google::protobuf::Duration* out);
// INVALID_ARGUMENT unless it is canonical and not negative.
absl::StatusOr<absl::Duration> FromProto(const google::protobuf::Duration& duration);

v1::VersionPhase ToProto(Phase phase);
v1::Health ToProto(Health health);
v1::OperationKind ToProto(OperationKind kind);
v1::OperationState ToProto(OperationState state);

// Without the details of GetVersion.
v1::Version ToProto(const VersionSnapshot& version);
// Last load, files and regions of a loaded version, and the events that are about it.
void AddDetails(const VersionSnapshot& version, const std::vector<EventRecord>& events,
                v1::Version* out);
v1::Model ToProto(const ModelSnapshot& model);
v1::LabelChange ToProto(const LabelChange& change);
v1::Operation ToProto(const OperationSnapshot& operation);
v1::SwapPlan ToProto(const SwapPlan& plan);
v1::DeletePlan ToProto(const DeletePlan& plan);
v1::GarbagePlan ToProto(const GarbagePlan& plan);
// Without sequence, epoch and losses, which only a stream of events has.
void ToProto(const EventRecord& event, v1::Event* out);
// Of an error: the code, the text, and the numbers of a refusal.
v1::Failure FailureOf(const absl::Status& status);
// `session` may be null: the lease then has no process.
v1::Lease ToProto(const Lease& lease, const Session* session);
// Without its leases.
v1::ClientInfo ToProto(const Session& session);
void ToProto(const DesiredSnapshot& desired, v1::DesiredStatus* out);
// Without what only the server knows (version, addresses, pid).
void ToProto(const StatusSnapshot& status, absl::Time now, v1::GetStatusResponse* out);

SwapRequest FromProto(const v1::SwapRequest& request);
PublishRequest FromProto(const v1::PublishBegin& begin);

// "op-12" and back. INVALID_ARGUMENT for anything else.
std::string OperationName(OperationId id);
absl::StatusOr<OperationId> ParseOperationName(absl::string_view name);

}  // namespace modelhost
