#include "daemon/registry/desired_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr absl::Duration kFirstBackoff = absl::Seconds(1);
constexpr absl::Duration kLastBackoff = absl::Minutes(1);

// How long the last failure still holds off the next attempt. A clock that says less than it did
// holds nothing off.
absl::Duration HeldOff(const DesiredAttempt& attempt, absl::Duration now) {
  if (attempt.failures == 0 || now < attempt.failed_at) return absl::ZeroDuration();
  const absl::Duration due = attempt.failed_at + DesiredBackoff(attempt.failures);
  return std::max(absl::ZeroDuration(), due - now);
}

enum class DesiredAct { kNothing, kWait, kStart };

// Fills state and reason; what is left to decide is whether there is a place for the swap.
DesiredAct Judge(const DesiredFacts& fact, absl::Duration now, DesiredRow& row) {
  using Target = DesiredFacts::Target;
  const std::string version = absl::StrCat(fact.model, "@", fact.want);
  const bool named = fact.have == fact.want;
  if (named && fact.target == Target::kReady) {
    row.state = DesiredLabelState::kInSync;
    return DesiredAct::kNothing;
  }
  if (fact.target == Target::kRefused) {
    row.state = DesiredLabelState::kFailed;
    row.reason = fact.why;
    return DesiredAct::kNothing;
  }
  if (fact.running != 0 && fact.running_to == fact.want) {
    row.reason = absl::StrCat("op-", fact.running, " is under way");
    return DesiredAct::kNothing;
  }
  // One of the file's own to what it wanted before is replaced; another's comes to its end first.
  if (fact.running != 0 && !fact.running_is_ours) {
    row.reason = absl::StrCat("op-", fact.running, " moves it to ", fact.running_to,
                              "; brought back after that");
    return DesiredAct::kNothing;
  }
  if (fact.target == Target::kAbsent) {
    row.reason = absl::StrCat(version, " is not in the store yet");
    return DesiredAct::kNothing;
  }
  if (named && fact.target == Target::kComing) {
    row.reason = absl::StrCat(version, " is being loaded");
    return DesiredAct::kNothing;
  }
  if (const absl::Duration held = HeldOff(fact.attempt, now); held > absl::ZeroDuration()) {
    row.state = DesiredLabelState::kFailed;
    row.reason = absl::StrCat(fact.attempt.error, "; failed ", fact.attempt.failures,
                              fact.attempt.failures == 1 ? " time" : " times", ", tried again in ",
                              absl::FormatDuration(absl::Ceil(held, absl::Seconds(1))));
    return DesiredAct::kWait;
  }
  if (fact.attempt.failures > 0) {
    row.state = DesiredLabelState::kFailed;
    row.reason = absl::StrCat(fact.attempt.error, "; tried again now");
  } else {
    row.reason = named ? absl::StrCat(version, " is loaded again") : "a swap starts now";
  }
  return DesiredAct::kStart;
}

}  // namespace

absl::string_view DesiredFileStateName(DesiredFileState state) {
  switch (state) {
    case DesiredFileState::kOff:
      return "off";
    case DesiredFileState::kReading:
      return "reading";
    case DesiredFileState::kOk:
      return "ok";
    case DesiredFileState::kMissing:
      return "missing";
    case DesiredFileState::kBroken:
      return "broken";
  }
  return "unknown";
}

absl::string_view DesiredLabelStateName(DesiredLabelState state) {
  switch (state) {
    case DesiredLabelState::kInSync:
      return "in_sync";
    case DesiredLabelState::kPending:
      return "pending";
    case DesiredLabelState::kFailed:
      return "failed";
  }
  return "unknown";
}

absl::Duration DesiredBackoff(unsigned failures) {
  absl::Duration wait = kFirstBackoff;
  for (unsigned i = 1; i < failures && wait < kLastBackoff; ++i) wait *= 2;
  return std::min(wait, kLastBackoff);
}

DesiredPlan PlanDesired(std::span<const DesiredFacts> facts, size_t running, absl::Duration now) {
  DesiredPlan plan;
  for (size_t i = 0; i < facts.size(); ++i) {
    const DesiredFacts& fact = facts[i];
    DesiredRow row;
    row.model = fact.model;
    row.label = fact.label;
    row.want = fact.want;
    row.have = fact.have;
    row.line = fact.line;
    row.drifting = fact.was_in_sync && fact.have != fact.want;
    switch (Judge(fact, now, row)) {
      case DesiredAct::kNothing:
        break;
      case DesiredAct::kWait:
        plan.next_look = std::min(plan.next_look, HeldOff(fact.attempt, now));
        break;
      case DesiredAct::kStart:
        // The one that it replaces leaves its place.
        if (fact.running == 0 && running >= kMostDesiredSwaps) {
          row.reason = "waits for its turn";
          break;
        }
        if (fact.running == 0) ++running;
        plan.start.push_back(i);
        break;
    }
    plan.rows.push_back(std::move(row));
  }
  return plan;
}

}  // namespace modelhost
