#include "daemon/observe/state_metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace modelhost {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using Label = ClientMetric::Label;

constexpr std::array kPhases = {Phase::kStaged, Phase::kReserved,   Phase::kLoading,
                                Phase::kReady,  Phase::kDraining,   Phase::kUnloading,
                                Phase::kFailed, Phase::kQuarantined};
constexpr std::array kHealths = {Health::kOk, Health::kDegraded, Health::kSuspect};
constexpr std::array kKinds = {OperationKind::kLoad,   OperationKind::kUnload,
                               OperationKind::kSwap,   OperationKind::kRollback,
                               OperationKind::kVerify, OperationKind::kPublish,
                               OperationKind::kDelete, OperationKind::kGc};

std::string Lower(absl::string_view name) { return absl::AsciiStrToLower(name); }

class GaugeFamily {
 public:
  GaugeFamily(std::string name, std::string help) {
    family_.name = std::move(name);
    family_.help = std::move(help);
    family_.type = prometheus::MetricType::Gauge;
  }
  void Add(std::vector<Label> labels, double value) {
    ClientMetric metric;
    metric.label = std::move(labels);
    metric.gauge.value = value;
    family_.metric.push_back(std::move(metric));
  }
  void AddTo(std::vector<MetricFamily>& out) {
    if (!family_.metric.empty()) out.push_back(std::move(family_));
  }

 private:
  MetricFamily family_;
};

std::vector<Label> LabelsOf(const VersionKey& key) {
  return {{"model", key.model}, {"version", absl::StrCat(key.version)}};
}

std::vector<Label> With(std::vector<Label> labels, const char* name, std::string value) {
  labels.push_back({name, std::move(value)});
  return labels;
}

double Bytes(uint64_t bytes) {
  return bytes == UINT64_MAX ? std::numeric_limits<double>::infinity() : static_cast<double>(bytes);
}

void RenderProcessWide(const RegistryState& state, std::vector<MetricFamily>& out) {
  GaugeFamily ready("modelhost_ready", "1 when every required model is served.");
  ready.Add({}, state.status.ready ? 1 : 0);
  ready.AddTo(out);

  GaugeFamily clients("modelhost_clients", "Connected sessions that may hold leases.");
  clients.Add({}, static_cast<double>(state.status.clients));
  clients.AddTo(out);

  GaugeFamily parked("modelhost_fdstore_fds",
                     "Descriptors of memory that systemd keeps over a restart of the daemon.");
  parked.Add({}, static_cast<double>(state.status.restart.parked));
  parked.AddTo(out);

  GaugeFamily budget("modelhost_memory_budget_bytes", "Limit of a memory pool; +Inf without one.");
  GaugeFamily reserved("modelhost_memory_reserved_bytes", "Bytes booked in a memory pool.");
  for (const StatusSnapshot::Pool& pool : state.status.pools) {
    budget.Add({{"pool", pool.name}}, Bytes(pool.limit));
    reserved.Add({{"pool", pool.name}}, static_cast<double>(pool.reserved));
  }
  budget.AddTo(out);
  reserved.AddTo(out);

  std::map<std::pair<OperationKind, OperationState>, uint64_t> counts;
  for (const OperationSnapshot& operation : state.operations) {
    ++counts[{operation.kind, operation.state}];
  }
  GaugeFamily operations("modelhost_operations", "Operations that wait or run.");
  for (const OperationKind kind : kKinds) {
    for (const OperationState now : {OperationState::kQueued, OperationState::kRunning}) {
      operations.Add(
          {{"kind", Lower(OperationKindName(kind))}, {"state", Lower(OperationStateName(now))}},
          static_cast<double>(counts[{kind, now}]));
    }
  }
  operations.AddTo(out);
}

void RenderDesired(const DesiredSnapshot& desired, std::vector<MetricFamily>& out) {
  if (desired.state == DesiredFileState::kOff) return;
  GaugeFamily file_ok("modelhost_desired_file_ok",
                      "1 when the desired state file is there and good.");
  file_ok.Add({}, desired.state == DesiredFileState::kOk ? 1 : 0);
  file_ok.AddTo(out);

  GaugeFamily labels("modelhost_desired_labels",
                     "Labels of the last good desired state file, by how they stand.");
  labels.Add({{"state", "in_sync"}}, static_cast<double>(desired.in_sync));
  labels.Add({{"state", "pending"}}, static_cast<double>(desired.pending));
  labels.Add({{"state", "failed"}}, static_cast<double>(desired.failed));
  labels.AddTo(out);

  GaugeFamily drifting("modelhost_desired_drifting_labels",
                       "Labels that were as desired and were moved by somebody else.");
  drifting.Add({}, static_cast<double>(desired.drifting));
  drifting.AddTo(out);

  if (desired.last_converged == absl::InfinitePast()) return;
  GaugeFamily converged("modelhost_desired_last_converged_timestamp_seconds",
                        "When all desired labels came to be in sync last, in Unix time.");
  converged.Add({}, absl::ToDoubleSeconds(desired.last_converged - absl::UnixEpoch()));
  converged.AddTo(out);
}

