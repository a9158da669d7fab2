// Loading: from STAGED to READY, and once more beside what is READY already.
#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/chunk_pass.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
bool ModelManager::Impl::Took(const VersionRecord& record, absl::string_view track,
                              absl::string_view from, absl::string_view to,
                              const absl::Status& checked) {
  if (checked.ok()) return true;
  ++invalid_transitions;
  Note(record.key, "forbidden", std::string(checked.message()));
  Tell([&](Observer& observer) { observer.OnInvalidTransition(record.key, track, from, to); });
  return false;
}

bool ModelManager::Impl::Move(VersionRecord& record, Phase to) {
  const Phase from = record.phase;
  if (!Took(record, "phase", PhaseName(from), PhaseName(to), record.MoveTo(to))) return false;
  Changed(record);
  return true;
}

bool ModelManager::Impl::SetResidency(VersionRecord& record, HostTier to) {
  const HostTier from = record.host_tier;
  return Took(record, "residency", HostTierName(from), HostTierName(to), record.SetHostTier(to));
}

void ModelManager::Impl::EnsureReady(const VersionKey& key, VersionRecord::Waiter waiter) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return waiter.done(NoSuchVersion(key));
  if (stopping) return waiter.done(StoppingError());
  if (auto status = CheckNotRemoved(key); !status.ok()) return waiter.done(status);
  if (record->leaves_for != 0) return waiter.done(LeavesError(*record));
  // The policy or the machine may be another one since it was loaded.
  if (record->phase == Phase::kReady || record->phase == Phase::kDraining) {
    if (const absl::Status may = MayServe(*record); !may.ok()) return waiter.done(may);
  }
  if (record->phase == Phase::kDraining) StopDrain(*record, waiter.operation);
  switch (record->phase) {
    case Phase::kReady:
      if (record->health != Health::kSuspect && record->reload == nullptr) {
        return waiter.done(absl::OkStatus());
      }
      record->waiters.push_back(std::move(waiter));
      if (record->reload == nullptr) StartReload(*record);
      return;
    case Phase::kDraining:  // Not any more.
    case Phase::kReserved:
    case Phase::kLoading:
    case Phase::kUnloading:  // Loaded again when it is free.
      record->waiters.push_back(std::move(waiter));
      return;
    case Phase::kQuarantined:
      return waiter.done(record->error);
    case Phase::kFailed:
      StopRetrying(*record);
      Move(*record, Phase::kStaged);
      [[fallthrough]];
    case Phase::kStaged:
      record->waiters.push_back(std::move(waiter));
      AskForRoom(*record);
      return;
  }
}

void ModelManager::Impl::StartLoad(VersionRecord& record) {
  record.error = absl::OkStatus();
  record.cancel = std::make_shared<CancelToken>();
  record.progress = LoadProgress{"queued", 0, record.file_bytes};
  record.load_started = deps.clock.Monotonic();
  if (!Move(record, Phase::kReserved)) return;
  UpdateWaiting(record, [](OperationSnapshot& operation) {
    operation.phase = "queued";
    operation.message.clear();
    operation.next_try = absl::Time();
  });
  OnLongPool([this, request = MakeLoadRequest(record.key,
                                              record.cancel)] { return deps.loader.Load(request); },
             [this, key = record.key](auto loaded) { FinishLoad(key, std::move(loaded)); });
}

LoadRequest ModelManager::Impl::MakeLoadRequest(const VersionKey& key,
                                                std::shared_ptr<CancelToken> cancel) {
  LoadRequest request;
  request.model = key.model;
  request.version = key.version;
  request.policy = PolicyOf(key.model);
  request.cancel = std::move(cancel);
  request.progress = [this, key](const LoadProgress& progress) {
    deps.loop.Post([this, key, progress] { OnLoadProgress(key, progress); });
  };
  return request;
}

