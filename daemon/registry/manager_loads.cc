// Loading, draining and freeing: everything that moves a version from one phase to another.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "daemon/platform/errno_status.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"

namespace modelhost {
namespace {

std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

absl::Status Stopping() {
  return absl::UnavailableError("the daemon is stopping (try again when it is back)");
}

}  // namespace

bool ModelManager::Impl::Move(VersionRecord& record, Phase to) {
  const Phase from = record.phase;
  if (!IsAllowed(from, to)) {
    ++invalid_transitions;
    Tell([&](Observer& observer) { observer.OnInvalidTransition(record.key, from, to); });
    return false;
  }
  record.phase = to;
  Changed(record);
  return true;
}

void ModelManager::Impl::EnsureReady(const VersionKey& key, VersionRecord::Waiter waiter) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return waiter.done(NoSuchVersion(key));
  if (stopping) return waiter.done(Stopping());
  switch (record->phase) {
    case Phase::kReady:
      return waiter.done(absl::OkStatus());
    case Phase::kDraining:
      StopDrain(*record);
      return waiter.done(absl::OkStatus());
    case Phase::kReserved:
    case Phase::kLoading:
    case Phase::kUnloading:  // Loaded again when it is free.
      record->waiters.push_back(std::move(waiter));
      return;
    case Phase::kQuarantined:
      return waiter.done(record->error);
    case Phase::kFailed:
      Move(*record, Phase::kStaged);
      [[fallthrough]];
    case Phase::kStaged:
      record->waiters.push_back(std::move(waiter));
      // Waiting for room already: FinishUnload starts it.
      if (std::ranges::find(waiting_for_room, key) == waiting_for_room.end()) StartLoad(*record);
      return;
  }
}

void ModelManager::Impl::StartLoad(VersionRecord& record) {
  record.error = absl::OkStatus();
  record.cancel = std::make_shared<CancelToken>();
  record.progress = LoadProgress{"queued", 0, record.file_bytes};
  record.load_started = deps.clock.Monotonic();
  if (!Move(record, Phase::kReserved)) return;
  LoadRequest request;
  request.model = record.key.model;
  request.version = record.key.version;
  request.policy = PolicyOf(record.key.model);
  request.cancel = record.cancel;
  request.progress = [this, key = record.key](const LoadProgress& progress) {
    deps.loop.Post([this, key, progress] { OnLoadProgress(key, progress); });
  };
  OnPool([this, request = std::move(request)] { return deps.loader.Load(request); },
         [this, key = record.key](auto loaded) { FinishLoad(key, std::move(loaded)); });
}

void ModelManager::Impl::OnLoadProgress(const VersionKey& key, const LoadProgress& progress) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return;
  if (record->phase == Phase::kReserved && progress.phase != "open") Move(*record, Phase::kLoading);
  if (record->phase != Phase::kReserved && record->phase != Phase::kLoading) return;
  record->progress = progress;
  Changed(*record);
  for (const auto& waiter : record->waiters) {
    if (waiter.operation == 0) continue;
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
  if (record == nullptr) return;
  const bool cancelled = record->cancel != nullptr && record->cancel->cancelled();
  record->cancel = nullptr;
  const std::string last_phase = record->progress.phase;
  if (loaded.ok() && cancelled) {
    // Too late to stop it, but nobody wants it: it must not show up as READY.
    OnPool(
        [resident = *std::move(loaded)]() mutable {
          resident.reset();
          return 0;
        },
        [](int) {});
    loaded = absl::CancelledError(absl::StrCat(key.ToString(), ": the load was cancelled"));
  }
  if (loaded.ok()) {
    if (record->phase == Phase::kReserved) Move(*record, Phase::kLoading);
    record->resident = *std::move(loaded);
    record->digest = record->resident->manifest->digest;
    record->file_bytes = record->resident->manifest->TotalBytes();
    record->last_used = deps.clock.Wall();
    record->progress = {};
    const bool partly = record->resident->tier != HostTier::kPinned &&
                        (PolicyOf(key.model).residency == Residency::kPinned ||
                         PolicyOf(key.model).residency == Residency::kSealed) &&
                        options.memlock != MemlockPolicy::kOff &&
                        record->resident->host_bytes() > 0;
    record->health = partly ? Health::kDegraded : Health::kOk;
    record->health_reason = partly ? HealthReason::kPinPartial : HealthReason::kNone;
    Move(*record, Phase::kReady);
    const LoadReport& report = record->resident->report;
    Tell([&](Observer& observer) { observer.OnLoadFinished(key, report, absl::OkStatus(), ""); });
    Note(key, "ready",
         absl::StrCat("load ", absl::FormatDuration(report.duration), ", ", report.source,
                      report.warnings.empty() ? "" : ", ", absl::StrJoin(report.warnings, "; ")));
    // A record that cannot be written only costs a read at the next start.
    OnPool([this] { return deps.verified.Save(deps.state_dir); }, [](const absl::Status&) {});
    AnnounceLabels(*record);
    TellWaiters(*record, absl::OkStatus());
    ReviewKeeping(*record);
    RetryPendingAcquires();
    UpdateReady();
    return;
  }

  const absl::Status status = loaded.status();
  const LoadFailure failure =
      cancelled ? LoadFailure::kCancelled : ClassifyLoadFailure(status, ErrnoOf(status));
  if (failure == LoadFailure::kNoRoom && !stopping && WaitForRoom(*record)) return;
  record->error = failure == LoadFailure::kNoRoom ? WithHolders(status) : status;
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
  const absl::Status told = record->error;
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
  } else {
    TellWaiters(*record, told);
  }
  RetryPendingAcquires();
  UpdateReady();
  ForgetIfGone(key);
}