void RenderLabels(const RegistryState& state, std::vector<MetricFamily>& out) {
  GaugeFamily version("modelhost_label_version", "The version that a label names.");
  GaugeFamily generation("modelhost_label_generation", "Moves of a label so far.");
  GaugeFamily changed("modelhost_label_last_change_timestamp_seconds",
                      "When a label moved last, in Unix time.");
  for (const ModelSnapshot& model : state.models) {
    for (const auto& [name, record] : model.labels) {
      const std::vector<Label> labels = {{"model", model.name}, {"label", name}};
      version.Add(labels, static_cast<double>(record.version));
      generation.Add(labels, static_cast<double>(record.generation));
      changed.Add(labels, absl::ToDoubleSeconds(record.changed - absl::UnixEpoch()));
    }
  }
  version.AddTo(out);
  generation.AddTo(out);
  changed.AddTo(out);
}

void RenderDevices(const StatusSnapshot& status, std::vector<MetricFamily>& out) {
  GaugeFamily info("modelhost_gpu_info", "A GPU and the mode that it is used in; always 1.");
  GaugeFamily usable("modelhost_gpu_usable", "1 while a GPU answers, 0 while it does not.");
  GaugeFamily self_test("modelhost_gpu_self_test_passed",
                        "1 for a GPU that can hold copies or read the host's, by its self-test.");
  GaugeFamily copies("modelhost_gpu_copies", "Files that a GPU has a copy of.");
  GaugeFamily copied("modelhost_gpu_copied_bytes", "Bytes of those copies.");
  GaugeFamily importers("modelhost_gpu_importers", "Leases that have memory of a GPU.");
  GaugeFamily lost("modelhost_gpu_lost_copies", "Copies lost with a GPU since the start.");
  for (const DeviceTierSnapshot::Gpu& gpu : status.devices.gpus) {
    const std::vector<Label> labels = {{"gpu", gpu.report.info.uuid}};
    info.Add(
        With(With(labels, "name", gpu.report.info.name), "mode", abi::DeviceModeName(gpu.mode)), 1);
    usable.Add(labels, gpu.usable ? 1 : 0);
    self_test.Add(labels, gpu.mode == abi::DeviceMode::kNone ? 0 : 1);
    copies.Add(labels, static_cast<double>(gpu.copies));
    copied.Add(labels, static_cast<double>(gpu.copied_bytes));
    const auto held = status.importers.find(gpu.report.info.uuid);
    importers.Add(labels, held == status.importers.end() ? 0 : static_cast<double>(held->second));
    lost.Add(labels, static_cast<double>(gpu.lost));
  }
  for (GaugeFamily* family : {&info, &usable, &self_test, &copies, &copied, &importers, &lost}) {
    family->AddTo(out);
  }
}

void RenderVersions(const RegistryState& state, const ResidentBytes& resident_bytes,
                    std::vector<MetricFamily>& out) {
  GaugeFamily info("modelhost_model_version_info", "What a loaded version is; always 1.");
  GaugeFamily phases("modelhost_model_version_state",
                     "1 for the state that a version is in, 0 for the others.");
  GaugeFamily healths("modelhost_model_health",
                      "1 for the health that a loaded version has, 0 for the others.");
  GaugeFamily loading("modelhost_model_loads_in_progress", "Loads that wait for room or run.");
  GaugeFamily progress("modelhost_model_load_progress_ratio",
                       "Part of a running load's bytes done.");
  GaugeFamily quarantined("modelhost_quarantined_versions", "Versions whose bytes are bad.");
  GaugeFamily mapped("modelhost_host_mapped_bytes", "Host bytes of a loaded version.");
  GaugeFamily resident("modelhost_host_resident_bytes",
                       "Host bytes of a loaded version that are in memory now.");
  GaugeFamily on_gpu("modelhost_gpu_resident_bytes", "Bytes of a loaded version on a GPU.");
  GaugeFamily locked("modelhost_host_locked_bytes",
                     "Host bytes of a loaded version that are locked.");

  for (const ModelSnapshot& model : state.models) {
    uint64_t loads = 0;
    uint64_t bad = 0;
    for (const VersionSnapshot& version : model.versions) {
      if (!version.invalid.empty()) continue;
      loads += version.phase == Phase::kReserved || version.phase == Phase::kLoading ? 1 : 0;
      bad += version.phase == Phase::kQuarantined ? 1 : 0;
      if (version.phase == Phase::kStaged) continue;  // On disk only.

      const std::vector<Label> labels = LabelsOf(version.key);
      for (const Phase phase : kPhases) {
        phases.Add(With(labels, "state", Lower(PhaseName(phase))), version.phase == phase ? 1 : 0);
      }
      if (version.phase == Phase::kLoading) {
        const double total = static_cast<double>(version.load_bytes_total);
        const double done = static_cast<double>(version.load_bytes_done);
        progress.Add(labels, total > 0 ? std::min(1.0, done / total) : 0);
      }
      if (version.resident == nullptr) continue;
      for (const Health health : kHealths) {
        healths.Add(With(labels, "health", Lower(HealthName(health))),
                    version.health == health ? 1 : 0);
      }
      info.Add(With(With(labels, "digest", version.digest ? version.digest->Short() : ""), "format",
                    version.resident->format),
               1);
      mapped.Add(labels, static_cast<double>(version.resident->host_bytes()));
      locked.Add(labels, static_cast<double>(version.resident->locked_bytes()));
      for (const DeviceImage& image : version.resident->devices) {
        const auto bytes = image.lost() ? 0 : image.bytes();
        on_gpu.Add(With(labels, "gpu", image.gpu), static_cast<double>(bytes));
      }
      if (const auto it = resident_bytes.find(version.key); it != resident_bytes.end()) {
        resident.Add(labels, static_cast<double>(it->second));
      }
    }
    loading.Add({{"model", model.name}}, static_cast<double>(loads));
    quarantined.Add({{"model", model.name}}, static_cast<double>(bad));
  }
  for (GaugeFamily* family : {&info, &phases, &healths, &loading, &progress, &quarantined, &mapped,
                              &resident, &locked, &on_gpu}) {
    family->AddTo(out);
  }
}

