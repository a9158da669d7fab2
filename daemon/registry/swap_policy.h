// What a swap or a load should do, as pure functions of what is known. No state, no I/O; any
// thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/registry/ids.h"
#include "daemon/registry/lifecycle_policy.h"

namespace modelhost {

// How a failed load ends. Bad bytes stay bad until they are published again; everything else may be
// tried again. EIO is the disk's fault, not the bytes'.
enum class LoadFailure { kNoRoom, kCancelled, kBadBytes, kTransient };
LoadFailure ClassifyLoadFailure(const absl::Status& status, int sys_errno);

// A compare-and-swap that does not hold. OK when `if_current` is unset or equal to `current` (0 =
// none).
absl::Status CheckIfCurrent(const std::string& model, const std::string& label,
                            std::optional<uint64_t> if_current, uint64_t current);

struct EvictionCandidate {
  VersionKey key;
  VersionFacts facts;
  absl::Time last_used;
};
// The least recently used version that MayEvict lets go, or nothing.
std::optional<VersionKey> ChooseEviction(std::span<const EvictionCandidate> candidates);

// The name of `names` that a person most likely meant by `wanted`, or nothing: at most two edits
// away.
std::optional<std::string> NearestName(const std::string& wanted,
                                       std::span<const std::string> names);

}  // namespace modelhost
