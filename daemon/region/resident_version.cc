#include "daemon/region/resident_version.h"

#include <algorithm>

namespace modelhost {

// Files with one digest share an entry of `regions`, so each is there once.
uint64_t ResidentVersion::host_bytes() const {
  uint64_t bytes = 0;
  for (const auto& region : regions) bytes += region->bytes();
  return bytes;
}

uint64_t ResidentVersion::locked_bytes() const {
  uint64_t bytes = 0;
  for (const auto& region : regions) bytes += region->locked_bytes();
  return bytes;
}

const DeviceImage* ResidentVersion::DeviceOf(absl::string_view gpu) const {
  const auto found = std::ranges::find(devices, gpu, &DeviceImage::gpu);
  return found == devices.end() ? nullptr : &*found;
}

bool ResidentVersion::all_sealed() const {
  return std::ranges::all_of(
      regions, [](const auto& region) { return region->kind() == abi::RegionKind::kSealed; });
}

}  // namespace modelhost
