#include "daemon/publish/device_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

template <typename... Parts>
absl::Status Unfit(const Parts&... why) {
  return absl::InternalError(absl::StrCat("device plan: ", why...));
}

bool RangeBefore(const HostRange& a, const HostRange& b) {
  return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
}

bool Inside(uint64_t offset, uint64_t bytes, uint64_t all) {
  return bytes <= all && offset <= all - bytes;
}

}  // namespace

absl::Status DeviceTable::Init(const DevicePlan& plan, const ResidentVersion& version) {
  plan_ = &plan;
  by_region_.resize(version.regions.size());
  placed_.resize(version.regions.size());
  for (const DevicePlan::Part& part : plan.parts) {
    if (auto status = AddPart(part, version); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status DeviceTable::AddPart(const DevicePlan::Part& part, const ResidentVersion& version) {
  if (part.region >= by_region_.size()) {
    return Unfit("region ", part.region, " of ", by_region_.size());
  }
  if (by_region_[part.region] != nullptr) return Unfit("region ", part.region, " is there twice");
  by_region_[part.region] = &part;
  placed_[part.region].resize(part.ranges.size());
  const uint64_t region_bytes = version.regions[part.region]->bytes();
  for (size_t i = 0; i < part.ranges.size(); ++i) {
    const HostRange& range = part.ranges[i];
    if (!Inside(range.offset, range.bytes, region_bytes)) {
      return Unfit("bytes ", range.offset, " + ", range.bytes, " of region ", part.region,
                   ", which has ", region_bytes);
    }
    if (i > 0 && !RangeBefore(part.ranges[i - 1], range)) {
      return Unfit("the ranges of region ", part.region, " are not sorted");
    }
  }
  if (!plan_->segments) {
    if (!part.places.empty() || !part.segment_bytes.empty()) {
      return Unfit("region ", part.region, " has segments in a plan without them");
    }
    return absl::OkStatus();
  }
  if (part.places.size() != part.ranges.size() || part.first_segment != segments_.size()) {
    return Unfit("region ", part.region, ": ", part.places.size(), " places for ",
                 part.ranges.size(), " ranges, first segment ", part.first_segment, " after ",
                 segments_.size());
  }
  for (size_t i = 0; i < part.places.size(); ++i) {
    const DevicePlace& place = part.places[i];
    if (place.segment >= part.segment_bytes.size() ||
        !Inside(place.offset, part.ranges[i].bytes, part.segment_bytes[place.segment])) {
      return Unfit("region ", part.region, ": bytes ", place.offset, " + ", part.ranges[i].bytes,
                   " of its segment ", place.segment, ", which is not that large");
    }
  }
  for (const uint64_t bytes : part.segment_bytes) segments_.push_back({bytes, part.region, 0});
  return absl::OkStatus();
}

void DeviceTable::Place(abi::TensorEntry& tensor) {
  const DevicePlan::Part* part = by_region_[tensor.region];
  if (part == nullptr) return;
  const HostRange range{tensor.region_offset, tensor.nbytes};
  const auto at = std::ranges::lower_bound(part->ranges, range, RangeBefore);
  if (at == part->ranges.end() || *at != range) return;
  const auto number = static_cast<size_t>(at - part->ranges.begin());
  placed_[tensor.region][number] = true;
  tensor.flags |= abi::kTensorOnDevice;
  if (!plan_->segments) return;
  tensor.device_segment = part->first_segment + part->places[number].segment;
  tensor.device_offset = part->places[number].offset;
}

absl::Status DeviceTable::CheckAllPlaced() const {
  for (size_t region = 0; region < placed_.size(); ++region) {
    const auto missing = std::ranges::find(placed_[region], false);
    if (missing == placed_[region].end()) continue;
    const HostRange& range =
        by_region_[region]->ranges[static_cast<size_t>(missing - placed_[region].begin())];
    return Unfit("bytes ", range.offset, " + ", range.bytes, " of region ", region,
                 " are no tensor's");
  }
  return absl::OkStatus();
}

}  // namespace modelhost
