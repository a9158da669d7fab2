#include "daemon/region/device_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

// Room for rounding up.
constexpr uint64_t kMostDeviceBytes = std::numeric_limits<uint64_t>::max() / 4;

uint64_t RoundUp(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

uint64_t DeviceLayout::TotalBytes() const {
  return std::accumulate(segment_bytes.begin(), segment_bytes.end(), uint64_t{0});
}

absl::StatusOr<DeviceLayout> PackForDevice(std::span<const HostRange> ranges,
                                           const DeviceLayoutLimits& limits) {
  std::vector<size_t> order;
  uint64_t total = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const HostRange& range = ranges[i];
    if (range.bytes > kMostDeviceBytes || range.offset > kMostDeviceBytes ||
        total > kMostDeviceBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", i, ": ", range.bytes, " bytes are more than a device can hold"));
    }
    total += RoundUp(range.bytes, kDeviceAlignment);
    if (range.bytes > 0) order.push_back(i);
  }
  std::ranges::sort(order, [&](size_t a, size_t b) {
    return std::pair(ranges[a].offset, ranges[a].bytes) <
           std::pair(ranges[b].offset, ranges[b].bytes);
  });
  DeviceLayout layout;
  layout.places.resize(ranges.size());
  uint64_t used = 0;  // Of the open segment.
  const HostRange* before = nullptr;
  for (const size_t i : order) {
    const HostRange& range = ranges[i];
    if (before != nullptr && *before == range) {
      layout.places[i] = layout.places[static_cast<size_t>(before - ranges.data())];
      continue;
    }
    const uint64_t bytes = RoundUp(range.bytes, kDeviceAlignment);
    const bool fits = used <= limits.max_segment_bytes && bytes <= limits.max_segment_bytes - used;
    if (layout.segment_bytes.empty() || !fits) {
      if (used > 0 || layout.segment_bytes.empty()) {
        layout.segment_bytes.push_back(0);
        used = 0;
      }
    }
    layout.places[i] = {static_cast<uint32_t>(layout.segment_bytes.size() - 1), used};
    used += bytes;
    layout.segment_bytes.back() = RoundUp(used, limits.granularity);
    before = &range;
  }
  return layout;
}

}  // namespace modelhost
