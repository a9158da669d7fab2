#include "daemon/service/proto_convert.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/service/grpc_status.h"

namespace modelhost {
namespace {

constexpr int64_t kMostProtoSeconds = 315'576'000'000;  // Of google.protobuf.Duration.

bool IsSet(absl::Time time) {
  return time != absl::Time() && time != absl::InfiniteFuture() && time != absl::InfinitePast();
}

void ToProto(const LoadReport& report, v1::LoadReport* out) {
  out->set_source(report.source);
  modelhost::ToProto(report.duration, out->mutable_duration());
  for (const LoadPhase& phase : report.phases) {
    v1::LoadPhase* added = out->add_phases();
    added->set_name(phase.name);
    modelhost::ToProto(phase.duration, added->mutable_duration());
    added->set_bytes(phase.bytes);
  }
  out->set_disk_bytes(report.disk_bytes);
  out->set_shared_bytes(report.shared_bytes);
  out->set_restored_bytes(report.restored_bytes);
  out->set_restored_index(report.restored_index);
  for (const std::string& warning : report.warnings) out->add_warnings(SafeText(warning));
}

}  // namespace

void ToProto(const EventRecord& event, v1::Event* out) {
  modelhost::ToProto(event.when, out->mutable_when());
  out->set_what(event.what);
  out->set_model(SafeText(event.model));
  out->set_version(event.version);
  out->set_detail(SafeText(event.detail));
}

namespace {

void ToProto(const OperationResult& result, v1::OperationResult* out) {
  out->set_unchanged(result.unchanged);
  for (const LabelChange& change : result.changes) {
    *out->add_changes() = modelhost::ToProto(change);
  }
  modelhost::ToProto(result.load, out->mutable_load());
  modelhost::ToProto(result.flip, out->mutable_flip());
  out->set_draining_leases(result.draining_leases);
  out->set_digest(result.digest);
  out->set_bytes(result.bytes);
  out->set_linked_bytes(result.linked_bytes);
  out->set_removed_versions(result.removed);
  out->set_freed_bytes(result.freed_bytes);
  out->set_strategy(result.strategy);
  if (result.gap > absl::ZeroDuration()) modelhost::ToProto(result.gap, out->mutable_gap());
}

}  // namespace

void ToProto(absl::Time time, google::protobuf::Timestamp* out) {
  const int64_t seconds = absl::ToUnixSeconds(time);
  out->set_seconds(seconds);
  out->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
}

void ToProto(absl::Duration duration, google::protobuf::Duration* out) {
  const absl::Duration most = absl::Seconds(kMostProtoSeconds);
  duration = std::clamp(duration, -most, most);
  absl::Duration rest;
  out->set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
}

absl::StatusOr<absl::Duration> FromProto(const google::protobuf::Duration& duration) {
  if (duration.seconds() < 0 || duration.seconds() > kMostProtoSeconds || duration.nanos() < 0 ||
      duration.nanos() > 999'999'999) {
    return absl::InvalidArgumentError(absl::StrCat("duration of ", duration.seconds(), " s and ",
                                                   duration.nanos(),
                                                   " ns: negative or out of range"));
  }
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

v1::VersionPhase ToProto(Phase phase) {
  switch (phase) {
    case Phase::kStaged:
      return v1::STAGED;
    case Phase::kReserved:
      return v1::RESERVED;
    case Phase::kLoading:
      return v1::LOADING;
    case Phase::kReady:
      return v1::READY;
    case Phase::kDraining:
      return v1::DRAINING;
    case Phase::kUnloading:
      return v1::UNLOADING;
    case Phase::kFailed:
      return v1::FAILED;
    case Phase::kQuarantined:
      return v1::QUARANTINED;
  }
  return v1::VERSION_PHASE_UNSPECIFIED;
}

v1::Health ToProto(Health health) {
  switch (health) {
    case Health::kOk:
      return v1::OK;
    case Health::kDegraded:
      return v1::DEGRADED;
    case Health::kSuspect:
      return v1::SUSPECT;
  }
  return v1::HEALTH_UNSPECIFIED;
}

v1::OperationKind ToProto(OperationKind kind) {
  switch (kind) {
    case OperationKind::kLoad:
      return v1::LOAD;
    case OperationKind::kUnload:
      return v1::UNLOAD;
    case OperationKind::kSwap:
      return v1::SWAP;
    case OperationKind::kRollback:
      return v1::ROLLBACK;
    case OperationKind::kVerify:
      return v1::VERIFY;
    case OperationKind::kPublish:
      return v1::PUBLISH;
    case OperationKind::kDelete:
      return v1::DELETE;
    case OperationKind::kGc:
      return v1::GC;
  }
  return v1::OPERATION_KIND_UNSPECIFIED;
}

v1::OperationState ToProto(OperationState state) {
  switch (state) {
    case OperationState::kQueued:
      return v1::QUEUED;
    case OperationState::kRunning:
      return v1::RUNNING;
    case OperationState::kSucceeded:
      return v1::SUCCEEDED;
    case OperationState::kFailed:
      return v1::OPERATION_FAILED;
    case OperationState::kCancelled:
      return v1::CANCELLED;
    case OperationState::kAborted:
      return v1::ABORTED;
  }
  return v1::OPERATION_STATE_UNSPECIFIED;
}

v1::Version ToProto(const VersionSnapshot& version) {
  v1::Version out;
  out.set_model(SafeText(version.key.model));
  out.set_version(version.key.version);
  out.set_name(SafeText(version.name));
  const bool invalid = !version.invalid.empty();
  out.set_phase(invalid ? v1::INVALID : ToProto(version.phase));
  out.set_health(ToProto(version.health));
  if (version.health_reason != HealthReason::kNone) {
    out.set_health_reason(std::string(HealthReasonName(version.health_reason)));
  }
  out.set_reason(SafeText(invalid ? absl::string_view(version.invalid) : version.error.message()));
  for (const std::string& label : version.labels) out.add_labels(label);
  if (version.digest.has_value()) out.set_digest(version.digest->Hex());
  out.set_file_bytes(version.file_bytes);
  if (IsSet(version.created)) ToProto(version.created, out.mutable_created());
  for (const auto& [key, value] : version.requirements) {
    (*out.mutable_requirements())[SafeText(key)] = SafeText(value);
  }
  out.set_leases(version.leases);
  out.set_residency(std::string(ResidencyName(version.residency)));
  if (version.phase == Phase::kReserved || version.phase == Phase::kLoading) {
    out.set_load_phase(version.load_phase);
    out.set_load_bytes_done(version.load_bytes_done);
    out.set_load_bytes_total(version.load_bytes_total);
  }
  if (version.resident != nullptr) {
    const ResidentVersion& resident = *version.resident;
    out.set_format(resident.format);
    out.set_tier(std::string(HostTierName(resident.tier)));
    out.set_host_bytes(resident.host_bytes());
    out.set_locked_bytes(resident.locked_bytes());
    out.set_tensor_count(resident.tensor_count);
    out.set_tensor_bytes(resident.tensor_bytes);
    uint64_t on_devices = 0;
    for (const DeviceImage& image : resident.devices) {
      v1::DeviceCopy* added = out.add_devices();
      added->set_gpu(SafeText(image.gpu));
      added->set_mode(abi::DeviceModeName(image.mode));
      added->set_bytes(image.bytes());
      uint64_t segments = 0;
      for (const auto& region : image.regions) segments += region->segments().size();
      added->set_segments(segments);
      added->set_lost(image.lost());
      on_devices += image.bytes();
    }
    out.set_device_bytes(on_devices);
  }
  if (version.device_residency != DeviceResidency::kNone) {
    out.set_device_state(std::string(DeviceResidencyName(version.device_residency)));
  }
  return out;
}

void AddDetails(const VersionSnapshot& version, const std::vector<EventRecord>& events,
                v1::Version* out) {
  if (version.resident != nullptr) {
    const ResidentVersion& resident = *version.resident;
    ToProto(resident.report, out->mutable_last_load());
    if (resident.manifest != nullptr) {
      for (const ManifestFile& file : resident.manifest->files) {
        v1::FileInfo* added = out->add_files();
        added->set_path(SafeText(file.path));
        added->set_role(file.role);
        added->set_bytes(file.bytes);
        added->set_sha256(file.sha256.Hex());
      }
    }
    for (const auto& region : resident.regions) {
      v1::RegionInfo* added = out->add_regions();
      added->set_sha256(region->digest().Hex());
      added->set_bytes(region->bytes());
      added->set_kind(region->kind() == abi::RegionKind::kSealed ? "sealed" : "file");
      added->set_tier(std::string(HostTierName(region->tier())));
      added->set_resident_bytes(region->ResidentBytes());
    }
  }
  for (const EventRecord& event : events) {
    if (event.version == version.key.version) ToProto(event, out->add_events());
  }
}

v1::Model ToProto(const ModelSnapshot& model) {
  v1::Model out;
  out.set_name(SafeText(model.name));
  for (const auto& [name, record] : model.labels) {
    v1::Label* label = out.add_labels();
    label->set_model(SafeText(model.name));
    label->set_label(name);
    label->set_version(record.version);
    label->set_generation(record.generation);
    label->set_previous(record.previous);
    if (IsSet(record.changed)) ToProto(record.changed, label->mutable_changed());
    if (!record.digest.IsZero()) label->set_digest(record.digest.Hex());
  }
  for (const VersionSnapshot& version : model.versions) *out.add_versions() = ToProto(version);
  out.set_residency(std::string(ResidencyName(model.policy.residency)));
  out.set_required(model.policy.required);
  ToProto(model.policy.keep_previous, out.mutable_keep_previous());
  out.set_policy_error(SafeText(model.policy_error));
  out.set_device(SafeText(DevicePolicyText(model.policy.device)));
  for (const std::string& file : model.policy.requires_files) {
    out.add_requires_files(SafeText(file));
  }
  return out;
}

v1::LabelChange ToProto(const LabelChange& change) {
  v1::LabelChange out;
  out.set_model(change.model);
  out.set_label(change.label);
  out.set_from(change.from);
  out.set_to(change.to);
  out.set_generation(change.generation);
  return out;
}

v1::Failure FailureOf(const absl::Status& status) {
  v1::Failure failure;
  failure.set_code(static_cast<int32_t>(status.code()));
  failure.set_message(SafeText(status.message()));
  const v1::ErrorInfo info = ErrorInfoOf(status, {});
  failure.set_reason(info.reason());
  *failure.mutable_metadata() = info.metadata();
  return failure;
}

v1::Operation ToProto(const OperationSnapshot& operation) {
  v1::Operation out;
  out.set_id(OperationName(operation.id));
  out.set_kind(ToProto(operation.kind));
  out.set_state(ToProto(operation.state));
  out.set_model(SafeText(operation.model));
  out.set_version(operation.version);
  out.set_label(SafeText(operation.label));
  out.set_requested_by_uid(operation.requested_by_uid);
  out.set_trigger(operation.trigger);
  if (IsSet(operation.started)) ToProto(operation.started, out.mutable_started());
  out.set_sequence(operation.sequence);
  out.set_phase(operation.phase);
  out.set_bytes_done(operation.bytes_done);
  out.set_bytes_total(operation.bytes_total);
  out.set_message(SafeText(operation.message));
  out.set_attempts(operation.attempts);
  if (IsSet(operation.next_try)) ToProto(operation.next_try, out.mutable_next_try());
  if (!operation.finished_state()) return out;
  if (IsSet(operation.finished)) ToProto(operation.finished, out.mutable_finished());
  if (!operation.status.ok()) *out.mutable_failure() = FailureOf(operation.status);
  if (operation.successor != 0) {
    out.set_successor(OperationName(operation.successor));
    (*out.mutable_failure()->mutable_metadata())["successor"] = out.successor();
    out.mutable_failure()->set_reason("SUPERSEDED");
  }
  ToProto(operation.result, out.mutable_result());
  return out;
}

v1::SwapPlan ToProto(const SwapPlan& plan) {
  v1::SwapPlan out;
  for (const SwapPlanRow& row : plan.rows) {
    v1::SwapPlanRow* added = out.add_rows();
    added->set_model(row.model);
    added->set_from(row.from);
    added->set_to(row.to);
    added->set_to_phase(row.to_phase);
    added->set_need_bytes(row.need_bytes);
    added->set_shared_bytes(row.shared_bytes);
    added->set_old_leaves_first(row.old_leaves_first);
    if (row.old_leaves_first) out.set_downtime(true);
  }
  for (const SwapPlan::Pool& pool : plan.pools) {
    v1::PoolPlan* added = out.add_pools();
    added->set_name(pool.name);
    added->set_decides(pool.decides);
    added->set_need_bytes(pool.need_bytes);
    added->set_unlimited(pool.limit_bytes == UINT64_MAX);
    if (!added->unlimited()) {
      added->set_limit_bytes(pool.limit_bytes);
      added->set_free_bytes(pool.free_bytes);
    }
    added->set_comes_bytes(pool.comes_bytes);
    added->set_peak_bytes(pool.peak_bytes);
    added->set_fits(pool.fits);
  }
  for (const VersionKey& key : plan.evict) {
    v1::SwapTarget* added = out.add_evict();
    added->set_model(key.model);
    added->set_version(key.version);
  }
  out.set_strategy(plan.strategy);
  out.set_waits(plan.waits);
  if (!plan.refused.ok()) *out.mutable_refused() = FailureOf(plan.refused);
  out.set_need_bytes(plan.need_bytes);
  out.set_unlimited(plan.free_bytes == UINT64_MAX);
  if (!out.unlimited()) out.set_free_bytes(plan.free_bytes);
  out.set_fits(plan.fits);
  return out;
}

v1::Lease ToProto(const Lease& lease, const Session* session) {
  v1::Lease out;
  out.set_id(lease.id);
  out.set_session(lease.session);
  out.set_model(SafeText(lease.key.model));
  out.set_version(lease.key.version);
  out.set_label(SafeText(lease.label));
  out.set_transport(lease.transport);
  if (IsSet(lease.since)) ToProto(lease.since, out.mutable_since());
  if (session != nullptr) {
    out.set_pid(session->peer.pid);
    out.set_uid(session->peer.uid);
    out.set_comm(SafeText(session->peer.comm));
  }
  out.set_stale(lease.stale_for.has_value());
  if (lease.stale_for.has_value()) ToProto(*lease.stale_for, out.mutable_stale_for());
  out.set_released(lease.released);
  out.set_gpu(SafeText(lease.gpu));
  return out;
}

v1::ClientInfo ToProto(const Session& session) {
  v1::ClientInfo out;
  out.set_session(session.id);
  out.set_pid(session.peer.pid);
  out.set_uid(session.peer.uid);
  out.set_comm(SafeText(session.peer.comm));
  out.set_transport(session.transport);
  if (IsSet(session.since)) ToProto(session.since, out.mutable_since());
  return out;
}

v1::DeletePlan ToProto(const DeletePlan& plan) {
  v1::DeletePlan out;
  out.set_model(SafeText(plan.key.model));
  out.set_version(plan.key.version);
  out.set_files(plan.use.files.size());
  out.set_bytes(plan.use.bytes());
  out.set_freed_bytes(FreedBytes(std::span(&plan.use, 1)));
  for (const std::string& warning : plan.warnings) out.add_warnings(SafeText(warning));
  return out;
}

v1::GarbagePlan ToProto(const GarbagePlan& plan) {
  v1::GarbagePlan out;
  for (const GarbageItem& item : plan.items) {
    v1::GarbageItem* added = out.add_items();
    added->set_kind(item.kind);
    added->set_model(SafeText(item.key.model));
    added->set_version(item.key.version);
    added->set_name(SafeText(item.name));
    added->set_bytes(item.bytes);
    added->set_reason(SafeText(item.reason));
  }
  out.set_bytes(plan.bytes);
  out.set_freed_bytes(plan.freed_bytes);
  return out;
}

SwapRequest FromProto(const v1::SwapRequest& request) {
  SwapRequest out;
  for (const v1::SwapTarget& target : request.targets()) {
    out.targets.push_back({target.model(), target.version()});
  }
  if (!request.label().empty()) out.label = request.label();
  if (request.has_if_current()) out.if_current = request.if_current();
  if (!request.strategy().empty()) out.strategy = request.strategy();
  out.allow_downtime = request.allow_downtime();
  return out;
}

PublishRequest FromProto(const v1::PublishBegin& begin) {
  PublishRequest out;
  out.model = begin.model();
  out.version = begin.version();
  out.files.reserve(static_cast<size_t>(begin.files_size()));
  for (const v1::PublishFile& file : begin.files())
    out.files.push_back({file.path(), file.bytes()});
  out.residency = begin.residency();
  out.requirements = {begin.requirements().begin(), begin.requirements().end()};
  return out;
}

std::string OperationName(OperationId id) { return absl::StrCat("op-", id); }

absl::StatusOr<OperationId> ParseOperationName(absl::string_view name) {
  absl::string_view digits = name;
  OperationId id = 0;
  if (absl::ConsumePrefix(&digits, "op-") && !digits.empty() && digits[0] != '0' &&
      std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) &&
      absl::SimpleAtoi(digits, &id)) {
    return id;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("operation \"", name.substr(0, 32), "\": not an id (they look like op-12)"));
}

}  // namespace modelhost
