// What to do about the desired state file, as pure functions of what is known. No state, no I/O;
// any thread.
//
//   wish (a line of the file) + facts about its label and version -> a row that says how it stands,
//   and whether a swap starts now
//
// Each label is on its own: one that cannot be had holds up no other. `now` is monotonic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/registry/ids.h"

namespace modelhost {

// Swaps of the file's that run at one time; the others wait for their turn.
inline constexpr size_t kMostDesiredSwaps = 4;

enum class DesiredFileState : uint8_t {
  kOff,      // No file is configured.
  kReading,  // Not read yet.
  kOk,
  kMissing,  // Nothing is done until it is there: absence is not an instruction.
  kBroken,   // Unreadable or with a bad line; nothing is done until it is good.
};
absl::string_view DesiredFileStateName(DesiredFileState state);  // "ok"

enum class DesiredLabelState : uint8_t { kInSync, kPending, kFailed };
absl::string_view DesiredLabelStateName(DesiredLabelState state);  // "in_sync"

struct DesiredRow {
  std::string model;
  std::string label;
  uint64_t want = 0;
  uint64_t have = 0;  // What the label names now; 0: it is not set.
  uint32_t line = 0;
  DesiredLabelState state = DesiredLabelState::kPending;
  bool drifting = false;  // It was as wanted, and somebody moved it.
  std::string reason;     // Empty when in sync.
};

// What the file's last swap of a label came to, while it failed.
struct DesiredAttempt {
  unsigned failures = 0;
  absl::Duration failed_at;
  std::string error;
};

struct DesiredFacts {
  std::string model;
  std::string label;
  uint64_t want = 0;
  uint64_t have = 0;
  uint32_t line = 0;
  enum class Target {
    kAbsent,   // Not in the store: may be published any time.
    kRefused,  // Bad bytes or not to be served: nothing helps but a repair. `why` says it.
    kAtRest,   // In the store, not READY.
    kComing,   // A load is under way, or waits for room.
    kReady,
  };
  Target target = Target::kAbsent;
  std::string why;
  // The swap of this label that is under way, whoever wants it; 0: none.
  OperationId running = 0;
  uint64_t running_to = 0;
  bool running_is_ours = false;
  DesiredAttempt attempt;
  bool was_in_sync = false;  // With this very wish.
};

struct DesiredPlan {
  std::vector<DesiredRow> rows;                         // As `facts`.
  std::vector<size_t> start;                            // Of `facts`: swap these now.
  absl::Duration next_look = absl::InfiniteDuration();  // From now: a wait ends then.
};
// `running`: how many swaps of the file's are under way.
DesiredPlan PlanDesired(std::span<const DesiredFacts> facts, size_t running, absl::Duration now);

// 1 s, doubled at every failure, up to a minute.
absl::Duration DesiredBackoff(unsigned failures);

}  // namespace modelhost