bool ModelManager::Impl::WaitForRoom(VersionRecord& record) {
  bool room_comes = std::ranges::any_of(
      versions, [](const auto& entry) { return entry.second.phase == Phase::kUnloading; });
  if (!room_comes) {
    std::vector<EvictionCandidate> candidates;
    for (const auto& [key, other] : versions) {
      candidates.push_back({key, other.phase, !LabelsOf(key).empty(), leases.CountOf(key),
                            other.holds > 0, other.last_used});
    }
    if (const auto victim = ChooseEviction(candidates)) {
      Note(*victim, "evicted", absl::StrCat("to make room for ", record.key.ToString()));
      BeginDrain(*Find(*victim), 0);
      room_comes = true;
    }
  }
  if (!room_comes) return false;
  if (record.phase == Phase::kLoading) Move(record, Phase::kFailed);
  Move(record, Phase::kStaged);
  waiting_for_room.push_back(record.key);
  return true;
}

absl::Status ModelManager::Impl::WithHolders(const absl::Status& status) const {
  std::vector<std::string> holders;
  for (const auto& [key, record] : versions) {
    if (record.resident == nullptr) continue;
    const auto names = LabelsOf(key);
    holders.push_back(
        absl::StrCat(key.ToString(), " ", Mebibytes(record.resident->host_bytes()),
                     names.empty() ? "" : absl::StrCat(" ", absl::StrJoin(names, ",")), " ",
                     leases.CountOf(key), " leases"));
  }
  return absl::Status(status.code(), absl::StrCat(status.message(), "; held by: ",
                                                  holders.empty() ? "nothing of ours"
                                                                  : absl::StrJoin(holders, ", ")));
}

void ModelManager::Impl::TellWaiters(VersionRecord& record, const absl::Status& status) {
  const auto waiters = std::exchange(record.waiters, {});
  for (const auto& waiter : waiters) waiter.done(status);
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
  std::erase(waiting_for_room, record.key);
}

// --- Unload
// ----------------------------------------------------------------------------------------

void ModelManager::Impl::ReviewKeeping(VersionRecord& record) {
  const bool idle = record.phase == Phase::kReady && LabelsOf(record.key).empty();
  if (idle == (record.keep_timer != 0)) return;
  if (!idle) {
    deps.loop.CancelTimer(std::exchange(record.keep_timer, 0));
    return;
  }
  const absl::Duration keep = PolicyOf(record.key.model).keep_previous;
  record.keep_timer = deps.loop.PostDelayed(keep, [this, key = record.key] {
    VersionRecord* found = Find(key);
    if (found == nullptr) return;
    found->keep_timer = 0;
    if (found->phase != Phase::kReady || !LabelsOf(key).empty()) return;
    if (found->holds > 0) return ReviewKeeping(*found);
    BeginDrain(*found, 0);
  });
}

