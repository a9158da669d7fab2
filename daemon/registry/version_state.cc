#include "daemon/registry/version_state.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr auto kPhases = std::to_array<Phase>({Phase::kStaged, Phase::kReserved, Phase::kLoading,
                                               Phase::kReady, Phase::kDraining, Phase::kUnloading,
                                               Phase::kFailed, Phase::kQuarantined});

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

constexpr auto kPhaseRules = std::to_array<PhaseRule>({
    {Phase::kStaged, false, false, "On disk, nothing of it in memory.",
     "Nothing. `modelctl load`, or a swap to it, makes it READY."},
    {Phase::kReserved, false, false, "A load of it waits for its turn, or for its bytes' booking.",
     "Wait, or `modelctl ops cancel`."},
    {Phase::kLoading, true, false, "Its bytes are read, verified and locked.",
     "Wait: `modelctl status` shows how far it is. A cancel takes effect within 100 ms."},
    {Phase::kReady, true, true,
     "Resident: leases are granted. With a label it is what clients get.", "Nothing."},
    {Phase::kDraining, true, true,
     "On its way out: nobody asks for it any more, but leases on it are still held.",
     "Nothing; when it lasts, `modelctl leases` shows who holds it, and `modelctl evict` ends a "
     "lease. What a client has mapped stays mapped."},
    {Phase::kUnloading, true, false, "Its memory is given back.", "Wait: seconds at most."},
    {Phase::kFailed, false, false, "The last load ended in an error that may pass, which is shown.",
     "Mend what the error names; then `modelctl load`. Labels and what serves are as before."},
    {Phase::kQuarantined, false, false,
     "Its bytes are not what was published, or cannot be read as a model. It is never loaded.",
     "Publish the same bytes again, which repairs it, or swap to another version."},
});

constexpr HealthState kOk{Health::kOk, HealthReason::kNone};
constexpr HealthState kPinPartial{Health::kDegraded, HealthReason::kPinPartial};
constexpr HealthState kSourceGone{Health::kDegraded, HealthReason::kSourceGone};
constexpr HealthState kSourceInvalid{Health::kDegraded, HealthReason::kSourceInvalid};
constexpr HealthState kSealedChanged{Health::kDegraded, HealthReason::kSourceChanged};
constexpr HealthState kSuspect{Health::kSuspect, HealthReason::kSourceChanged};

constexpr auto kHealthRules = std::to_array<HealthRule>({
    {kOk, false, "As it was published.", "Nothing."},
    {kPinPartial, true, "Resident, but not all of it could be locked (memlock best_effort).",
     "Raise LimitMEMLOCK or [memory] memlock_budget, then load it again; until then it may be "
     "paged "
     "out."},
    {kSourceGone, false, "Its directory cannot be seen any more. What is resident goes on serving.",
     "Bring the store back. Nothing is unloaded for it, but it could not be loaded again now."},
    {kSourceInvalid, true, "A scan refuses its directory. What is resident goes on serving.",
     "Mend what the detail names: a mode, an owner, a file too many."},
    {kSealedChanged, true,
     "Its files were found bad; what serves is a sealed copy from before, which no disk can "
     "change.",
     "Publish the same bytes again, or swap to another version."},
    {kSuspect, true,
     "Its files changed in place under those who have them mapped. No new leases are granted and "
     "no label moves to it; labels that name it stay.",
     "Swap to a good version; or publish the same bytes again, which repairs it; or `modelctl "
     "load` "
     "it, which checks the files as they are now."},
});

