// Labels: the transaction that moves them (check, make durable, flip), and swap and rollback on
// top.
//
// One transaction at a time. Its targets are held READY while labels.json is written on the pool,
// so that what was READY when the file was renamed is READY when the page is written.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr absl::Duration kRestorePause = absl::Seconds(1);

absl::Status CheckLabelName(const std::string& label) {
  if (IsValidModelName(label)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("label \"", label, "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
}

}  // namespace

uint64_t ModelManager::Impl::LabelVersion(const std::string& model,
                                          const std::string& label) const {
  const auto it = labels.labels.find({model, label});
  return it == labels.labels.end() ? 0 : it->second.version;
}

void ModelManager::Impl::Enqueue(LabelTransaction transaction) {
  transactions.push_back(std::move(transaction));
  if (!saving_labels) RunNextTransaction();
}

void ModelManager::Impl::RunNextTransaction() {
  while (!saving_labels && !transactions.empty()) {
    LabelTransaction transaction = std::move(transactions.front());
    transactions.pop_front();
    if (transaction.page != LabelTransaction::Page::kMove) {
      ApplyPageOnly(transaction);
      continue;
    }
    absl::Status status = transaction.still_wanted ? transaction.still_wanted() : absl::OkStatus();
    LabelFile next = labels;
    std::vector<LabelChange> changes;
    for (const LabelTransaction::Move& move : transaction.moves) {
      if (!status.ok()) break;
      const auto withdrawn_by = withdrawn.find({move.model, move.label});
      if (withdrawn_by != withdrawn.end() && withdrawn_by->second != transaction.swap) {
        status = WithdrawnError(move.model, move.label);
        break;
      }
      const uint64_t current = LabelVersion(move.model, move.label);
      status = CheckIfCurrent(move.model, move.label, move.if_current, current);
      if (!status.ok() || (current == move.to && !move.renew)) continue;
      LabelRecord& record = next.labels[{move.model, move.label}];
      if (move.to != 0) {
        const VersionRecord* target = Find({move.model, move.to});
        const Verdict may = target == nullptr ? Verdict::kNotReady : MayLabel(FactsOf(*target));
        if (may == Verdict::kSuspect) {
          status = SuspectError(*target);
          break;
        }
        if (may != Verdict::kYes) {
          status = absl::FailedPreconditionError(
              absl::StrCat(move.model, "@", move.to, ": not READY but ",
                           target == nullptr ? "not in the store" : PhaseName(target->phase),
                           " (`modelctl swap` loads it first)"));
          break;
        }
        if (status = MayServe(*target); !status.ok()) break;
        record.digest = target->digest.value_or(Digest{});
      } else {
        record.digest = Digest{};
      }
      if (move.record_previous) record.previous = record.version;
      record.version = move.to;
      record.generation += 1;
      record.changed = deps.clock.Wall();
      changes.push_back({move.model, move.label, current, move.to, record.generation});
    }
    if (!status.ok() || changes.empty()) {
      if (status.ok()) {
        transaction.done(LabelTransaction::Done{});
      } else {
        transaction.done(status);
      }
      continue;
    }
    for (const LabelChange& change : changes) {
      if (VersionRecord* target = Find({change.model, change.to})) Hold(*target);
    }
    FaultPoint("flip.held");
    saving_labels = true;
    auto shared = std::make_shared<LabelTransaction>(std::move(transaction));
    OnShortPool([this, next] { return SaveLabels(deps.os, deps.state_dir, next); },
                [this, shared, next, changes](const absl::Status& saved) mutable {
                  saving_labels = false;
                  ApplyTransaction(*shared, std::move(next), changes, saved);
                  RunNextTransaction();
                });
  }
}

void ModelManager::Impl::ApplyTransaction(LabelTransaction& transaction, LabelFile next,
                                          const std::vector<LabelChange>& changes,
                                          const absl::Status& saved) {
  const auto unhold = [&] {
    for (const LabelChange& change : changes) Unhold({change.model, change.to});
  };
  if (!saved.ok()) {
    for (const LabelChange& change : changes) maybe_labelled.insert({change.model, change.to});
    unhold();
    // The rename may have happened and only the last fsync failed. Memory says the old state, so
    // the disk is told the old state again, before any other change: a late repair would undo that
    // one.
    labels_in_doubt = true;
    RestoreLabels();
    transaction.done(absl::Status(
        saved.code(), absl::StrCat("the labels could not be made durable, nothing was changed: ",
                                   saved.message())));
    return;
  }
  FaultPoint("flip.saved");
  maybe_labelled.clear();
  labels_in_doubt = false;
  labels = std::move(next);
  unhold();  // The label holds it now.
  for (const LabelChange& change : changes) withdrawn.erase({change.model, change.label});
  FaultPoint("flip.remembered");
  const absl::Duration before = deps.clock.Monotonic();
  deps.labels.Publish(changes);
  const absl::Duration flip = deps.clock.Monotonic() - before;
  FaultPoint("flip.seen");
  Tell([&](Observer& observer) { observer.OnLabelsMoved(changes, flip); });
  for (const LabelChange& change : changes) {
    Note({change.model, change.to}, "label",
         absl::StrCat(change.label, " ", change.from, " -> ", change.to, " generation ",
                      change.generation));
    for (const uint64_t version : {change.from, change.to}) {
      VersionRecord* record = Find({change.model, version});
      if (record == nullptr) continue;
      record->last_used = deps.clock.Wall();
      Changed(*record);
      ReviewKeeping(*record);
    }
    ForgetIfGone({change.model, change.from});
  }
  for (const LabelChange& change : changes) ReviewStale(change.model);
  UpdateReady();
  transaction.done(LabelTransaction::Done{changes, flip});
  for (const LabelChange& change : changes) RetryPendingAcquires(change.model);
}

// Until it is done: else a crash, much later, would bring back what nobody sees any more.
void ModelManager::Impl::RestoreLabels() {
  saving_labels = true;
  OnShortPool([this, old = labels] { return SaveLabels(deps.os, deps.state_dir, old); },
              [this](const absl::Status& restored) {
                saving_labels = false;
                if (restored.ok()) {
                  labels_in_doubt = false;
                  maybe_labelled.clear();
                } else if (!stopping) {
                  if (restore_timer != 0) deps.loop.CancelTimer(restore_timer);
                  restore_timer = deps.loop.PostDelayed(kRestorePause, [this] {
                    restore_timer = 0;
                    // A later change that was made durable has settled it.
                    if (labels_in_doubt && !saving_labels) RestoreLabels();
                  });
                }
                RunNextTransaction();
              });
}

void ModelManager::Impl::AnnounceLabels(const VersionRecord& record) {
  std::vector<LabelChange> changes;
  for (const std::string& label : LabelsOf(record.key)) {
    if (withdrawn.contains({record.key.model, label})) continue;
    changes.push_back({record.key.model, label, 0, record.key.version,
                       labels.labels.at({record.key.model, label}).generation});
  }
  if (!changes.empty()) deps.labels.Publish(changes);
}

// --- Swap
// ------------------------------------------------------------------------------------------

absl::Status ModelManager::Impl::CheckSwap(const SwapRequest& request) const {
  if (stopping) {
    return absl::UnavailableError("the daemon is stopping (try again when it is back)");
  }
  if (request.targets.empty()) {
    return absl::InvalidArgumentError("swap: no target (name a model and a version)");
  }
  if (auto status = CheckLabelName(request.label); !status.ok()) return status;
  if (auto strategy = ParseSwapStrategy(request.strategy); !strategy.ok()) {
    return strategy.status();
  }
  for (size_t i = 0; i < request.targets.size(); ++i) {
    const SwapTarget& target = request.targets[i];
    for (size_t j = 0; j < i; ++j) {
      if (request.targets[j].model == target.model) {
        return absl::InvalidArgumentError(absl::StrCat(target.model, ": named twice in one swap"));
      }
    }
    const VersionRecord* record = Find({target.model, target.version});
    if (record == nullptr) return NoSuchVersion({target.model, target.version});
    if (record->health == Health::kSuspect) return SuspectError(*record);
    if (auto status = CheckNotRemoved(record->key); !status.ok()) return status;
    if (record->leaves_for != 0) return LeavesError(*record);
  }
  const SwapTarget& first = request.targets.front();
  return CheckIfCurrent(first.model, request.label, request.if_current,
                        LabelVersion(first.model, request.label));
}

absl::StatusOr<OperationId> ModelManager::Impl::StartSwap(SwapRequest request, OperationKind kind,
                                                          uint32_t by) {
  if (auto status = CheckSwap(request); !status.ok()) return status;
  const SwapTarget first = request.targets.front();
  // An identical one under way is the same wish.
  for (const auto& [id, swap] : swaps) {
    if (swap.restoring) continue;
    const auto same = [](const SwapTarget& a, const SwapTarget& b) {
      return a.model == b.model && a.version == b.version;
    };
    if (swap.request.label == request.label && swap.request.if_current == request.if_current &&
        std::ranges::equal(swap.request.targets, request.targets, same)) {
      const OperationId running = id;
      for (const SwapTarget& target : request.targets) {
        if (VersionRecord* record = Find({target.model, target.version})) RetryNow(*record);
      }
      return running;
    }
  }
  for (const SwapTarget& target : request.targets) {
    // Past its withdrawal a swap can only go on or go back.
    if (withdrawn.contains({target.model, request.label})) {
      return WithdrawnError(target.model, request.label);
    }
  }
  StrategyChoice choice = PlanFor(request, *ParseSwapStrategy(request.strategy));
  if (!choice.refused.ok()) {
    if (const auto refusal = BudgetRefusalOf(choice.refused); refusal.has_value()) {
      Tell([&](Observer& observer) { observer.OnRoomRefused(refusal->pool, "swap"); });
    }
    return choice.refused;
  }
  if (choice.strategy == SwapStrategy::kResource) {
    if (auto status = CheckResourceTargets(request); !status.ok()) return status;
  }
  const OperationId id = operations.Begin(kind, first.model, first.version, request.label, by);
  operations.Update(id, [&](OperationSnapshot& snapshot) { snapshot.trigger = request.trigger; });
  SupersedeSwaps(request, id);
  PendingSwap& swap = swaps[id];
  swap.request = std::move(request);
  swap.operation = id;
  swap.strategy = choice.strategy;
  swap.not_ready = swap.request.targets.size();
  operations.Update(id, [&](OperationSnapshot& operation) {
    operation.result.strategy = std::string(SwapStrategyName(choice.strategy));
  });
  if (choice.strategy == SwapStrategy::kResource) {
    swap.old = OldOf(swap.request);
    if (!swap.old.empty()) {
      swap.evict = choice.room.evict;
      WithdrawLabels(id);
      return id;
    }
  }
  // Room for all of them at once: each by itself might take another victim than the plan says.
  EvictVersions(choice.room.evict, {first.model, first.version});
  LoadTargets(id);
  return id;
}

void ModelManager::Impl::LoadTargets(OperationId id) {
  // Copied: a target that is READY already reports at once, and the last report ends the swap.
  const std::vector<SwapTarget> targets = swaps.at(id).request.targets;
  for (const SwapTarget& target : targets) {
    // A target has failed already: the others need not load.
    if (const auto it = swaps.find(id); it == swaps.end() || it->second.restoring) break;
    const VersionKey key{target.model, target.version};
    const bool was_ready_before = Find(key) != nullptr && Find(key)->resident != nullptr;
    EnsureReady(key, {id, [this, id, key, was_ready_before](const absl::Status& status) {
                        const VersionRecord* record = Find(key);
                        const auto it = swaps.find(id);
                        if (it != swaps.end() && !was_ready_before && record != nullptr &&
                            record->resident != nullptr) {
                          it->second.longest_load =
                              std::max(it->second.longest_load, record->resident->report.duration);
                        }
                        SwapTargetReady(id, key, status);
                      }});
  }
}

std::set<OperationId> ModelManager::Impl::SupersededSwaps(const SwapRequest& request) const {
  std::set<OperationId> superseded;
  for (const auto& [id, swap] : swaps) {
    if (swap.flipping || swap.restoring || swap.request.label != request.label) continue;
    const bool overlap = std::ranges::any_of(swap.request.targets, [&](const SwapTarget& old) {
      return std::ranges::any_of(
          request.targets, [&](const SwapTarget& target) { return target.model == old.model; });
    });
    if (overlap) superseded.insert(id);
  }
  return superseded;
}

void ModelManager::Impl::SupersedeSwaps(const SwapRequest& request, OperationId by) {
  for (const OperationId id : SupersededSwaps(request)) {
    const SwapRequest& old = swaps.at(id).request;
    FinishSwap(id, SupersededBy(absl::StrCat(old.targets.front().model, ":", old.label), by));
  }
}

void ModelManager::Impl::SwapTargetReady(OperationId operation, const VersionKey& key,
                                         const absl::Status& status) {
  const auto it = swaps.find(operation);
  if (it == swaps.end()) return;  // Superseded or cancelled.
  PendingSwap& swap = it->second;
  if (swap.restoring) return;
  if (!status.ok()) return FinishSwap(operation, status);
  // Neither an eviction nor keep_previous may take it while the others load.
  if (VersionRecord* record = Find(key); record != nullptr && swap.held.insert(key).second) {
    Hold(*record);
    ReviewKeeping(*record);
  }
  if (--swap.not_ready == 0) FlipSwap(operation);
}

void ModelManager::Impl::FlipSwap(OperationId operation) {
  PendingSwap& swap = swaps.at(operation);
  swap.flipping = true;
  operations.Update(operation, [](OperationSnapshot& snapshot) { snapshot.phase = "labels"; });
  LabelTransaction transaction;
  transaction.swap = operation;
  for (size_t i = 0; i < swap.request.targets.size(); ++i) {
    LabelTransaction::Move move;
    move.model = swap.request.targets[i].model;
    move.label = swap.request.label;
    move.to = swap.request.targets[i].version;
    if (i == 0) move.if_current = swap.request.if_current;
    transaction.moves.push_back(std::move(move));
  }
  transaction.done = [this, operation](absl::StatusOr<LabelTransaction::Done> done) {
    const auto it = swaps.find(operation);
    if (it == swaps.end()) return;
    if (!done.ok()) return FinishSwap(operation, done.status());
    uint64_t draining = 0;
    for (const LabelChange& change : done->changes) {
      draining += leases.CountOf({change.model, change.from});
    }
    operations.Update(operation, [&](OperationSnapshot& snapshot) {
      snapshot.result.unchanged = done->changes.empty();
      snapshot.result.changes = done->changes;
      snapshot.result.flip = done->flip;
      snapshot.result.load = it->second.longest_load;
      snapshot.result.draining_leases = draining;
      if (it->second.withdrawn) {
        snapshot.result.gap = deps.clock.Monotonic() - it->second.gap_started;
      }
    });
    it->second.withdrawn = false;
    FinishSwap(operation, absl::OkStatus());
  };
  Enqueue(std::move(transaction));
}

void ModelManager::Impl::FinishSwap(OperationId operation, const absl::Status& status) {
  if (const auto it = swaps.find(operation);
      it != swaps.end() && !it->second.old.empty() && !status.ok() && !stopping) {
    return RestoreSwap(operation, status);
  }
  const auto node = swaps.extract(operation);
  if (node.empty()) return;
  for (const VersionKey& key : node.mapped().held) Unhold(key);
  operations.Finish(operation, status);
  // Other targets that still load for it need not.
  if (!status.ok()) DropWaiters(operation, status);
}

absl::StatusOr<OperationId> ModelManager::Swap(const SwapRequest& request, uint32_t by) {
  return impl_->StartSwap(request, OperationKind::kSwap, by);
}

absl::StatusOr<OperationId> ModelManager::Rollback(const std::string& model,
                                                   const std::string& label, uint64_t to,
                                                   uint32_t by, const std::string& strategy,
                                                   bool allow_downtime) {
  Impl& impl = *impl_;
  if (!impl.models.contains(model)) return impl.NoSuchModel(model);
  SwapRequest request;
  request.label = label.empty() ? kDefaultLabel : label;
  if (!strategy.empty()) request.strategy = strategy;
  request.allow_downtime = allow_downtime;
  if (to == 0) {
    const auto it = impl.labels.labels.find({model, request.label});
    if (it == impl.labels.labels.end() || it->second.previous == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          model, ":", request.label, ": no previous version is recorded (name one with --to N)"));
    }
    to = it->second.previous;
  }
  request.targets.push_back({model, to});
  return impl.StartSwap(std::move(request), OperationKind::kRollback, by);
}