void RenderLeases(const RegistryState& state, std::vector<MetricFamily>& out) {
  std::map<std::pair<VersionKey, std::string>, uint64_t> counts;
  std::map<std::string, std::pair<uint64_t, absl::Duration>> stale;  // Number, oldest age.
  for (const ModelSnapshot& model : state.models) {
    stale[model.name];
    for (const VersionSnapshot& version : model.versions) {
      if (version.resident == nullptr) continue;
      const bool sealed = version.residency == Residency::kSealed;
      counts[{version.key, sealed ? "host_memfd" : "host_file"}];  // Shown as 0.
    }
  }
  for (const Lease& lease : state.leases) {
    ++counts[{lease.key, lease.transport}];
    if (!lease.stale_for.has_value()) continue;
    auto& [number, oldest] = stale[lease.key.model];
    ++number;
    oldest = std::max(oldest, *lease.stale_for);
  }

  GaugeFamily leases("modelhost_leases", "Leases on a version.");
  for (const auto& [what, count] : counts) {
    leases.Add(With(LabelsOf(what.first), "transport", what.second), static_cast<double>(count));
  }
  GaugeFamily stale_leases("modelhost_stale_leases",
                           "Leases whose label has moved on, or on versions that no label names.");
  GaugeFamily oldest_age("modelhost_oldest_stale_lease_age_seconds",
                         "How long the longest of those has been so; 0 without one.");
  for (const auto& [model, numbers] : stale) {
    stale_leases.Add({{"model", model}}, static_cast<double>(numbers.first));
    oldest_age.Add({{"model", model}}, absl::ToDoubleSeconds(numbers.second));
  }
  leases.AddTo(out);
  stale_leases.AddTo(out);
  oldest_age.AddTo(out);
}

}  // namespace

std::vector<MetricFamily> RenderState(const RegistryState& state, const ResidentBytes& resident) {
  std::vector<MetricFamily> out;
  RenderProcessWide(state, out);
  RenderDesired(state.status.desired, out);
  RenderDevices(state.status, out);
  RenderLabels(state, out);
  RenderVersions(state, resident, out);
  RenderLeases(state, out);
  return out;
}

std::shared_ptr<const RegistryState> StateCollector::Fetch() const {
  // Owned by the task too: a loop that answers late, or never, finds it still there.
  struct Answer {
    absl::Notification done;
    RegistryState state;
  };
  auto answer = std::make_shared<Answer>();
  loop_.Post([answer, &manager = manager_] {
    answer->state = {manager.Status(), manager.Models(), manager.Leases(),
                     manager.ListOperations()};
    answer->done.Notify();
  });
  if (!answer->done.WaitForNotificationWithTimeout(absl::Seconds(1))) return nullptr;
  return std::shared_ptr<const RegistryState>(answer, &answer->state);
}

void StateCollector::Sample(const RegistryState& state) const {
  const absl::Duration now = clock_.Monotonic();
  if (sampled_at_.has_value() && now - *sampled_at_ < kSampleEvery) return;
  sampled_at_ = now;
  resident_.clear();
  for (const ModelSnapshot& model : state.models) {
    for (const VersionSnapshot& version : model.versions) {
      if (version.resident == nullptr) continue;
      uint64_t bytes = 0;
      for (const auto& region : version.resident->regions) bytes += region->ResidentBytes();
      resident_[version.key] = bytes;
    }
  }
}

std::vector<MetricFamily> StateCollector::Collect() const {
  std::shared_ptr<const RegistryState> state = Fetch();
  absl::MutexLock lock(&mutex_);
  if (state != nullptr) {
    Sample(*state);
  } else {
    state = last_;
  }
  if (state == nullptr) return {};
  auto families = RenderState(*state, resident_);

  // Kept without the bytes: a scrape must not keep an unloaded version in memory.
  RegistryState kept = *state;
  for (ModelSnapshot& model : kept.models) {
    for (VersionSnapshot& version : model.versions) version.resident = nullptr;
  }
  last_ = std::make_shared<const RegistryState>(std::move(kept));
  return families;
}

}  // namespace modelhost