constexpr auto kHealthTransitions = std::to_array<HealthTransition>({
    // A load makes new bytes; what was said of the old ones is over.
    {kOk, kPinPartial, HealthCause::kLoad},
    {kPinPartial, kOk, HealthCause::kLoad},
    {kSourceGone, kOk, HealthCause::kLoad},
    {kSourceGone, kPinPartial, HealthCause::kLoad},
    {kSourceInvalid, kOk, HealthCause::kLoad},
    {kSourceInvalid, kPinPartial, HealthCause::kLoad},
    {kSealedChanged, kOk, HealthCause::kLoad},
    {kSealedChanged, kPinPartial, HealthCause::kLoad},
    {kSuspect, kOk, HealthCause::kLoad},
    {kSuspect, kPinPartial, HealthCause::kLoad},

    {kOk, kSuspect, HealthCause::kHealthCheck},
    {kPinPartial, kSuspect, HealthCause::kHealthCheck},
    {kSourceGone, kSuspect, HealthCause::kHealthCheck},
    {kSourceInvalid, kSuspect, HealthCause::kHealthCheck},
    {kSealedChanged, kSuspect, HealthCause::kHealthCheck},

    {kOk, kSuspect, HealthCause::kVerify},
    {kPinPartial, kSuspect, HealthCause::kVerify},
    {kSourceGone, kSuspect, HealthCause::kVerify},
    {kSourceInvalid, kSuspect, HealthCause::kVerify},
    {kOk, kSealedChanged, HealthCause::kVerify},
    {kPinPartial, kSealedChanged, HealthCause::kVerify},
    {kSourceGone, kSealedChanged, HealthCause::kVerify},
    {kSourceInvalid, kSealedChanged, HealthCause::kVerify},
    {kSealedChanged, kOk, HealthCause::kVerify},
    {kSealedChanged, kPinPartial, HealthCause::kVerify},

    // A scan looks at names and modes, not at bytes: it lifts no suspicion.
    {kOk, kSourceGone, HealthCause::kScan},
    {kPinPartial, kSourceGone, HealthCause::kScan},
    {kSourceInvalid, kSourceGone, HealthCause::kScan},
    {kSealedChanged, kSourceGone, HealthCause::kScan},
    {kOk, kSourceInvalid, HealthCause::kScan},
    {kPinPartial, kSourceInvalid, HealthCause::kScan},
    {kSourceGone, kSourceInvalid, HealthCause::kScan},
    {kSourceGone, kOk, HealthCause::kScan},
    {kSourceGone, kPinPartial, HealthCause::kScan},
    {kSourceInvalid, kOk, HealthCause::kScan},
    {kSourceInvalid, kPinPartial, HealthCause::kScan},

    {kPinPartial, kOk, HealthCause::kFree},
    {kSourceInvalid, kOk, HealthCause::kFree},
    {kSourceGone, kOk, HealthCause::kFree},
    {kSealedChanged, kOk, HealthCause::kFree},
    {kSuspect, kOk, HealthCause::kFree},
    {kOk, kSourceGone, HealthCause::kFree},
    {kPinPartial, kSourceGone, HealthCause::kFree},
    {kSourceInvalid, kSourceGone, HealthCause::kFree},
    {kSealedChanged, kSourceGone, HealthCause::kFree},
    {kSuspect, kSourceGone, HealthCause::kFree},
});

constexpr auto kResidencyRules = std::to_array<ResidencyRule>({
    {Phase::kLoading, false, true, "loaded"},
    {Phase::kReady, true, true, "loaded again"},
    {Phase::kDraining, true, true, "loaded again"},
    {Phase::kUnloading, true, false, "freed"},
});

constexpr auto kDeviceRules = std::to_array<DeviceRule>({
    {Phase::kLoading, DeviceResidency::kNone, DeviceResidency::kCopying, "upload"},
    {Phase::kLoading, DeviceResidency::kCopying, DeviceResidency::kResident, "uploaded"},
    {Phase::kLoading, DeviceResidency::kCopying, DeviceResidency::kNone, "error or cancel"},
    {Phase::kReady, DeviceResidency::kNone, DeviceResidency::kCopying, "upload"},
    {Phase::kReady, DeviceResidency::kCopying, DeviceResidency::kResident, "uploaded"},
    {Phase::kReady, DeviceResidency::kCopying, DeviceResidency::kNone, "error or cancel"},
    {Phase::kReady, DeviceResidency::kResident, DeviceResidency::kLost, "GPU lost"},
    {Phase::kReady, DeviceResidency::kResident, DeviceResidency::kNone, "loaded again, without"},
    {Phase::kReady, DeviceResidency::kLost, DeviceResidency::kCopying, "upload again"},
    {Phase::kReady, DeviceResidency::kCopying, DeviceResidency::kLost, "not uploaded again"},
    {Phase::kReady, DeviceResidency::kLost, DeviceResidency::kNone, "loaded again, without"},
    {Phase::kDraining, DeviceResidency::kNone, DeviceResidency::kCopying, "upload"},
    {Phase::kDraining, DeviceResidency::kCopying, DeviceResidency::kResident, "uploaded"},
    {Phase::kDraining, DeviceResidency::kCopying, DeviceResidency::kNone, "error or cancel"},
    {Phase::kDraining, DeviceResidency::kResident, DeviceResidency::kLost, "GPU lost"},
    {Phase::kDraining, DeviceResidency::kResident, DeviceResidency::kNone, "loaded again, without"},
    {Phase::kDraining, DeviceResidency::kLost, DeviceResidency::kCopying, "upload again"},
    {Phase::kDraining, DeviceResidency::kCopying, DeviceResidency::kLost, "not uploaded again"},
    {Phase::kDraining, DeviceResidency::kLost, DeviceResidency::kNone, "loaded again, without"},
    {Phase::kUnloading, DeviceResidency::kCopying, DeviceResidency::kNone, "freed"},
    {Phase::kUnloading, DeviceResidency::kResident, DeviceResidency::kNone, "freed"},
    {Phase::kUnloading, DeviceResidency::kLost, DeviceResidency::kNone, "freed"},
});

const PhaseRule& RuleOf(Phase phase) {
  return *std::ranges::find(kPhaseRules, phase, &PhaseRule::phase);
}

}  // namespace