void ModelManager::Impl::OnLoadProgress(const VersionKey& key, const LoadProgress& progress) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return;
  if (progress.phase != "open") Admitted(key);
  if (record->phase == Phase::kReserved && progress.phase != "open") Move(*record, Phase::kLoading);
  const bool loading = record->phase == Phase::kReserved || record->phase == Phase::kLoading;
  if (!loading && record->reload == nullptr) return;
  if (absl::StartsWith(progress.phase, "device_") &&
      record->device_residency != DeviceResidency::kResident) {
    SetDeviceResidency(*record, DeviceResidency::kCopying);
  }
  if (loading) {
    record->progress = progress;
    Changed(*record);
  }
  for (const auto& waiter : record->waiters) {
    if (waiter.operation == 0 || !waiter.wants_load) continue;
    if (const auto swap = swaps.find(waiter.operation); swap != swaps.end()) {
      swap->second.progress[key] = progress;
      LoadProgress sum{progress.phase, 0, 0};
      for (const auto& [other, part] : swap->second.progress) {
        sum.bytes_done += part.bytes_done;
        sum.bytes_total += part.bytes_total;
      }
      operations.Update(waiter.operation, [&](OperationSnapshot& operation) {
        operation.phase = sum.phase;
        operation.bytes_done = sum.bytes_done;
        operation.bytes_total = sum.bytes_total;
      });
    } else {
      operations.Update(waiter.operation, [&](OperationSnapshot& operation) {
        operation.phase = progress.phase;
        operation.bytes_done = progress.bytes_done;
        operation.bytes_total = progress.bytes_total;
      });
    }
  }
}

void ModelManager::Impl::FinishLoad(const VersionKey& key,
                                    absl::StatusOr<std::shared_ptr<const ResidentVersion>> loaded) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return Admitted(key);
  const bool cancelled = record->cancel != nullptr && record->cancel->cancelled();
  record->cancel = nullptr;
  const std::string last_phase = record->progress.phase;
  if (loaded.ok() && cancelled) {
    // Too late to stop it, but nobody wants it: it must not show up as READY.
    Drop(*std::move(loaded));
    loaded = absl::CancelledError(absl::StrCat(key.ToString(), ": the load was cancelled"));
  }
  if (loaded.ok()) {
    absl::Status fit = CheckLabelDigests(*record, **loaded);
    // A reload of the configuration may have come after the load's own look.
    if (fit.ok()) fit = MayServe(key, **loaded, *deps.machine.Known());
    if (!fit.ok()) {
      Drop(*std::move(loaded));
      loaded = fit;
    }
  }
  if (loaded.ok()) {
    Admitted(key);
    if (record->phase == Phase::kReserved) Move(*record, Phase::kLoading);
    record->attempts = 0;
    Adopt(*record, *std::move(loaded));
    NoteRestored(key, &record->resident->report);
    Move(*record, Phase::kReady);
    FaultPoint("load.ready");
    AnnounceLabels(*record);
    TellWaiters(*record, absl::OkStatus());
    ReviewKeeping(*record);
    RetryPendingAcquires(key.model);
    UpdateReady();
    return;
  }

  const absl::Status status = loaded.status();
  SetDeviceResidency(*record, DeviceResidency::kNone);
  const LoadFailure failure =
      cancelled ? LoadFailure::kCancelled : ClassifyLoadFailure(status, ErrnoOf(status));
  if (failure == LoadFailure::kNoRoom && !stopping && WaitForRoom(*record, status)) return;
  Admitted(key);
  record->room_since = absl::InfiniteDuration();
  // What it had booked is free again.
  if (!waiting_for_room.empty()) deps.loop.Post([this] { LookForRoom(); });
  // Who holds the rest is for who asked to load it, not for every reader of the version.
  record->error = status;
  LoadReport report;
  report.source = "cold";
  report.duration = deps.clock.Monotonic() - record->load_started;
  if (record->phase == Phase::kReserved &&
      (failure == LoadFailure::kNoRoom || failure == LoadFailure::kCancelled)) {
    Move(*record, Phase::kStaged);
  } else {
    if (record->phase == Phase::kReserved) Move(*record, Phase::kLoading);
    Move(*record, failure == LoadFailure::kBadBytes ? Phase::kQuarantined : Phase::kFailed);
    if (failure == LoadFailure::kCancelled || failure == LoadFailure::kNoRoom) {
      Move(*record, Phase::kStaged);
    }
  }
  const absl::Status told = failure == LoadFailure::kNoRoom ? WithHolders(status) : status;
  Tell([&](Observer& observer) { observer.OnLoadFinished(key, report, told, last_phase); });
  Note(key,
       failure == LoadFailure::kBadBytes    ? "quarantined"
       : failure == LoadFailure::kCancelled ? "load cancelled"
                                            : "load failed",
       std::string(told.message()));
  if (failure == LoadFailure::kCancelled && !stopping) {
    // Who asked after the cancellation wants a load of its own, not somebody else's cancelled one.
    std::vector<VersionRecord::Waiter> again;
    for (auto& waiter : std::exchange(record->waiters, {})) {
      if (waiter.wants_load) {
        again.push_back(std::move(waiter));
      } else {
        waiter.done(told);
      }
    }
    for (auto& waiter : again) EnsureReady(key, std::move(waiter));
  } else if (failure != LoadFailure::kTransient || !RetryLater(*record, status)) {
    NoteRestored(key, told);
    TellWaiters(*record, told);
  }
  RetryPendingAcquires(key.model);
  UpdateReady();
  if (VersionRecord* rests = Find(key)) KeepWish(*rests);
  ForgetIfGone(key);
}