// --- Labels by hand
// --------------------------------------------------------------------------------

void ModelManager::SetLabel(const std::string& model, const std::string& label, uint64_t version,
                            std::optional<uint64_t> if_current,
                            std::function<void(absl::StatusOr<LabelChange>)> done) {
  Impl& impl = *impl_;
  if (auto status = CheckLabelName(label); !status.ok()) return done(status);
  if (!impl.models.contains(model)) return done(impl.NoSuchModel(model));
  if (version != 0 && impl.Find({model, version}) == nullptr) {
    return done(impl.NoSuchVersion({model, version}));
  }
  if (const VersionRecord* record = impl.Find({model, version});
      record != nullptr && record->resident != nullptr) {
    if (auto may = impl.MayServe(*record); !may.ok()) return done(may);
  }
  if (version == 0 && impl.LabelVersion(model, label) == 0) {
    return done(absl::NotFoundError(
        absl::StrCat(model, ":", label, ": no such label (`modelctl label ls ", model, "`)")));
  }
  LabelTransaction transaction;
  transaction.moves.push_back({model, label, version, if_current});
  transaction.done = [&impl, model, label, version,
                      done = std::move(done)](absl::StatusOr<LabelTransaction::Done> result) {
    if (!result.ok()) return done(result.status());
    if (!result->changes.empty()) return done(result->changes.front());
    const auto it = impl.labels.labels.find({model, label});
    done(LabelChange{model, label, version, version,
                     it == impl.labels.labels.end() ? 0 : it->second.generation});
  };
  impl.Enqueue(std::move(transaction));
}

void ModelManager::RemoveLabel(const std::string& model, const std::string& label,
                               std::optional<uint64_t> if_current,
                               std::function<void(absl::StatusOr<LabelChange>)> done) {
  SetLabel(model, label, 0, if_current, std::move(done));
}

}  // namespace modelhost
