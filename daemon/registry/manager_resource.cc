// The capacity plan of a swap, and swaps of strategy "resource": the old versions leave before the
// new ones are loaded, because both do not fit.
//
//   WithdrawLabels -> DrainOld -> OldLeft (all) -> LoadTargets -> FlipSwap
//        | page only, labels.json stays         |
//        +------- RestoreSwap: any failure <----+ -> OldIsBack (all) -> EndRestore
//
// labels.json names the old version until the flip: a crash in the gap comes back with it. Nobody
// else moves a withdrawn label or gets one of the old versions back; clients that can wait do.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

std::vector<VersionKey> ModelManager::Impl::OldOf(const SwapRequest& request) const {
  std::vector<VersionKey> old;
  for (const SwapTarget& target : request.targets) {
    const VersionKey key{target.model, LabelVersion(target.model, request.label)};
    const VersionRecord* record = Find(key);
    if (key.version == target.version || record == nullptr || record->resident == nullptr) continue;
    // What another label or a swap needs stays where it is.
    if (record->phase == Phase::kReady && record->holds == 0 && record->reload == nullptr &&
        LabelsOf(key).size() == 1) {
      old.push_back(key);
    }
  }
  return old;
}

StrategyChoice ModelManager::Impl::PlanFor(const SwapRequest& request, SwapStrategy asked) {
  std::vector<WantedVersion> wanted;
  std::vector<std::string> names;
  bool guessed = false;  // Files that nobody has hashed yet may be resident already.
  for (const SwapTarget& target : request.targets) {
    const VersionKey key{target.model, target.version};
    const VersionRecord* record = Find(key);
    if (record == nullptr) continue;
    guessed = guessed || (record->resident == nullptr && record->manifest == nullptr);
    wanted.push_back(Want(*record));
    names.push_back(key.ToString());
  }
  StrategyChoice choice =
      ChooseStrategy(Picture(), wanted, OldOf(request), asked, request.allow_downtime,
                     absl::StrCat("swap to ", absl::StrJoin(names, ", ")));
  // Then the load itself finds out.
  if (guessed && absl::IsResourceExhausted(choice.refused)) choice.refused = absl::OkStatus();
  return choice;
}

absl::StatusOr<SwapPlan> ModelManager::PlanSwap(const SwapRequest& request) {
  Impl& impl = *impl_;
  if (auto status = impl.CheckSwap(request); !status.ok()) return status;
  const StrategyChoice choice = impl.PlanFor(request, *ParseSwapStrategy(request.strategy));
  const CapacityPicture picture = impl.Picture();
  SwapPlan plan;
  std::vector<WantedVersion> before;  // Each row counts what those above it do not bring.
  const std::vector<VersionKey> old =
      choice.strategy == SwapStrategy::kResource ? impl.OldOf(request) : std::vector<VersionKey>{};
  CapacityPicture resting = picture;
  std::erase_if(resting.residents, [&](const ResidentPicture& resident) {
    return std::ranges::find(old, resident.key) != old.end();
  });
  for (const SwapTarget& target : request.targets) {
    const VersionKey key{target.model, target.version};
    const VersionRecord* record = impl.Find(key);
    if (record == nullptr) return impl.NoSuchVersion(key);
    SwapPlanRow row;
    row.model = target.model;
    row.from = impl.LabelVersion(target.model, request.label);
    row.to = target.version;
    row.to_phase = std::string(PhaseName(record->phase));
    row.old_leaves_first = std::ranges::find(old, VersionKey{target.model, row.from}) != old.end();
    const uint64_t above = NeedOf(resting, before).front();
    before.push_back(impl.Want(*record));
    uint64_t all_bytes = before.back().unnamed.empty() ? 0 : before.back().unnamed.front();
    for (const RegionBytes& region : before.back().regions) all_bytes += region.bytes.front();
    row.need_bytes = NeedOf(resting, before).front() - above;
    row.shared_bytes = all_bytes - std::min(all_bytes, row.need_bytes);
    plan.rows.push_back(std::move(row));
  }
  for (size_t i = 0; i < picture.pools.size(); ++i) {
    const RoomPlan::Pool& pool = choice.room.pools[i];
    plan.pools.push_back({picture.pools[i].name, picture.pools[i].decides, pool.need_bytes,
                          picture.pools[i].limit_bytes, pool.free_bytes, pool.comes_bytes,
                          pool.peak_bytes, pool.fits});
  }
  plan.need_bytes = choice.room.pools.front().need_bytes;
  plan.free_bytes = choice.room.pools.front().free_bytes;
  plan.evict = choice.room.evict;
  plan.strategy = std::string(SwapStrategyName(choice.strategy));
  plan.waits = choice.room.waits && old.empty();
  plan.refused = choice.refused;
  plan.fits = choice.refused.ok();
  return plan;
}