void ModelManager::Impl::Adopt(VersionRecord& record,
                               std::shared_ptr<const ResidentVersion> resident) {
  record.resident = std::move(resident);
  // What holds no tensors is mapped all the same.
  SetResidency(record, std::max(record.resident->tier, HostTier::kMapped));
  SetDeviceResidency(record, record.resident->devices.empty() ? DeviceResidency::kNone
                                                              : DeviceResidency::kResident);
  record.device_tries = 0;
  record.room_since = absl::InfiniteDuration();
  record.verdict = {};
  record.digest = record.resident->manifest->digest;
  record.file_bytes = record.resident->manifest->TotalBytes();
  record.last_used = deps.clock.Wall();
  record.progress = {};
  SetHealth(record, GoodHealth(record), HealthCause::kLoad);
  const LoadReport& report = record.resident->report;
  Tell([&](Observer& observer) {
    observer.OnLoadFinished(record.key, report, absl::OkStatus(), "");
  });
  Note(record.key, "ready",
       absl::StrCat("load ", absl::FormatDuration(report.duration), ", ", report.source,
                    report.warnings.empty() ? "" : ", ", absl::StrJoin(report.warnings, "; ")));
  // A record that cannot be written only costs a read at the next start.
  OnShortPool([this] { return deps.verified.Save(deps.state_dir); }, [](const absl::Status&) {});
}

absl::Status ModelManager::Impl::CheckLabelDigests(const VersionRecord& record,
                                                   const ResidentVersion& loaded) const {
  for (const std::string& label : LabelsOf(record.key)) {
    const Digest& set_to = labels.labels.at({record.key.model, label}).digest;
    if (set_to.IsZero() || set_to == loaded.manifest->digest) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        record.key.ToString(), ": its files have digest ", loaded.manifest->digest.Short(),
        ", but label ", label, " was set when they had ", set_to.Short(),
        " (put those files back, or swap to another version; to serve these, `modelctl label rm ",
        record.key.model, " ", label, "` first)"));
  }
  return absl::OkStatus();
}

void ModelManager::Impl::StartReload(VersionRecord& record) {
  record.reload = std::make_shared<CancelToken>();
  Note(record.key, "reload", std::string(HealthReasonName(record.health_reason)));
  OnLongPool([this, request = MakeLoadRequest(record.key,
                                              record.reload)] { return deps.loader.Load(request); },
             [this, key = record.key, token = record.reload](auto loaded) {
               FinishReload(key, token, std::move(loaded));
             });
}

void ModelManager::Impl::FinishReload(
    const VersionKey& key, const std::shared_ptr<CancelToken>& token,
    absl::StatusOr<std::shared_ptr<const ResidentVersion>> loaded) {
  VersionRecord* record = Find(key);
  if (record == nullptr || record->reload != token) {  // Unloaded meanwhile.
    if (loaded.ok()) Drop(*std::move(loaded));
    return;
  }
  record->reload = nullptr;
  const bool there = record->phase == Phase::kReady || record->phase == Phase::kDraining;
  absl::Status status = loaded.status();
  if (status.ok() && (token->cancelled() || !there)) {
    status = absl::CancelledError(absl::StrCat(key.ToString(), ": the load was cancelled"));
  }
  if (status.ok()) status = CheckLabelDigests(*record, **loaded);
  if (status.ok()) status = MayServe(key, **loaded, *deps.machine.Known());
  if (status.ok()) {
    // Who holds the old one must come for the new one, or for the first.
    const bool renew = DeviceResidencyOf(*record->resident) == DeviceResidency::kLost ||
                       record->resident->devices.size() < (*loaded)->devices.size();
    Drop(std::exchange(record->resident, nullptr));
    Adopt(*record, *std::move(loaded));
    Changed(*record);
    if (renew) RenewLabels(key);
    TellWaiters(*record, absl::OkStatus());
    RetryPendingAcquires(key.model);
    UpdateReady();
    return;
  }
  if (loaded.ok()) Drop(*std::move(loaded));
  if (record->device_residency == DeviceResidency::kCopying && record->resident != nullptr) {
    SetDeviceResidency(*record, DeviceResidencyOf(*record->resident));
  }
  if (absl::IsResourceExhausted(status)) status = WithHolders(status);
  Note(key, token->cancelled() ? "reload cancelled" : "reload failed",
       std::string(status.message()));
  if (token->cancelled() && !stopping) {
    // Who asked after the cancellation wants a load of its own.
    for (auto& waiter : std::exchange(record->waiters, {})) EnsureReady(key, std::move(waiter));
  } else {
    TellWaiters(*record, status);
  }
}