void ModelManager::Impl::BeginDrain(VersionRecord& record, OperationId unload) {
  if (record.keep_timer != 0) deps.loop.CancelTimer(std::exchange(record.keep_timer, 0));
  if (!Move(record, Phase::kDraining)) return;
  record.unload = unload;
  record.drain_started = deps.clock.Monotonic();
  record.drain_deadline_hit = false;
  const VersionKey key = record.key;
  Tell([&](Observer& observer) { observer.OnDraining(key); });
  MaybeUnload(record);
}

void ModelManager::Impl::StopDrain(VersionRecord& record) {
  if (record.drain_timer != 0) deps.loop.CancelTimer(std::exchange(record.drain_timer, 0));
  const OperationId unload = std::exchange(record.unload, 0);
  Move(record, Phase::kReady);
  record.last_used = deps.clock.Wall();
  ReviewKeeping(record);
  if (unload != 0) {
    operations.Finish(unload, absl::AbortedError(absl::StrCat(
                                  record.key.ToString(), ": wanted again before it was unloaded")));
  }
}

void ModelManager::Impl::MaybeUnload(VersionRecord& record) {
  if (record.phase != Phase::kDraining) return;
  const uint64_t held = leases.CountOf(record.key);
  if (held == 0) return StartUnload(record, false);
  if (record.unload != 0) {
    operations.Update(record.unload, [&](OperationSnapshot& operation) {
      operation.phase = "drain";
      operation.message = absl::StrCat("waiting for ", held, held == 1 ? " lease" : " leases");
    });
  }
}

void ModelManager::Impl::StartUnload(VersionRecord& record, bool deadline) {
  if (record.drain_timer != 0) deps.loop.CancelTimer(std::exchange(record.drain_timer, 0));
  const VersionKey key = record.key;
  const absl::Duration drained = deps.clock.Monotonic() - record.drain_started;
  if (!Move(record, Phase::kUnloading)) return;
  Tell([&](Observer& observer) { observer.OnDrained(key, drained, deadline); });
  const absl::Duration started = deps.clock.Monotonic();
  // Unmapping gigabytes takes long: not here. Clients keep what they have mapped.
  OnPool(
      [resident = std::exchange(record.resident, nullptr)]() mutable {
        resident.reset();
        return 0;
      },
      [this, key, started](int) { FinishUnload(key, started); });
}

void ModelManager::Impl::FinishUnload(const VersionKey& key, absl::Duration started) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return;
  record->health = record->on_disk ? Health::kOk : Health::kDegraded;
  record->health_reason = record->on_disk ? HealthReason::kNone : HealthReason::kSourceGone;
  record->progress = {};
  Move(*record, Phase::kStaged);
  const absl::Duration took = deps.clock.Monotonic() - started;
  Tell([&](Observer& observer) { observer.OnUnloaded(key, took); });
  Note(key, "unloaded", "");
  if (const OperationId unload = std::exchange(record->unload, 0); unload != 0) {
    operations.Finish(unload, absl::OkStatus());
  }
  if (!record->waiters.empty()) StartLoad(*record);
  const auto waiting = std::exchange(waiting_for_room, {});
  for (const VersionKey& other : waiting) {
    VersionRecord* wanted = Find(other);
    if (wanted != nullptr && wanted->phase == Phase::kStaged && !wanted->waiters.empty()) {
      StartLoad(*wanted);
    }
  }
  RetryPendingAcquires();
  ForgetIfGone(key);
}

void ModelManager::Impl::ForgetIfGone(const VersionKey& key) {
  const VersionRecord* record = Find(key);
  if (record == nullptr || record->on_disk || !record->waiters.empty()) return;
  const bool at_rest = record->phase == Phase::kStaged || record->phase == Phase::kFailed ||
                       record->phase == Phase::kQuarantined;
  if (!at_rest || !LabelsOf(key).empty() || leases.CountOf(key) != 0) return;
  versions.erase(key);
  Tell([&](Observer& observer) { observer.OnVersionGone(key); });
}

