// Which versions on disk are not needed, as pure functions. No state, no I/O; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "daemon/registry/ids.h"
#include "daemon/store/removal.h"

namespace modelhost {

struct GarbageCandidate {
  VersionKey key;
  absl::Time created;
  // A label, or it is what a label would roll back to, a lease, bytes in memory, or work under way:
  // it stays, whatever its age.
  bool needed = false;
};

// What is not among the `keep` newest of its model, and not needed. Oldest first within a model. A
// needed old one takes no place: what was published last must not go because it has no label yet.
// QUARANTINED and invalid versions are versions like any other: a repair may want them.
std::vector<VersionKey> ChooseGarbage(std::span<const GarbageCandidate> candidates,
                                      const std::map<std::string, int64_t>& keep);

// What removing all of these frees: a file goes when its last name does, so one that also has names
// elsewhere frees nothing.
uint64_t FreedBytes(std::span<const DiskUse> removed);

}  // namespace modelhost
