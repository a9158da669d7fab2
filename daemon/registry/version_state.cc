#include "daemon/registry/version_state.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr auto kTransitions = std::to_array<Transition>({
    {Phase::kStaged, Phase::kReserved, "load"},
    {Phase::kStaged, Phase::kQuarantined, "verify: bad bytes"},
    {Phase::kReserved, Phase::kStaged, "no room, or cancelled before the first byte"},
    {Phase::kReserved, Phase::kLoading, "admitted"},
    {Phase::kLoading, Phase::kReady, "resident"},
    {Phase::kLoading, Phase::kFailed, "error or cancel"},
    {Phase::kLoading, Phase::kQuarantined, "bad bytes"},
    {Phase::kFailed, Phase::kStaged, "retry"},
    {Phase::kFailed, Phase::kQuarantined, "verify: bad bytes"},
    {Phase::kQuarantined, Phase::kStaged, "published again"},
    {Phase::kReady, Phase::kDraining, "unload, eviction, keep_previous over"},
    {Phase::kDraining, Phase::kReady, "labelled or leased again"},
    {Phase::kDraining, Phase::kUnloading, "last lease gone, or deadline"},
    {Phase::kUnloading, Phase::kStaged, "freed"},
});

}  // namespace

std::span<const Transition> Transitions() { return kTransitions; }

bool IsAllowed(Phase from, Phase to) {
  return std::ranges::any_of(kTransitions, [&](const Transition& transition) {
    return transition.from == from && transition.to == to;
  });
}

absl::Status CheckTransition(Phase from, Phase to) {
  if (IsAllowed(from, to)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("a version in ", PhaseName(from), " cannot become ", PhaseName(to)));
}

absl::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kStaged:
      return "STAGED";
    case Phase::kReserved:
      return "RESERVED";
    case Phase::kLoading:
      return "LOADING";
    case Phase::kReady:
      return "READY";
    case Phase::kDraining:
      return "DRAINING";
    case Phase::kUnloading:
      return "UNLOADING";
    case Phase::kFailed:
      return "FAILED";
    case Phase::kQuarantined:
      return "QUARANTINED";
  }
  return "UNKNOWN";
}

absl::string_view HealthName(Health health) {
  switch (health) {
    case Health::kOk:
      return "OK";
    case Health::kDegraded:
      return "DEGRADED";
    case Health::kSuspect:
      return "SUSPECT";
  }
  return "UNKNOWN";
}

absl::string_view HealthReasonName(HealthReason reason) {
  switch (reason) {
    case HealthReason::kNone:
      return "";
    case HealthReason::kSourceChanged:
      return "SOURCE_CHANGED";
    case HealthReason::kSourceGone:
      return "SOURCE_GONE";
    case HealthReason::kSourceInvalid:
      return "SOURCE_INVALID";
    case HealthReason::kPinPartial:
      return "PIN_PARTIAL";
    case HealthReason::kResidencyLost:
      return "RESIDENCY_LOST";
  }
  return "UNKNOWN";
}

}  // namespace modelhost
