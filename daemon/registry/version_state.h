// A version's life, as data. The table in version_state.cc is the only authority: a transition that
// it does not have is refused, counted, and changes nothing.
//
//   (absent) -> STAGED -> RESERVED -> LOADING -> READY -> DRAINING -> UNLOADING -> STAGED
//                 ^          |          | |        ^         |
//                 |          v          | |        +---------+  labelled or leased again
//                 +-------- STAGED      | +--> QUARANTINED       bad bytes
//                 +------- FAILED <-----+                        error, cancel
//
// A version is announced after leases on it can be granted (READY is entered first) and withdrawn
// before they stop (the label moves away before DRAINING). Pure; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace modelhost {

enum class Phase : uint8_t {
  kStaged,
  kReserved,
  kLoading,
  kReady,
  kDraining,
  kUnloading,
  kFailed,
  kQuarantined,
};

enum class Health : uint8_t { kOk, kDegraded, kSuspect };

enum class HealthReason : uint8_t {
  kNone,
  kSourceChanged,  // The file was written, truncated or replaced in place.
  kSourceGone,     // The store cannot be read.
  kSourceInvalid,  // A scan refuses the version's directory: it could not be loaded again now.
  kPinPartial,     // best_effort could not lock everything.
  kResidencyLost,  // Pages of a pinned or warm version are not in memory.
};

struct Transition {
  Phase from;
  Phase to;
  absl::string_view trigger;  // For the diagram and for people.
};

std::span<const Transition> Transitions();
bool IsAllowed(Phase from, Phase to);
// FAILED_PRECONDITION that names both.
absl::Status CheckTransition(Phase from, Phase to);

absl::string_view PhaseName(Phase phase);  // "READY"
absl::string_view HealthName(Health health);
absl::string_view HealthReasonName(HealthReason reason);

}  // namespace modelhost
