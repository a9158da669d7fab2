// One loaded version: its regions, its sealed index, and how the load went. Immutable; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "daemon/format/requires.h"
#include "daemon/region/device_region.h"
#include "daemon/region/host_region.h"
#include "daemon/store/manifest.h"
#include "proto/handle/region.h"

namespace modelhost {

struct LoadPhase {
  std::string name;  // "open", "verify", "map", "prewarm", "pin", "index".
  absl::Duration duration;
  uint64_t bytes = 0;
};

struct LoadReport {
  // "cold", "warm" (all was in the page cache), "restore" (from the fd store; nothing was read).
  std::string source;
  absl::Duration duration;
  std::vector<LoadPhase> phases;
  uint64_t disk_bytes = 0;      // Read from the store's files in this load.
  uint64_t shared_bytes = 0;    // Already resident through another version.
  uint64_t restored_bytes = 0;  // Of regions that an earlier daemon made and the fd store kept.
  bool restored_index = false;  // Neither parsed nor laid out anew.
  std::vector<std::string> warnings;
};

struct ResidentVersion {
  std::shared_ptr<const Manifest> manifest;
  std::map<std::string, std::string> requirements;  // All that it requires, from every source.
  std::vector<RequiresSource> compared;             // Of these, what the machine must fulfil.
  std::string format;                               // "mixed" when components differ.
  uint64_t tensor_count = 0;
  uint64_t tensor_bytes = 0;
  // By region number of the index. Files with one digest share a region.
  std::vector<std::shared_ptr<const HostRegion>> regions;
  std::vector<uint32_t>
      eager;  // Regions that hold tensors, in the order their descriptors are sent.
  std::vector<uint32_t> file_regions;  // Region of manifest->files[i].
  SealedRegion index;
  std::vector<std::string> device_targets;  // GPUs that its load could use, if it needed any.
  std::vector<DeviceImage> devices;    // One per GPU that has it; none without a device policy.
  std::shared_ptr<const void> parked;  // While it lives, all this is in the fd store too.
  LoadReport report;
  HostTier tier = HostTier::kNone;  // The lowest of its regions that hold tensors.

  uint64_t host_bytes() const;  // Sum over its distinct regions.
  uint64_t locked_bytes() const;
  // Null: there is no copy on that GPU.
  const DeviceImage* DeviceOf(absl::string_view gpu) const;
  bool all_sealed() const;  // No byte of it depends on a file any more.
};

// The same version without the copies on GPUs that were lost: their images stay, and say so
// (let_go). Null: there was no descriptor left for its index.
std::shared_ptr<const ResidentVersion> WithoutLostCopies(const ResidentVersion& version);

}  // namespace modelhost