void ModelManager::Impl::RefusedLoad(VersionRecord& record, const absl::Status& status) {
  const VersionKey key = record.key;
  record.error = status;
  record.room_since = absl::InfiniteDuration();
  const absl::Status told = WithHolders(status);
  LoadReport report;
  report.source = "cold";
  Tell([&](Observer& observer) { observer.OnLoadFinished(key, report, status, "reserve"); });
  Note(key, "load failed", std::string(status.message()));
  Changed(record);
  TellWaiters(record, told);
  RetryPendingAcquires(key.model);
  UpdateReady();
  if (VersionRecord* rests = Find(key)) KeepWish(*rests);
  ForgetIfGone(key);
}

void ModelManager::Impl::TellWaiters(VersionRecord& record, const absl::Status& status) {
  const auto waiters = std::exchange(record.waiters, {});
  for (const auto& waiter : waiters) waiter.done(status);
}

// Those that wait for the load to come to rest go on waiting.
void ModelManager::Impl::TellLoadWaiters(VersionRecord& record, const absl::Status& status) {
  std::vector<VersionRecord::Waiter> told;
  const auto leaving = std::stable_partition(record.waiters.begin(), record.waiters.end(),
                                             [](const auto& waiter) { return !waiter.wants_load; });
  std::move(leaving, record.waiters.end(), std::back_inserter(told));
  record.waiters.erase(leaving, record.waiters.end());
  for (const auto& waiter : told) waiter.done(status);
}

void ModelManager::Impl::DropWaiters(OperationId operation, const absl::Status& why) {
  std::vector<VersionRecord::Waiter> dropped;
  for (auto& [key, record] : versions) {
    const auto leaving =
        std::stable_partition(record.waiters.begin(), record.waiters.end(),
                              [&](const auto& waiter) { return waiter.operation != operation; });
    if (leaving == record.waiters.end()) continue;
    std::move(leaving, record.waiters.end(), std::back_inserter(dropped));
    record.waiters.erase(leaving, record.waiters.end());
    if (record.waiters.empty()) CancelLoad(record);
  }
  for (const auto& waiter : dropped) waiter.done(why);
}

void ModelManager::Impl::CancelLoad(VersionRecord& record) {
  if (record.cancel != nullptr) record.cancel->Cancel();
  if (record.reload != nullptr) record.reload->Cancel();
  record.room_since = absl::InfiniteDuration();
  StopRetrying(record);
  std::erase_if(waiting_for_room,
                [&](const RoomWaiter& waiter) { return waiter.key == record.key; });
  Admitted(record.key);
  KeepWish(record);
}

absl::StatusOr<OperationId> ModelManager::Load(const VersionKey& key, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Impl::StoppingError();
  VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  if (auto status = impl.CheckNotRemoved(key); !status.ok()) return status;
  for (const auto& waiter : record->waiters) {
    const OperationSnapshot* running = impl.operations.Find(waiter.operation);
    if (running == nullptr || running->kind != OperationKind::kLoad) continue;
    const OperationId id = running->id;
    impl.RetryNow(*record);
    return id;
  }
  const bool there = record->phase == Phase::kReady && record->health != Health::kSuspect;
  const OperationId id =
      impl.operations.Begin(OperationKind::kLoad, key.model, key.version, "", by);
  impl.EnsureReady(key, {id, [&impl, id, key, there](const absl::Status& status) {
                           const VersionRecord* loaded = impl.Find(key);
                           impl.operations.Update(id, [&](OperationSnapshot& operation) {
                             operation.result.unchanged = there;
                             if (loaded == nullptr || loaded->resident == nullptr) return;
                             operation.result.load = loaded->resident->report.duration;
                             operation.result.bytes = loaded->file_bytes;
                             operation.result.digest = loaded->resident->manifest->digest.Hex();
                             operation.bytes_done = operation.bytes_total = loaded->file_bytes;
                           });
                           impl.operations.Finish(id, status);
                         }});
  return id;
}

}  // namespace modelhost