std::span<const Phase> Phases() { return kPhases; }
std::span<const Transition> Transitions() { return kTransitions; }
std::span<const PhaseRule> PhaseRules() { return kPhaseRules; }
std::span<const HealthRule> HealthRules() { return kHealthRules; }
std::span<const HealthTransition> HealthTransitions() { return kHealthTransitions; }
std::span<const ResidencyRule> ResidencyRules() { return kResidencyRules; }
std::span<const DeviceRule> DeviceRules() { return kDeviceRules; }

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

absl::Status VersionTracks::Fits(Phase phase_then, HealthState health_then, HostTier host_then,
                                 DeviceResidency device_then) const {
  const PhaseRule& rule = RuleOf(phase_then);
  const bool bytes = host_then != HostTier::kNone;
  if (bytes ? !rule.may_have_bytes : rule.must_have_bytes) {
    return absl::FailedPreconditionError(absl::StrCat("a version in ", PhaseName(phase_then),
                                                      bytes ? " has no bytes" : " has bytes"));
  }
  if (device_then != DeviceResidency::kNone && !rule.may_have_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("a version in ", PhaseName(phase_then), " is on no device"));
  }
  const auto health_rule = std::ranges::find(kHealthRules, health_then, &HealthRule::state);
  if (health_rule == kHealthRules.end() || (health_rule->of_bytes && !bytes)) {
    return absl::FailedPreconditionError(absl::StrCat("a version in ", PhaseName(phase_then),
                                                      bytes ? "" : " without bytes", " is not ",
                                                      HealthStateName(health_then)));
  }
  return absl::OkStatus();
}

absl::Status VersionTracks::MoveTo(Phase to) {
  absl::Status may = CheckTransition(phase, to);
  if (may.ok()) may = Fits(to, health_state(), host_tier, device_residency);
  if (may.ok()) phase.value_ = to;
  return may;
}

absl::Status VersionTracks::SetHealth(HealthState to, HealthCause cause) {
  const HealthState from = health_state();
  if (from == to) return absl::OkStatus();
  const bool listed = std::ranges::any_of(kHealthTransitions, [&](const HealthTransition& row) {
    return row.from == from && row.to == to && row.cause == cause;
  });
  if (!listed) {
    return absl::FailedPreconditionError(absl::StrCat("a ", HealthCauseName(cause), " cannot make ",
                                                      HealthStateName(to), " of ",
                                                      HealthStateName(from)));
  }
  if (absl::Status may = Fits(phase, to, host_tier, device_residency); !may.ok()) return may;
  health.value_ = to.health;
  health_reason.value_ = to.reason;
  return absl::OkStatus();
}

absl::Status VersionTracks::SetHostTier(HostTier to) {
  const bool had = host_tier != HostTier::kNone;
  const bool has = to != HostTier::kNone;
  if (!had && !has) return absl::OkStatus();
  const bool listed = std::ranges::any_of(kResidencyRules, [&](const ResidencyRule& row) {
    return row.phase == phase && row.had_bytes == had && row.has_bytes == has;
  });
  if (!listed) {
    return absl::FailedPreconditionError(absl::StrCat("in ", PhaseName(phase), " the residency ",
                                                      HostTierName(host_tier), " does not become ",
                                                      HostTierName(to)));
  }
  if (absl::Status may = Fits(phase, health_state(), to, device_residency); !may.ok()) return may;
  host_tier.value_ = to;
  return absl::OkStatus();
}

absl::Status VersionTracks::SetDeviceResidency(DeviceResidency to) {
  if (device_residency == to) return absl::OkStatus();
  const bool listed = std::ranges::any_of(kDeviceRules, [&](const DeviceRule& row) {
    return row.phase == phase && row.from == device_residency && row.to == to;
  });
  if (!listed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "in ", PhaseName(phase), " the device copy ", DeviceResidencyName(device_residency),
        " does not become ", DeviceResidencyName(to)));
  }
  device_residency.value_ = to;
  return absl::OkStatus();
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
  }
  return "UNKNOWN";
}

absl::string_view HealthCauseName(HealthCause cause) {
  switch (cause) {
    case HealthCause::kLoad:
      return "load";
    case HealthCause::kHealthCheck:
      return "health check";
    case HealthCause::kVerify:
      return "verification";
    case HealthCause::kScan:
      return "scan";
    case HealthCause::kFree:
      return "unload";
  }
  return "unknown";
}

absl::string_view DeviceResidencyName(DeviceResidency tier) {
  switch (tier) {
    case DeviceResidency::kNone:
      return "NONE";
    case DeviceResidency::kCopying:
      return "COPYING";
    case DeviceResidency::kResident:
      return "RESIDENT";
    case DeviceResidency::kLost:
      return "LOST";
  }
  return "UNKNOWN";
}

std::string HealthStateName(HealthState state) {
  return absl::StrCat(HealthName(state.health), state.reason == HealthReason::kNone ? "" : " ",
                      HealthReasonName(state.reason));
}

}  // namespace modelhost
