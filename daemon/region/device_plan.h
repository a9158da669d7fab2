// Which tensors of a version go to a GPU and where they lie there: the same on every GPU.
//
// Made from what was parsed, or read back from a sealed index. Sizes in bytes. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/region/device_layout.h"
#include "daemon/region/version_contents.h"
#include "daemon/store/digest.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

struct DevicePlan {
  // What of one region goes. Its segments are numbered first_segment, first_segment + 1, ... in the
  // index; `places` count from 0.
  struct Part {
    uint32_t region = 0;
    std::vector<HostRange> ranges;    // Sorted, each once, not empty.
    std::vector<DevicePlace> places;  // Of ranges[i].
    std::vector<uint64_t> segment_bytes;
    uint32_t first_segment = 0;
  };
  bool segments = false;    // False: the GPUs read host regions; the parts have ranges alone.
  std::vector<Part> parts;  // By region.

  bool empty() const { return parts.empty(); }
  uint64_t TotalBytes() const;  // Of all segments.
  uint32_t SegmentCount() const;
  bool Has(uint32_t region, const HostRange& range) const;
  // With the number that the index gives the segment. Nothing: not on the device, or no segments.
  std::optional<DevicePlace> Find(uint32_t region, const HostRange& range) const;
};

// `file_regions` as in ResidentVersion, `files` the manifest's. INVALID_ARGUMENT: a range that is
// too large. A pattern that matches no tensor adds to `warnings`.
absl::StatusOr<DevicePlan> PlanDevice(const DevicePolicy& policy,
                                      const std::vector<ComponentIndex>& components,
                                      std::span<const std::string> files,
                                      std::span<const uint32_t> file_regions, bool segments,
                                      const DeviceLayoutLimits& limits,
                                      std::vector<std::string>& warnings);

// The plan that a sealed index of this program was laid out by; `index` as for FlatIndex::Read.
// DATA_LOSS: it does not fit together.
absl::StatusOr<DevicePlan> PlanOfIndex(std::span<const std::byte> index);

// SHA-256 over ranges and places: equal ones are filled with the same bytes from the same content.
Digest PartDigest(const DevicePlan::Part& part);

}  // namespace modelhost
