// What GetStatus says, as messages.
#include <map>

#include "absl/strings/str_cat.h"
#include "daemon/service/grpc_status.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

bool WasSet(absl::Time time) {
  return time != absl::Time() && time != absl::InfiniteFuture() && time != absl::InfinitePast();
}

}  // namespace

void ToProto(const DesiredSnapshot& desired, v1::DesiredStatus* out) {
  out->set_file(SafeText(desired.file));
  out->set_state(std::string(DesiredFileStateName(desired.state)));
  out->set_error(SafeText(desired.error));
  out->set_wanted(desired.in_sync + desired.pending + desired.failed);
  out->set_in_sync(desired.in_sync);
  out->set_pending(desired.pending);
  out->set_failed(desired.failed);
  out->set_drifting(desired.drifting);
  if (WasSet(desired.last_read)) ToProto(desired.last_read, out->mutable_last_read());
  if (WasSet(desired.last_converged))
    ToProto(desired.last_converged, out->mutable_last_converged());
  for (const DesiredRow& row : desired.rows) {
    v1::DesiredLabel* added = out->add_labels();
    added->set_model(row.model);
    added->set_label(row.label);
    added->set_want(row.want);
    added->set_have(row.have);
    added->set_state(std::string(DesiredLabelStateName(row.state)));
    added->set_drifting(row.drifting);
    added->set_reason(SafeText(row.reason));
    added->set_line(row.line);
  }
}

namespace {

void ToProto(const DeviceTierSnapshot& devices, const std::map<std::string, uint64_t>& importers,
             v1::GetStatusResponse* out) {
  // One word for the machine: the first GPU that is of use says it.
  abi::DeviceMode mode = abi::DeviceMode::kNone;
  for (const DeviceTierSnapshot::Gpu& gpu : devices.gpus) {
    if (mode == abi::DeviceMode::kNone && gpu.usable) mode = gpu.mode;
    v1::DeviceStatus* added = out->add_devices();
    const DeviceInfo& info = gpu.report.info;
    added->set_uuid(SafeText(info.uuid));
    added->set_mode(abi::DeviceModeName(gpu.mode));
    added->set_reason(SafeText(gpu.report.reason));
    added->set_name(SafeText(info.name));
    added->set_driver(
        absl::StrCat(info.driver_version / 1000, ".", info.driver_version % 1000 / 10));
    added->set_limits(SafeText(gpu.report.limits));
    added->set_usable(gpu.usable);
    added->set_problem(SafeText(gpu.problem));
    added->set_total_bytes(info.total_bytes);
    added->set_budget_bytes(gpu.limit_bytes);
    added->set_reserved_bytes(gpu.reserved_bytes);
    added->set_copies(gpu.copies);
    added->set_copied_bytes(gpu.copied_bytes);
    const auto held = importers.find(info.uuid);
    added->set_importers(held == importers.end() ? 0 : held->second);
    added->set_lost_copies(gpu.lost);
  }
  out->set_device_mode(abi::DeviceModeName(mode));
  if (mode != abi::DeviceMode::kNone) return;
  out->set_device_reason(SafeText(!devices.known            ? "still looking for GPUs"
                                  : !devices.reason.empty() ? devices.reason
                                                            : "no GPU is of use, see each"));
}

}  // namespace

void ToProto(const StatusSnapshot& status, absl::Time now, v1::GetStatusResponse* out) {
  out->set_epoch(status.epoch);
  if (WasSet(status.started)) {
    ToProto(status.started, out->mutable_started());
    ToProto(std::max(absl::ZeroDuration(), now - status.started), out->mutable_uptime());
  }
  out->set_ready(status.ready);
  for (const std::string& reason : status.not_ready) out->add_not_ready(SafeText(reason));
  out->set_store(SafeText(status.store_root));
  out->set_store_error(SafeText(status.store_error));
  for (const StatusSnapshot::Pool& pool : status.pools) {
    v1::BudgetPool* added = out->add_pools();
    added->set_name(pool.name);
    added->set_unlimited(pool.limit == UINT64_MAX);
    if (!added->unlimited()) added->set_limit_bytes(pool.limit);
    added->set_reserved_bytes(pool.reserved);
  }
  out->set_memlock_policy(status.memlock_policy);
  out->set_file_protection(status.file_protection);
  out->set_clients(status.clients);
  out->set_leases(status.leases);
  out->set_models(status.models);
  out->set_invalid_transitions(status.invalid_transitions);
  out->set_journal_error(SafeText(status.journal_error));
  ToProto(status.desired, out->mutable_desired());
  ToProto(status.devices, status.importers, out);
  v1::RestartStatus* restart = out->mutable_restart();
  restart->set_fd_store(status.restart.fd_store);
  restart->set_parked(status.restart.parked);
  restart->set_received(status.restart.received);
  restart->set_foreign(status.restart.foreign);
  restart->set_restored_versions(status.restart.restored_versions);
  restart->set_restored_bytes(status.restart.restored_bytes);
  restart->set_reread_versions(status.restart.reread_versions);
  restart->set_failed_versions(status.restart.failed_versions);
  restart->set_problem(SafeText(status.restart.problem));
}

}  // namespace modelhost
