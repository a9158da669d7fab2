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

std::shared_ptr<const ResidentVersion> WithoutLostCopies(const ResidentVersion& version) {
  auto index = version.index.fd.Duplicate();
  if (!index.ok()) return nullptr;
  auto copy = std::make_shared<ResidentVersion>();
  copy->manifest = version.manifest;
  copy->requirements = version.requirements;
  copy->compared = version.compared;
  copy->format = version.format;
  copy->tensor_count = version.tensor_count;
  copy->tensor_bytes = version.tensor_bytes;
  copy->regions = version.regions;
  copy->eager = version.eager;
  copy->file_regions = version.file_regions;
  copy->index.fd = *std::move(index);
  copy->index.bytes = version.index.bytes;
  copy->device_targets = version.device_targets;
  copy->devices = version.devices;
  for (DeviceImage& image : copy->devices) {
    const auto lost = [](const auto& region) { return region->lost(); };
    if (std::erase_if(image.regions, lost) > 0) image.let_go = true;
  }
  copy->parked = version.parked;
  copy->report = version.report;
  copy->tier = version.tier;
  return copy;
}

bool ResidentVersion::all_sealed() const {
  return std::ranges::all_of(
      regions, [](const auto& region) { return region->kind() == abi::RegionKind::kSealed; });
}

}  // namespace modelhost