absl::Status ModelManager::Impl::LeavesError(const VersionRecord& record) const {
  return absl::FailedPreconditionError(
      absl::StrCat(record.key.ToString(), ": it leaves for op-", record.leaves_for,
                   ", a swap of strategy resource (wait for it, or `modelctl ops cancel op-",
                   record.leaves_for, "`)"));
}

absl::Status ModelManager::Impl::WithdrawnError(const std::string& model,
                                                const std::string& label) const {
  const OperationId swap = withdrawn.at({model, label});
  return absl::FailedPreconditionError(absl::StrCat(
      model, ":", label, ": op-", swap,
      ", a swap of strategy resource, is between the old version and the new one (wait for it, or "
      "`modelctl ops cancel op-",
      swap, "`)"));
}

// What cannot work must be known before anything leaves.
absl::Status ModelManager::Impl::CheckResourceTargets(const SwapRequest& request) const {
  for (const SwapTarget& target : request.targets) {
    const VersionRecord* record = Find({target.model, target.version});
    if (record == nullptr) return NoSuchVersion({target.model, target.version});
    if (record->phase == Phase::kQuarantined) return record->error;
    if (record->resident == nullptr) continue;
    if (auto may = MayServe(*record); !may.ok()) return may;
  }
  return absl::OkStatus();
}

void ModelManager::Impl::WithdrawLabels(OperationId operation) {
  PendingSwap& swap = swaps.at(operation);
  operations.Update(operation, [](OperationSnapshot& snapshot) { snapshot.phase = "withdraw"; });
  LabelTransaction transaction;
  transaction.swap = operation;
  transaction.page = LabelTransaction::Page::kWithdraw;
  for (const VersionKey& key : swap.old) {
    LabelTransaction::Move move;
    move.model = key.model;
    move.label = swap.request.label;
    move.to = key.version;  // As long as it is still this one.
    transaction.moves.push_back(std::move(move));
  }
  transaction.done = [this, operation](const absl::StatusOr<LabelTransaction::Done>& done) {
    const auto it = swaps.find(operation);
    if (it == swaps.end() || it->second.restoring) return;
    if (!done.ok()) {  // A label moved meanwhile: nothing has happened yet.
      it->second.old.clear();
      return FinishSwap(operation, done.status());
    }
    DrainOld(operation);
  };
  Enqueue(std::move(transaction));
}

