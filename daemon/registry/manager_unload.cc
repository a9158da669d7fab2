// Draining and freeing: from READY back to STAGED.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/registry/manager_impl.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

void ModelManager::Impl::ReviewKeeping(VersionRecord& record) {
  const bool idle = MayLapse(FactsOf(record));
  if (idle == (record.keep_timer != 0)) return;
  if (!idle) {
    deps.loop.CancelTimer(std::exchange(record.keep_timer, 0));
    return;
  }
  absl::Duration keep = PolicyOf(record.key.model).keep_previous;
  // Who had it before the restart may be on the way back.
  if (record.from_before) keep = std::max(keep, grace_ends - deps.clock.Monotonic());
  record.keep_timer = deps.loop.PostDelayed(keep, [this, key = record.key] {
    VersionRecord* found = Find(key);
    if (found == nullptr) return;
    found->keep_timer = 0;
    if (MayLapse(FactsOf(*found))) BeginDrain(*found, 0);
  });
}

void ModelManager::Impl::Unhold(const VersionKey& key) {
  VersionRecord* record = Find(key);
  if (record == nullptr || record->holds == 0) return;
  --record->holds;
  ReviewKeeping(*record);
}

void ModelManager::Impl::BeginDrain(VersionRecord& record, OperationId unload) {
  if (record.keep_timer != 0) deps.loop.CancelTimer(std::exchange(record.keep_timer, 0));
  if (!Move(record, Phase::kDraining)) return;
  record.unload = unload;
  record.drain_started = deps.clock.Monotonic();
  record.drain_deadline_hit = false;
  const VersionKey key = record.key;
  FaultPoint("drain.begun");
  Tell([&](Observer& observer) { observer.OnDraining(key); });
  const EffectivePolicy& policy = PolicyOf(key.model);
  SetDrainDeadline(record, policy.drain_timeout, policy.on_drain_deadline == "release");
  MaybeUnload(record);
}

void ModelManager::Impl::SetDrainDeadline(VersionRecord& record, absl::Duration timeout,
                                          bool release) {
  if (record.drain_timer != 0) deps.loop.CancelTimer(std::exchange(record.drain_timer, 0));
  if (record.phase != Phase::kDraining || timeout == absl::InfiniteDuration()) return;
  record.drain_timer = deps.loop.PostDelayed(timeout, [this, key = record.key, timeout, release] {
    VersionRecord* found = Find(key);
    if (found == nullptr || found->phase != Phase::kDraining) return;
    found->drain_timer = 0;
    found->drain_deadline_hit = true;
    const uint64_t held = leases.CountOf(key);
    Tell([&](Observer& observer) { observer.OnDrainDeadline(key, held, release); });
    Note(key, "drain deadline",
         absl::StrCat(held, held == 1 ? " lease" : " leases", " after ",
                      absl::FormatDuration(timeout),
                      release ? ": let go of, clients keep what they have mapped"
                              : ": still waiting for them (`modelctl leases --stale`)"));
    if (release) return StartUnload(*found, true);
    if (found->leaves_for != 0) return DrainDeadlineOfSwap(*found, timeout);
    MaybeUnload(*found);
  });
}

void ModelManager::Impl::StopDrain(VersionRecord& record, OperationId by) {
  if (record.drain_timer != 0) deps.loop.CancelTimer(std::exchange(record.drain_timer, 0));
  const OperationId unload = std::exchange(record.unload, 0);
  record.leaves_for = 0;
  Move(record, Phase::kReady);
  record.last_used = deps.clock.Wall();
  ReviewKeeping(record);
  if (unload != 0) {
    operations.Finish(unload, SupersededBy(absl::StrCat(record.key.ToString(),
                                                        ": wanted again before it was unloaded"),
                                           by));
    RetryPendingAcquires(record.key.model);
  }
}

void ModelManager::Impl::MaybeUnload(VersionRecord& record) {
  if (record.phase != Phase::kDraining) return;
  const uint64_t held = leases.CountOf(record.key);
  if (MayFree(FactsOf(record), /*released=*/false)) return StartUnload(record, false);
  if (record.leaves_for != 0) TellDrainOfSwap(record.leaves_for);
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
  if (deadline) {
    leases.LetGo(key);  // Device memory that clients have mapped stays booked until they end.
    ReviewStale(key.model);
  }
  record.freeing = Regions(*record.resident);
  FaultPoint("drain.freeing");
  Tell([&](Observer& observer) { observer.OnDrained(key, drained, deadline); });
  const absl::Duration started = deps.clock.Monotonic();
  if (record.reload != nullptr) {
    std::exchange(record.reload, nullptr)->Cancel();
    // Who waited for it gets what comes after this: a load.
  }
  // Unmapping gigabytes takes long: not here. Clients keep what they have mapped.
  OnShortPool(
      [resident = std::exchange(record.resident, nullptr)]() mutable {
        resident.reset();
        return 0;
      },
      [this, key, started](int) { FinishUnload(key, started); });
}

