// A version's life, as data: three tracks (phase, health, residency), for each the changes that are
// allowed, and for each phase what the other tracks may be in it. The tables in version_state.cc
// are the only authority: what they do not have is refused, counted, and changes nothing.
// docs/lifecycle.md is made from them.
//
//   (absent) -> STAGED -> RESERVED -> LOADING -> READY -> DRAINING -> UNLOADING -> STAGED
//                 ^          |          | |        ^         |
//                 |          v          | |        +---------+  labelled or leased again
//                 +-------- STAGED      | +--> QUARANTINED       bad bytes
//                 +------- FAILED <-----+                        error, cancel
//
// A version is announced after leases on it can be granted (READY is entered first) and withdrawn
// before they stop (the label moves away before DRAINING). Pure; VersionTracks is a value without
// locks, the control thread's.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/region/host_region.h"

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
};

// Of the copy on a GPU. Host residency is HostTier (region/host_region.h).
enum class DeviceResidency : uint8_t { kNone, kCopying, kResident, kLost };

// Who says that the health is another one. The table knows what each may say: a scan, for
// instance, lifts no suspicion.
enum class HealthCause : uint8_t { kLoad, kHealthCheck, kVerify, kScan, kFree };

struct HealthState {
  Health health = Health::kOk;
  HealthReason reason = HealthReason::kNone;
  friend bool operator==(const HealthState&, const HealthState&) = default;
};

// --- The tables

struct Transition {
  Phase from;
  Phase to;
  absl::string_view trigger;  // For the diagram and for people.
};

// What the other tracks may be while a version is in `phase`.
struct PhaseRule {
  Phase phase;
  bool may_have_bytes;   // Any host residency but NONE.
  bool must_have_bytes;  // Never NONE.
  absl::string_view meaning;
  absl::string_view advice;  // What an operator does about it.
};

struct HealthRule {
  HealthState state;
  bool of_bytes;  // Only while bytes are resident: it is about them.
  absl::string_view meaning;
  absl::string_view advice;
};

struct HealthTransition {
  HealthState from;
  HealthState to;
  HealthCause cause;
};

// Per tier: NONE and not NONE are what counts; which of the others it is, the policy decides.
struct ResidencyRule {
  Phase phase;
  bool had_bytes;
  bool has_bytes;
  absl::string_view trigger;
};

struct DeviceRule {
  Phase phase;
  DeviceResidency from;
  DeviceResidency to;
  absl::string_view trigger;
};

std::span<const Phase> Phases();
std::span<const Transition> Transitions();
std::span<const PhaseRule> PhaseRules();
std::span<const HealthRule> HealthRules();
std::span<const HealthTransition> HealthTransitions();
std::span<const ResidencyRule> ResidencyRules();
std::span<const DeviceRule> DeviceRules();

bool IsAllowed(Phase from, Phase to);
// FAILED_PRECONDITION that names both.
absl::Status CheckTransition(Phase from, Phase to);

// --- The state of one version

// Read like a T; written by VersionTracks only.
template <typename T>
class Checked {
 public:
  operator T() const { return value_; }  // NOLINT(google-explicit-constructor)

 private:
  friend struct VersionTracks;
  T value_{};
};

// Every change is checked against the tables. FAILED_PRECONDITION: it is not in them, and nothing
// has changed. A change to what it is already is no change, but for the phase.
struct VersionTracks {
  Checked<Phase> phase;
  Checked<Health> health;
  Checked<HealthReason> health_reason;
  Checked<HostTier> host_tier;
  Checked<DeviceResidency> device_residency;

  HealthState health_state() const { return {health, health_reason}; }
  absl::Status MoveTo(Phase to);
  absl::Status SetHealth(HealthState to, HealthCause cause);
  absl::Status SetHostTier(HostTier to);
  absl::Status SetDeviceResidency(DeviceResidency to);

 private:
  absl::Status Fits(Phase phase_then, HealthState health_then, HostTier host_then,
                    DeviceResidency device_then) const;
};

// --- Names

absl::string_view PhaseName(Phase phase);  // "READY"
absl::string_view HealthName(Health health);
absl::string_view HealthReasonName(HealthReason reason);
absl::string_view HealthCauseName(HealthCause cause);  // "scan"
absl::string_view DeviceResidencyName(DeviceResidency tier);
// "DEGRADED PIN_PARTIAL"
std::string HealthStateName(HealthState state);

}  // namespace modelhost