void ModelManager::Impl::ApplyPageOnly(LabelTransaction& transaction) {
  const bool withdraws = transaction.page == LabelTransaction::Page::kWithdraw;
  std::vector<LabelChange> changes;
  for (const LabelTransaction::Move& move : transaction.moves) {
    if (!withdraws) continue;
    if (const auto by = withdrawn.find({move.model, move.label}); by != withdrawn.end()) {
      return transaction.done(WithdrawnError(move.model, move.label));
    }
    if (LabelVersion(move.model, move.label) != move.to) {
      return transaction.done(absl::FailedPreconditionError(
          absl::StrCat(move.model, ":", move.label, ": it moved away from ", move.to,
                       " before the swap began (look again)")));
    }
  }
  for (const LabelTransaction::Move& move : transaction.moves) {
    const std::pair name{move.model, move.label};
    const VersionRecord* record = Find({move.model, move.to});
    if (withdraws) {
      withdrawn[name] = transaction.swap;
    } else if (withdrawn.erase(name) == 0) {
      continue;
    }
    // Not in labels.json: a crash has a new epoch, and that comes first.
    const uint64_t generation = ++labels.labels.at(name).generation;
    if (!withdraws && (record == nullptr || record->resident == nullptr)) continue;
    changes.push_back(
        {move.model, move.label, withdraws ? move.to : 0, withdraws ? 0 : move.to, generation});
  }
  const absl::Duration before = deps.clock.Monotonic();
  if (!changes.empty()) deps.labels.Publish(changes);
  const absl::Duration flip = deps.clock.Monotonic() - before;
  if (!changes.empty()) {
    Tell([&](Observer& observer) { observer.OnLabelsMoved(changes, flip); });
  }
  for (const LabelTransaction::Move& move : transaction.moves) {
    ReviewStale(move.model);
    Note({move.model, move.to}, withdraws ? "label withdrawn" : "label reinstated",
         absl::StrCat(move.label, " op-", transaction.swap));
  }
  UpdateReady();
  transaction.done(LabelTransaction::Done{changes, flip});
  for (const LabelTransaction::Move& move : transaction.moves) RetryPendingAcquires(move.model);
}

void ModelManager::Impl::DrainOld(OperationId operation) {
  PendingSwap& swap = swaps.at(operation);
  swap.withdrawn = true;
  swap.gap_started = deps.clock.Monotonic();
  swap.draining.insert(swap.old.begin(), swap.old.end());
  EvictVersions(swap.evict, {swap.request.targets[0].model, swap.request.targets[0].version});
  // It may end while they leave: by the first that does not go as it should.
  for (const VersionKey& key : std::vector<VersionKey>(swap.old)) {
    VersionRecord* record = Find(key);
    const auto it = swaps.find(operation);
    if (it == swaps.end() || it->second.restoring) return;
    if (record == nullptr || record->phase != Phase::kReady || record->holds != 0 ||
        LabelsOf(key).size() != 1) {
      return FinishSwap(operation,
                        absl::FailedPreconditionError(absl::StrCat(
                            key.ToString(), ": it was wanted elsewhere before it could leave")));
    }
    record->leaves_for = operation;
    BeginDrain(*record, 0);
  }
}

void ModelManager::Impl::TellDrainOfSwap(OperationId operation) {
  const auto it = swaps.find(operation);
  if (it == swaps.end() || it->second.restoring) return;
  uint64_t held = 0;
  for (const VersionKey& key : it->second.draining) held += leases.CountOf(key);
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.phase = "drain";
    snapshot.message = absl::StrCat("waiting for ", held, held == 1 ? " lease" : " leases");
  });
}

void ModelManager::Impl::DrainDeadlineOfSwap(VersionRecord& record, absl::Duration timeout) {
  const uint64_t held = leases.CountOf(record.key);
  FinishSwap(record.leaves_for,
             absl::ResourceExhaustedError(absl::StrCat(
                 record.key.ToString(), ": ", held, held == 1 ? " lease" : " leases",
                 " did not end within ", absl::FormatDuration(timeout),
                 " (drain_timeout; `modelctl leases --stale` shows them, on_drain_deadline = "
                 "\"release\" would go on without them)")));
}

void ModelManager::Impl::OldLeft(OperationId operation, const VersionKey& key) {
  const auto it = swaps.find(operation);
  if (it == swaps.end()) return;
  it->second.draining.erase(key);
  if (it->second.restoring) {
    QueueForRoom(key, /*first=*/true);
    return EnsureReady(key, {operation, [this, operation, key](const absl::Status& status) {
                               OldIsBack(operation, key, status);
                             }});
  }
  if (stopping) return FinishSwap(operation, StoppingError());
  if (!it->second.draining.empty()) return;
  operations.Update(operation, [](OperationSnapshot& snapshot) { snapshot.message.clear(); });
  // Before anybody who has come since: the room is what the old ones gave.
  const std::vector<SwapTarget>& targets = it->second.request.targets;
  for (auto target = targets.rbegin(); target != targets.rend(); ++target) {
    const VersionRecord* record = Find({target->model, target->version});
    const bool at_rest =
        record != nullptr && (record->phase == Phase::kStaged || record->phase == Phase::kFailed);
    if (at_rest && !WaitsForRoom(record->key)) QueueForRoom(record->key, /*first=*/true);
  }
  LoadTargets(operation);
  LookForRoom();
}

