#include "daemon/region/device_region.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {

DeviceRegion::~DeviceRegion() {
  // Memory by descriptor goes with its descriptors; the agent keeps the rest until it is told.
  std::vector<DeviceSegment> held;
  for (DeviceSegment& segment : parts_.segments) {
    if (!segment.fd.valid()) held.push_back(std::move(segment));
  }
  if (!held.empty()) releaser_.ReleaseLater(std::move(held), std::move(parts_.device));
}

void DeviceRegion::MarkLost() const {
  if (lost_.exchange(true)) return;
  booked_.store(0, std::memory_order_relaxed);
  parts_.device.Shrink(0);
}

uint64_t DeviceRegion::bytes() const {
  uint64_t sum = 0;
  for (const DeviceSegment& segment : parts_.segments) sum += segment.bytes;
  return sum;
}

uint64_t DeviceImage::bytes() const {
  uint64_t sum = 0;
  for (const auto& region : regions) sum += region->bytes();
  return sum;
}

bool DeviceImage::lost() const {
  return let_go || std::ranges::any_of(regions, [](const auto& region) { return region->lost(); });
}

Digest PlannedDeviceId(const std::string& gpu, const Digest& file, const std::string& policy) {
  const std::string text = absl::StrCat(gpu, "\n", file.Hex(), "\n", policy);
  return Sha256(std::as_bytes(std::span(text)));
}

}  // namespace modelhost
