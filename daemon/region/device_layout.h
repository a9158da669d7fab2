// Where the tensors of a host region lie on a device: packed at kDeviceAlignment, in one or more
// segments, whatever their alignment in the file.
//
// A segment is one allocation of the driver with a descriptor of its own. Tensors keep the order of
// their bytes in the region, so an upload reads the file from front to back. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace modelhost {

inline constexpr uint64_t kDeviceAlignment = 512;  // What kernels expect of any buffer.

// Bytes [offset, offset + bytes) of the host region.
struct HostRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  friend bool operator==(const HostRange&, const HostRange&) = default;
};

struct DevicePlace {
  uint32_t segment = 0;
  uint64_t offset = 0;  // A multiple of kDeviceAlignment.
};

struct DeviceLayout {
  std::vector<DevicePlace> places;      // One for each range that was asked for.
  std::vector<uint64_t> segment_bytes;  // Multiples of the granularity.

  uint64_t TotalBytes() const;
};

struct DeviceLayoutLimits {
  uint64_t granularity = uint64_t{2} << 20;  // The driver's; a power of two.
  // A segment is no larger unless one tensor alone is. Integrated GPUs have trouble with larger.
  uint64_t max_segment_bytes = UINT64_MAX;
};

// Ranges that are equal share a place (tied weights). An empty one has the place (0, 0).
//   INVALID_ARGUMENT  a range, or the sum of them, does not fit into 64 bits
absl::StatusOr<DeviceLayout> PackForDevice(std::span<const HostRange> ranges,
                                           const DeviceLayoutLimits& limits);

}  // namespace modelhost