void ModelManager::Impl::RestoreSwap(OperationId operation, const absl::Status& failure) {
  PendingSwap& swap = swaps.at(operation);
  if (std::exchange(swap.restoring, true)) return;
  swap.failure = failure;
  const bool began = swap.withdrawn;
  for (const VersionKey& key : std::exchange(swap.held, {})) Unhold(key);
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.phase = "restore";
    snapshot.message = std::string(failure.message());
  });
  DropWaiters(operation, failure);
  // Who cancels is answered now; the old versions come back behind that.
  if (absl::IsCancelled(failure)) {
    operations.Finish(operation, began ? absl::CancelledError(absl::StrCat(
                                             failure.message(), "; the old versions come back"))
                                       : failure);
  }
  swap.not_back = 1;  // Not before all are asked for.
  if (began) {
    for (const VersionKey& key : std::vector<VersionKey>(swap.old)) {
      VersionRecord* record = Find(key);
      ++swap.not_back;
      if (record == nullptr) {
        OldIsBack(operation, key, NoSuchVersion(key));
      } else if (record->phase == Phase::kDraining) {
        StopDrain(*record, operation);
        swap.draining.erase(key);
        OldIsBack(operation, key, absl::OkStatus());
      } else if (record->phase != Phase::kUnloading) {  // Else OldLeft goes on.
        record->leaves_for = 0;
        if (record->phase == Phase::kStaged) QueueForRoom(key, /*first=*/true);
        EnsureReady(key, {operation, [this, operation, key](const absl::Status& status) {
                            OldIsBack(operation, key, status);
                          }});
      }
    }
    LookForRoom();
  }
  OldIsBack(operation, {}, absl::OkStatus());
}

void ModelManager::Impl::OldIsBack(OperationId operation, const VersionKey& key,
                                   const absl::Status& status) {
  const auto it = swaps.find(operation);
  if (it == swaps.end()) return;
  if (!status.ok()) {
    absl::StrAppend(&it->second.not_restored, "; ", key.ToString(),
                    " could not be loaded again: ", status.message());
  }
  if (--it->second.not_back == 0) EndRestore(operation);
}

void ModelManager::Impl::EndRestore(OperationId operation) {
  PendingSwap& swap = swaps.at(operation);
  LabelTransaction transaction;
  transaction.swap = operation;
  transaction.page = LabelTransaction::Page::kReinstate;
  for (const VersionKey& key : swap.old) {  // Where the withdrawal never came, nothing changes.
    LabelTransaction::Move move;
    move.model = key.model;
    move.label = swap.request.label;
    move.to = key.version;
    transaction.moves.push_back(std::move(move));
  }
  transaction.done = [this, operation](const absl::StatusOr<LabelTransaction::Done>&) {
    const auto node = swaps.extract(operation);
    if (node.empty()) return;
    const PendingSwap& ended = node.mapped();
    std::string text(ended.failure.message());
    if (ended.withdrawn) {
      const absl::Duration gap = deps.clock.Monotonic() - ended.gap_started;
      std::vector<std::string> names;
      for (const VersionKey& key : ended.old) {
        const VersionRecord* record = Find(key);
        if (record != nullptr && record->phase == Phase::kReady) names.push_back(key.ToString());
      }
      if (!names.empty()) {
        absl::StrAppend(&text, "; ", absl::StrJoin(names, ", "),
                        names.size() == 1 ? " serves" : " serve", " again after a gap of ",
                        absl::FormatDuration(absl::Trunc(gap, absl::Milliseconds(1))));
      }
      absl::StrAppend(&text, ended.not_restored);
      operations.Update(operation, [&](OperationSnapshot& snapshot) { snapshot.result.gap = gap; });
      UpdateReady();
    }
    absl::Status told(ended.failure.code(), text);
    operations.Finish(operation, WithBudgetRefusal(std::move(told), ended.failure));
  };
  Enqueue(std::move(transaction));
}

}  // namespace modelhost
