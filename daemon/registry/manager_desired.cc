// The desired state file: read on the pool, compared with the labels, and brought about by ordinary
// swaps.
//
//   a hint (directory watch, SIGHUP) or the poll -> LookAtDesired -> pool -> TakeDesired
//   anything changes -> ReviewDesired (once a turn) -> PlanDesired -> StartSwap
//
// Only a file that is there and good is acted on. While it is missing or broken nothing is started,
// and nothing is undone.
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {
namespace {

constexpr absl::Duration kConfirmAfter = absl::Seconds(1);

}  // namespace

void ModelManager::FollowDesired(const std::string& file) { impl_->FollowDesired(file); }
void ModelManager::LookAtDesired() { impl_->LookAtDesired(); }

void ModelManager::Impl::FollowDesired(const std::string& file) {
  if (stopping) return;
  if (file == desired.file) return LookAtDesired();
  deps.loop.CancelTimer(std::exchange(desired.poll_timer, 0));
  deps.loop.CancelTimer(std::exchange(desired.deadline_timer, 0));
  deps.loop.CancelTimer(std::exchange(desired.retry_timer, 0));
  // Swaps under way are operations like any other, and go on; a read under way counts no more.
  DesiredBook fresh;
  fresh.file = file;
  fresh.state = file.empty() ? DesiredFileState::kOff : DesiredFileState::kReading;
  fresh.reading = desired.reading;
  fresh.look = desired.look + 1;
  fresh.review_posted = desired.review_posted;
  fresh.running = std::move(desired.running);
  desired = std::move(fresh);
  TellDesiredFile(false, {});
  LookAtDesired();
}

void ModelManager::Impl::LookAtDesired() {
  if (stopping || desired.file.empty()) return;
  if (desired.reading) {
    desired.look_again = true;
    return;
  }
  desired.reading = true;
  desired.look_again = false;
  deps.loop.CancelTimer(std::exchange(desired.poll_timer, 0));
  desired.deadline_timer = deps.loop.PostDelayed(options.desired_read_limit, [this] {
    desired.deadline_timer = 0;
    // The read goes on; no other is started beside it.
    SetDesiredState(DesiredFileState::kBroken,
                    absl::StrCat(desired.file, ": not read within ",
                                 absl::FormatDuration(options.desired_read_limit),
                                 " (does its file system hang?)"));
    TellDesiredFile(false, {});
  });
  OnShortPool(
      [&os = deps.os, file = desired.file] { return ReadDesiredFile(os, file); },
      [this, look = desired.look](DesiredText read) { TakeDesired(look, std::move(read)); });
}

void ModelManager::Impl::TakeDesired(uint64_t look, DesiredText read) {
  desired.reading = false;
  deps.loop.CancelTimer(std::exchange(desired.deadline_timer, 0));
  if (stopping || desired.file.empty()) return;
  if (look != desired.look) return LookAtDesired();

  absl::Duration next = options.desired_poll;
  bool changed = false;
  if (absl::IsUnavailable(read.status)) {
    next = kConfirmAfter;  // It is being written.
  } else if (!read.status.ok()) {
    desired.unconfirmed.clear();
    SetDesiredState(
        absl::IsNotFound(read.status) ? DesiredFileState::kMissing : DesiredFileState::kBroken,
        std::string(read.status.message()));
  } else if (!read.text.empty() && !absl::EndsWith(read.text, "\n") && read.text != desired.text &&
             read.text != desired.unconfirmed) {
    // The last line may be half of one, and half a number is another number.
    desired.unconfirmed = std::move(read.text);
    next = kConfirmAfter;
  } else {
    changed = TakeDesiredText(std::move(read.text));
  }
  TellDesiredFile(changed, read.watch);
  if (std::exchange(desired.look_again, false)) return LookAtDesired();
  desired.poll_timer = deps.loop.PostDelayed(next, [this] {
    desired.poll_timer = 0;
    LookAtDesired();
  });
}

bool ModelManager::Impl::TakeDesiredText(std::string text) {
  desired.unconfirmed.clear();
  auto wanted = ParseDesired(text, desired.file);
  if (!wanted.ok()) {
    SetDesiredState(DesiredFileState::kBroken, std::string(wanted.status().message()));
    return false;
  }
  desired.last_read = deps.clock.Wall();
  const bool first = desired.state == DesiredFileState::kReading;
  const bool changed = first || text != desired.text;
  if (changed) {
    desired.text = std::move(text);
    desired.wanted = *std::move(wanted);
    // A new text is a new wish: what failed before is tried at once.
    desired.attempts.clear();
    std::erase_if(desired.synced, [this](const auto& item) {
      const auto wish = desired.wanted.find(item.first);
      return wish == desired.wanted.end() || wish->second.version != item.second;
    });
    std::erase_if(desired.told,
                  [this](const auto& item) { return !desired.wanted.contains(item.first); });
    desired.all_in_sync = false;
  }
  SetDesiredState(DesiredFileState::kOk, "");
  return changed;
}

void ModelManager::Impl::SetDesiredState(DesiredFileState state, std::string error) {
  desired.state = state;
  desired.error = std::move(error);
  ReviewDesired();
}

void ModelManager::Impl::TellDesiredFile(bool changed, std::vector<std::string> watch) {
  DesiredFileReport report;
  report.file = desired.file;
  report.state = desired.state;
  report.error = desired.error;
  report.wanted = desired.wanted.size();
  report.changed = changed;
  report.watch = std::move(watch);
  Tell([&](Observer& observer) { observer.OnDesiredFile(report); });
}

void ModelManager::Impl::ReviewDesired() {
  if (desired.file.empty() || desired.review_posted || stopping) return;
  desired.review_posted = true;
  deps.loop.Post([this] {
    desired.review_posted = false;
    RunDesired();
  });
}

std::vector<DesiredFacts> ModelManager::Impl::DesiredFactsNow() const {
  std::map<DesiredBook::Name, std::pair<OperationId, uint64_t>> under_way;
  for (const auto& [id, swap] : swaps) {
    for (const SwapTarget& target : swap.request.targets) {
      under_way[{target.model, swap.request.label}] = {id, target.version};
    }
  }
  std::vector<DesiredFacts> facts;
  facts.reserve(desired.wanted.size());
  for (const auto& [name, wish] : desired.wanted) {
    using Target = DesiredFacts::Target;
    DesiredFacts fact;
    fact.model = name.first;
    fact.label = name.second;
    fact.want = wish.version;
    fact.line = wish.line;
    fact.have = LabelVersion(name.first, name.second);
    std::tie(fact.target, fact.why) = DesiredTarget({name.first, wish.version});
    if (const auto it = under_way.find(name); it != under_way.end()) {
      fact.running = it->second.first;
      fact.running_to = it->second.second;
      fact.running_is_ours = desired.running.contains(fact.running);
    }
    if (const auto it = desired.attempts.find(name); it != desired.attempts.end()) {
      fact.attempt = it->second;
    }
    const auto synced = desired.synced.find(name);
    fact.was_in_sync = synced != desired.synced.end() && synced->second == wish.version;
    if (fact.target == Target::kReady && fact.have == fact.want) fact.was_in_sync = true;
    facts.push_back(std::move(fact));
  }
  return facts;
}

std::pair<DesiredFacts::Target, std::string> ModelManager::Impl::DesiredTarget(
    const VersionKey& key) const {
  using Target = DesiredFacts::Target;
  const VersionRecord* record = Find(key);
  if (record == nullptr || (!record->on_disk && record->resident == nullptr)) {
    if (const auto book = models.find(key.model); book != models.end()) {
      for (const ScannedVersion& invalid : book->second.invalid) {
        if (invalid.number != key.version) continue;
        return {
            Target::kRefused,
            absl::StrCat(key.ToString(), ": cannot be used as it is on disk: ", invalid.invalid)};
      }
    }
    return {Target::kAbsent, ""};
  }
  if (record->phase == Phase::kQuarantined) {
    return {Target::kRefused,
            absl::StrCat(key.ToString(), ": QUARANTINED: ", record->error.message())};
  }
  if (record->health == Health::kSuspect) {
    return {Target::kRefused, std::string(SuspectError(*record).message())};
  }
  switch (record->phase) {
    case Phase::kReady:
      if (const absl::Status may = MayServe(*record); !may.ok()) {
        return {Target::kRefused, std::string(may.message())};
      }
      return {Target::kReady, ""};
    case Phase::kReserved:
    case Phase::kLoading:
      return {Target::kComing, ""};
    default:
      return {Target::kAtRest, ""};
  }
}

void ModelManager::Impl::RunDesired() {
  deps.loop.CancelTimer(std::exchange(desired.retry_timer, 0));
  // What a store that was not read yet lacks is no news.
  if (stopping || !scanned || desired.state != DesiredFileState::kOk) return;
  const std::vector<DesiredFacts> facts = DesiredFactsNow();
  for (const DesiredFacts& fact : facts) {
    const DesiredBook::Name name{fact.model, fact.label};
    const bool there = fact.target != DesiredFacts::Target::kAbsent &&
                       fact.target != DesiredFacts::Target::kRefused;
    // What comes into the store, or is repaired, is tried at once.
    if (!there) desired.attempts.erase(name);
    if (fact.have == fact.want && fact.target == DesiredFacts::Target::kReady) {
      desired.attempts.erase(name);
      desired.synced[name] = fact.want;
    }
  }
  const DesiredPlan plan = PlanDesired(facts, desired.running.size(), deps.clock.Monotonic());
  TellDesiredRows(plan.rows);
  for (const size_t index : plan.start) StartDesired(facts[index]);
  if (plan.next_look < absl::InfiniteDuration()) {
    desired.retry_timer = deps.loop.PostDelayed(plan.next_look, [this] {
      desired.retry_timer = 0;
      RunDesired();
    });
  }
}

void ModelManager::Impl::TellDesiredRows(const std::vector<DesiredRow>& rows) {
  bool all = true;
  for (const DesiredRow& row : rows) {
    all = all && row.state == DesiredLabelState::kInSync;
    const DesiredBook::Told now{row.state, row.drifting};
    const auto [it, added] = desired.told.try_emplace({row.model, row.label});
    if (!added && it->second == now) continue;
    it->second = now;
    if (row.drifting) {
      Note({row.model, row.have}, "drift",
           absl::StrCat(row.label, " is at ", row.have, ", ", desired.file, " wants ", row.want));
    }
    Tell([&](Observer& observer) { observer.OnDesiredLabel(row); });
  }
  if (all && !desired.all_in_sync) desired.last_converged = deps.clock.Wall();
  desired.all_in_sync = all;
}

void ModelManager::Impl::StartDesired(const DesiredFacts& fact) {
  const DesiredBook::Name name{fact.model, fact.label};
  SwapRequest request;
  request.targets.push_back({fact.model, fact.want});
  request.label = fact.label;
  request.trigger = kTriggerDesired;
  const auto id = StartSwap(std::move(request), OperationKind::kSwap, options.own_uid);
  if (!id.ok()) return DesiredFailed(name, id.status());
  desired.running[*id] = {name, fact.want};
  // It may be over by now: then nobody was told that it is ours.
  if (const OperationSnapshot* operation = operations.Find(*id); operation != nullptr) {
    DesiredOperation(*operation);
  }
}

void ModelManager::Impl::DesiredOperation(const OperationSnapshot& operation) {
  if (!operation.finished_state()) return;
  const auto node = desired.running.extract(operation.id);
  if (!node.empty()) {
    const DesiredBook::Run& run = node.mapped();
    const auto wish = desired.wanted.find(run.name);
    // What was wanted before, and is not any more, has no failures to count.
    const bool wanted = wish != desired.wanted.end() && wish->second.version == run.to;
    if (wanted && !operation.status.ok()) DesiredFailed(run.name, operation.status);
  }
  ReviewDesired();
}

void ModelManager::Impl::DesiredFailed(const DesiredBook::Name& name, const absl::Status& why) {
  DesiredAttempt& attempt = desired.attempts[name];
  ++attempt.failures;
  attempt.failed_at = deps.clock.Monotonic();
  attempt.error = std::string(why.message());
  ReviewDesired();
}

DesiredSnapshot ModelManager::Impl::SnapshotDesired() const {
  DesiredSnapshot snapshot;
  snapshot.file = desired.file;
  snapshot.state = desired.state;
  snapshot.error = desired.error;
  snapshot.last_read = desired.last_read;
  snapshot.last_converged = desired.last_converged;
  snapshot.rows =
      PlanDesired(DesiredFactsNow(), desired.running.size(), deps.clock.Monotonic()).rows;
  const bool acted_on = desired.state == DesiredFileState::kOk;
  for (DesiredRow& row : snapshot.rows) {
    snapshot.in_sync += row.state == DesiredLabelState::kInSync ? 1 : 0;
    snapshot.pending += row.state == DesiredLabelState::kPending ? 1 : 0;
    snapshot.failed += row.state == DesiredLabelState::kFailed ? 1 : 0;
    snapshot.drifting += row.drifting ? 1 : 0;
    if (!acted_on && row.state != DesiredLabelState::kInSync) {
      row.reason =
          absl::StrCat("nothing is done while the file is ", DesiredFileStateName(desired.state));
    }
  }
  return snapshot;
}

void ModelManager::Impl::StopDesired() {
  for (TimerId* timer : {&desired.poll_timer, &desired.deadline_timer, &desired.retry_timer}) {
    deps.loop.CancelTimer(std::exchange(*timer, 0));
  }
}

}  // namespace modelhost