absl::StatusOr<OperationId> ModelManager::Load(const VersionKey& key, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Stopping();
  const VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  for (const auto& waiter : record->waiters) {
    const OperationSnapshot* running = impl.operations.Find(waiter.operation);
    if (running != nullptr && running->kind == OperationKind::kLoad) return running->id;
  }
  const bool there = record->phase == Phase::kReady;
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

absl::StatusOr<OperationId> ModelManager::Unload(const VersionKey& key,
                                                 absl::Duration drain_timeout,
                                                 bool release_on_deadline, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Stopping();
  VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  const auto names = impl.LabelsOf(key);
  if (!names.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(key.ToString(), ": label ", absl::StrJoin(names, ", "),
                     " names it (swap to another version first, or `modelctl label rm`)"));
  }
  if (record->holds > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(key.ToString(), ": a swap to it is under way"));
  }
  if (record->phase == Phase::kDraining && record->unload != 0) return record->unload;
  const OperationId id =
      impl.operations.Begin(OperationKind::kUnload, key.model, key.version, "", by);
  const absl::Status why =
      absl::AbortedError(absl::StrCat(key.ToString(), ": superseded by op-", id, " (unload)"));
  switch (record->phase) {
    case Phase::kReserved:
    case Phase::kLoading: {
      impl.CancelLoad(*record);
      impl.TellWaiters(*record, why);
      // The unload is done when the load has come to rest.
      record->waiters.push_back(
          {0, [&impl, id](const absl::Status&) { impl.operations.Finish(id, absl::OkStatus()); },
           /*wants_load=*/false});
      return id;
    }
    case Phase::kUnloading:
      record->unload = id;
      return id;
    case Phase::kReady:
      impl.BeginDrain(*record, id);
      break;
    case Phase::kDraining:
      record->unload = id;
      impl.MaybeUnload(*record);
      break;
    case Phase::kStaged:
    case Phase::kFailed:
    case Phase::kQuarantined:
      if (!record->waiters.empty()) {  // Waiting for room.
        impl.CancelLoad(*record);
        impl.TellWaiters(*record, why);
      }
      impl.operations.Update(
          id, [](OperationSnapshot& operation) { operation.result.unchanged = true; });
      impl.operations.Finish(id, absl::OkStatus());
      return id;
  }
  if (record->phase == Phase::kDraining && drain_timeout < absl::InfiniteDuration()) {
    record->drain_timer =
        impl.deps.loop.PostDelayed(drain_timeout, [&impl, key, release_on_deadline] {
          VersionRecord* found = impl.Find(key);
          if (found == nullptr || found->phase != Phase::kDraining) return;
          found->drain_timer = 0;
          found->drain_deadline_hit = true;
          if (release_on_deadline) return impl.StartUnload(*found, true);
          impl.Note(key, "drain deadline", "still waiting for leases");
          impl.MaybeUnload(*found);
        });
  }
  return id;
}

// --- Health
// ----------------------------------------------------------------------------------------

void ModelManager::Impl::SetHealth(VersionRecord& record, Health health, HealthReason reason) {
  if (record.health == health && record.health_reason == reason) return;
  record.health = health;
  record.health_reason = reason;
  Note(record.key, absl::StrCat("health ", HealthName(health)),
       std::string(HealthReasonName(reason)));
  Changed(record);
}

void ModelManager::Impl::ScheduleHealthCheck() {
  health_timer = deps.loop.PostDelayed(options.health_interval, [this] {
    std::vector<std::pair<VersionKey, std::shared_ptr<const ResidentVersion>>> resident;
    for (const auto& [key, record] : versions) {
      if (record.resident != nullptr && record.health != Health::kSuspect) {
        resident.emplace_back(key, record.resident);
      }
    }
    OnPool(
        [resident = std::move(resident)] {
          std::vector<VersionKey> changed;
          for (const auto& [key, version] : resident) {
            if (std::ranges::any_of(version->regions, [](const auto& region) {
                  return !region->SourceUnchanged();
                })) {
              changed.push_back(key);
            }
          }
          return changed;
        },
        [this](const std::vector<VersionKey>& changed) {
          for (const VersionKey& key : changed) {
            VersionRecord* record = Find(key);
            if (record == nullptr || record->resident == nullptr) continue;
            SetHealth(*record, Health::kSuspect, HealthReason::kSourceChanged);
          }
          if (!stopping) ScheduleHealthCheck();
        });
  });
}

}  // namespace modelhost