void ModelManager::Impl::FinishUnload(const VersionKey& key, absl::Duration started) {
  VersionRecord* record = Find(key);
  if (record == nullptr) return;
  SetHealth(
      *record,
      record->on_disk ? HealthState{} : HealthState{Health::kDegraded, HealthReason::kSourceGone},
      HealthCause::kFree);
  SetDeviceResidency(*record, DeviceResidency::kNone);
  SetResidency(*record, HostTier::kNone);
  FaultPoint("drain.freed");
  record->progress = {};
  record->freeing.clear();
  Move(*record, Phase::kStaged);
  const absl::Duration took = deps.clock.Monotonic() - started;
  Tell([&](Observer& observer) { observer.OnUnloaded(key, took); });
  Note(key, "unloaded", "");
  if (const OperationId unload = std::exchange(record->unload, 0); unload != 0) {
    operations.Finish(unload, absl::OkStatus());
  }
  if (record->leaves_for != 0) {
    OldLeft(std::exchange(record->leaves_for, 0), key);
    record = Find(key);
  }
  if (record != nullptr && !record->waiters.empty()) {
    if (stopping) {
      TellWaiters(*record, StoppingError());
    } else {
      AskForRoom(*record);
    }
  }
  if (record != nullptr && record->deleting != 0 && deletes.contains(key)) RemoveFromDisk(key);
  LookForRoom();
  ForgetIfGone(key);
}

void ModelManager::Impl::ForgetIfGone(const VersionKey& key) {
  const VersionRecord* record = Find(key);
  if (record == nullptr || !MayForget(FactsOf(*record))) return;
  versions.erase(key);
  Tell([&](Observer& observer) { observer.OnVersionGone(key); });
}

absl::StatusOr<OperationId> ModelManager::Unload(const VersionKey& key,
                                                 std::optional<absl::Duration> drain_timeout,
                                                 bool release_on_deadline, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Impl::StoppingError();
  VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  switch (MayUnload(impl.FactsOf(*record))) {
    case Verdict::kLabelled:
      return absl::FailedPreconditionError(
          absl::StrCat(key.ToString(), ": label ", absl::StrJoin(impl.LabelsOf(key), ", "),
                       " names it (swap to another version first, or `modelctl label rm`)"));
    case Verdict::kHeld:
      return absl::FailedPreconditionError(
          absl::StrCat(key.ToString(), ": a swap to it is under way"));
    default:
      break;
  }
  // One under way is joined: when it is over there is nothing left to unload.
  if (record->unload != 0) {
    if (record->phase == Phase::kUnloading) {
      // Who wants it loaded again came before this wish.
      impl.TellLoadWaiters(*record, SupersededBy(key.ToString(), record->unload));
    } else if (drain_timeout.has_value() || release_on_deadline) {
      impl.SetDrainDeadline(*record, drain_timeout.value_or(impl.PolicyOf(key.model).drain_timeout),
                            release_on_deadline);
    }
    return record->unload;
  }
  for (const auto& waiter : record->waiters) {
    if (waiter.wants_load) continue;
    const OperationId running = waiter.operation;
    impl.CancelLoad(*record);
    impl.TellLoadWaiters(*record, SupersededBy(key.ToString(), running));
    return running;
  }
  const OperationId id =
      impl.operations.Begin(OperationKind::kUnload, key.model, key.version, "", by);
  const absl::Status why = SupersededBy(key.ToString(), id);
  if (record->reload != nullptr) {
    impl.CancelLoad(*record);
    impl.TellWaiters(*record, why);
  }
  switch (record->phase) {
    case Phase::kReserved:
    case Phase::kLoading: {
      impl.CancelLoad(*record);
      impl.TellWaiters(*record, why);
      // The unload is done when the load has come to rest.
      record->waiters.push_back(
          {id, [&impl, id](const absl::Status&) { impl.operations.Finish(id, absl::OkStatus()); },
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
  // Without a time-out of its own the model's policy holds.
  if (drain_timeout.has_value()) {
    impl.SetDrainDeadline(*record, *drain_timeout, release_on_deadline);
  } else if (release_on_deadline) {
    impl.SetDrainDeadline(*record, impl.PolicyOf(key.model).drain_timeout, true);
  }
  return id;
}

}  // namespace modelhost
