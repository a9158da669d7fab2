#include "daemon/region/device_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/region/flat_index.h"
#include "daemon/store/name_patterns.h"
#include "proto/abi/version_index.h"

namespace modelhost {
namespace {

// A range that goes to the device, and, read from an index, where it lies there.
struct Chosen {
  uint32_t region = 0;
  HostRange range;
  DevicePlace place;

  auto Order() const { return std::tuple(region, range.offset, range.bytes); }
};

uint64_t RoundToAlignment(uint64_t bytes) {
  return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

absl::Status NotOurs(const std::string& why) {
  return absl::DataLossError(absl::StrCat("the index's device tables: ", why));
}

absl::StatusOr<std::vector<DevicePlan::Part>> PartsOfSegments(const FlatIndex& index) {
  std::vector<DevicePlan::Part> parts;
  const uint64_t count = index.segment_count();
  if (count >= abi::kNone) return NotOurs(absl::StrCat("it has ", count, " segments"));
  for (uint32_t i = 0; i < count; ++i) {
    const FlatIndex::Segment entry = index.SegmentAt(i);
    if (entry.region >= index.region_count() || entry.bytes == 0) {
      return NotOurs(absl::StrCat("segment ", i, " is of region ", entry.region, " and has ",
                                  entry.bytes, " bytes"));
    }
    if (parts.empty() || parts.back().region < entry.region) {
      parts.emplace_back();
      parts.back().region = entry.region;
      parts.back().first_segment = i;
    } else if (parts.back().region > entry.region) {
      return NotOurs(absl::StrCat("segment ", i, " is not in the order of regions"));
    }
    parts.back().segment_bytes.push_back(entry.bytes);
  }
  return parts;
}

// Of tensor `i`; nothing where it is not on the device.
absl::StatusOr<std::optional<Chosen>> ChosenOfTensor(const FlatIndex& index, uint64_t i) {
  const abi::TensorEntry& entry = index.EntryAt(i);
  const auto bad = [&](const auto&... why) {
    return NotOurs(absl::StrCat("tensor ", i, ": ", why...));
  };
  const bool segments = index.segment_count() > 0;
  const bool on_device = (entry.flags & abi::kTensorOnDevice) != 0;
  if ((on_device && segments) != (entry.device_segment != abi::kNone)) {
    return bad("it has segment ", entry.device_segment, " and flags ", entry.flags);
  }
  if (!on_device || entry.nbytes == 0) return std::nullopt;
  if ((entry.flags & abi::kTensorMappable) == 0) return bad("on a device, and not mappable");
  if (entry.region >= index.region_count()) return bad("no region ", entry.region);
  const uint64_t region_bytes = index.RegionAt(entry.region).bytes;
  if (entry.nbytes > region_bytes || entry.region_offset > region_bytes - entry.nbytes) {
    return bad("bytes ", entry.region_offset, " to ", entry.region_offset, " + ", entry.nbytes,
               " of a region that has ", region_bytes);
  }
  Chosen chosen{entry.region, {entry.region_offset, entry.nbytes}, {}};
  if (!segments) return chosen;
  if (entry.device_segment >= index.segment_count()) {
    return bad("no segment ", entry.device_segment);
  }
  const FlatIndex::Segment segment = index.SegmentAt(entry.device_segment);
  if (segment.region != entry.region || entry.device_offset % kDeviceAlignment != 0 ||
      entry.nbytes > segment.bytes || entry.device_offset > segment.bytes - entry.nbytes) {
    return bad("offset ", entry.device_offset, " of segment ", entry.device_segment, ", which has ",
               segment.bytes, " bytes of region ", segment.region);
  }
  chosen.place = {entry.device_segment, entry.device_offset};
  return chosen;
}

// Tensors keep the order of their bytes, and are apart.
bool Apart(const DevicePlace& before, const HostRange& range, const DevicePlace& place) {
  if (before.segment != place.segment) return before.segment < place.segment;
  return before.offset <= place.offset &&
         place.offset - before.offset >= RoundToAlignment(range.bytes);
}

absl::Status AddPlaced(std::vector<Chosen> all, DevicePlan& plan) {
  std::ranges::sort(all, {}, &Chosen::Order);
  for (const Chosen& each : all) {
    if (!plan.segments && (plan.parts.empty() || plan.parts.back().region != each.region)) {
      plan.parts.emplace_back();
      plan.parts.back().region = each.region;
    }
    const auto part =
        std::ranges::lower_bound(plan.parts, each.region, {}, &DevicePlan::Part::region);
    DevicePlace place = each.place;
    if (plan.segments) place.segment -= part->first_segment;
    const bool same = !part->ranges.empty() && part->ranges.back() == each.range;
    if (same && plan.segments &&
        (part->places.back().segment != place.segment ||
         part->places.back().offset != place.offset)) {
      return NotOurs(absl::StrCat("the bytes at ", each.range.offset, " of region ", each.region,
                                  " have two places"));
    }
    if (same) continue;
    if (plan.segments && !part->ranges.empty() &&
        !Apart(part->places.back(), part->ranges.back(), place)) {
      return NotOurs(absl::StrCat("the bytes at ", each.range.offset, " of region ", each.region,
                                  " lie on others"));
    }
    part->ranges.push_back(each.range);
    if (plan.segments) part->places.push_back(place);
  }
  const auto empty = std::ranges::find_if(
      plan.parts, [](const DevicePlan::Part& part) { return part.ranges.empty(); });
  if (empty == plan.parts.end()) return absl::OkStatus();
  return NotOurs(absl::StrCat("segment ", empty->first_segment, " holds no tensor"));
}

// Which tensors a policy means, and which of its patterns mean any.
class TensorChoice {
 public:
  static absl::StatusOr<TensorChoice> Of(const DevicePolicy& policy) {
    auto patterns = NamePatterns::Compile(policy.tensors);
    if (!patterns.ok()) return patterns.status();
    return TensorChoice(policy, *std::move(patterns));
  }
  bool Takes(std::string_view name) {
    if (patterns_.size() == 0) return true;
    bool any = false;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (any && used_[i]) continue;
      if (!patterns_.Matches(i, name)) continue;
      any = true;
      used_[i] = true;
    }
    return any;
  }
  void WarnOfUnused(std::vector<std::string>& warnings) const {
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (used_[i]) continue;
      warnings.push_back(absl::StrCat("device: no tensor's name matches the pattern ",
                                      Quoted(policy_.tensors[i])));
    }
  }

 private:
  TensorChoice(const DevicePolicy& policy, NamePatterns patterns)
      : policy_(policy), patterns_(std::move(patterns)), used_(patterns_.size()) {}

  const DevicePolicy& policy_;
  NamePatterns patterns_;
  std::vector<bool> used_;
};

// Every part has what goes of one region, packed.
absl::Status AddPacked(const std::vector<Chosen>& sorted, const DeviceLayoutLimits& limits,
                       DevicePlan& plan) {
  for (const Chosen& each : sorted) {
    if (plan.parts.empty() || plan.parts.back().region != each.region) {
      plan.parts.emplace_back();
      plan.parts.back().region = each.region;
    }
    plan.parts.back().ranges.push_back(each.range);
  }
  if (!plan.segments) return absl::OkStatus();
  uint32_t next = 0;
  for (DevicePlan::Part& part : plan.parts) {
    auto layout = PackForDevice(part.ranges, limits);
    if (!layout.ok()) return layout.status();
    part.places = std::move(layout->places);
    part.segment_bytes = std::move(layout->segment_bytes);
    part.first_segment = next;
    next += static_cast<uint32_t>(part.segment_bytes.size());
  }
  return absl::OkStatus();
}

// The part of `region` and the number of `range` in it.
std::optional<std::pair<const DevicePlan::Part*, size_t>> Locate(const DevicePlan& plan,
                                                                 uint32_t region,
                                                                 const HostRange& range) {
  const auto part = std::ranges::lower_bound(plan.parts, region, {}, &DevicePlan::Part::region);
  if (part == plan.parts.end() || part->region != region) return std::nullopt;
  const auto order = [](const HostRange& each) { return std::pair(each.offset, each.bytes); };
  const auto found = std::ranges::lower_bound(part->ranges, order(range), {}, order);
  if (found == part->ranges.end() || *found != range) return std::nullopt;
  return std::pair(&*part, static_cast<size_t>(found - part->ranges.begin()));
}

}  // namespace

uint64_t DevicePlan::TotalBytes() const {
  uint64_t bytes = 0;
  for (const Part& part : parts) {
    bytes = std::accumulate(part.segment_bytes.begin(), part.segment_bytes.end(), bytes);
  }
  return bytes;
}

uint32_t DevicePlan::SegmentCount() const {
  return parts.empty() ? 0
                       : parts.back().first_segment +
                             static_cast<uint32_t>(parts.back().segment_bytes.size());
}

bool DevicePlan::Has(uint32_t region, const HostRange& range) const {
  return Locate(*this, region, range).has_value();
}

std::optional<DevicePlace> DevicePlan::Find(uint32_t region, const HostRange& range) const {
  const auto at = Locate(*this, region, range);
  if (!segments || !at.has_value()) return std::nullopt;
  DevicePlace place = at->first->places[at->second];
  place.segment += at->first->first_segment;
  return place;
}

absl::StatusOr<DevicePlan> PlanDevice(const DevicePolicy& policy,
                                      const std::vector<ComponentIndex>& components,
                                      std::span<const std::string> files,
                                      std::span<const uint32_t> file_regions, bool segments,
                                      const DeviceLayoutLimits& limits,
                                      std::vector<std::string>& warnings) {
  DevicePlan plan;
  plan.segments = segments;
  if (!policy.wanted) return plan;
  auto choice = TensorChoice::Of(policy);
  if (!choice.ok()) return choice.status();
  std::map<std::string_view, uint32_t> regions;
  for (size_t i = 0; i < files.size() && i < file_regions.size(); ++i) {
    regions.emplace(files[i], file_regions[i]);
  }
  std::vector<Chosen> all;
  uint64_t unmappable = 0;
  for (const ComponentIndex& component : components) {
    // By number of the component's file; a file that the version lacks is for the index to refuse.
    std::vector<std::optional<uint32_t>> region_of;
    for (const std::string& file : component.index.files()) {
      const auto found = regions.find(file);
      region_of.push_back(found == regions.end() ? std::nullopt : std::optional(found->second));
    }
    for (size_t i = 0; i < component.index.size(); ++i) {
      const TensorInfo tensor = component.index.at(i);
      if (tensor.file >= region_of.size() || !region_of[tensor.file].has_value()) continue;
      if (!choice->Takes(tensor.name)) continue;
      if (!tensor.mappable) {
        ++unmappable;
      } else if (tensor.nbytes > 0) {
        all.push_back({*region_of[tensor.file], {tensor.offset, tensor.nbytes}, {}});
      }
    }
  }
  choice->WarnOfUnused(warnings);
  if (unmappable > 0) {
    warnings.push_back(absl::StrCat("device: ", unmappable,
                                    " tensors that the policy names cannot be mapped as they are "
                                    "and stay on the host"));
  }
  std::ranges::sort(all, {}, &Chosen::Order);
  const auto same = [](const Chosen& a, const Chosen& b) { return a.Order() == b.Order(); };
  all.erase(std::unique(all.begin(), all.end(), same), all.end());  // Tied weights.
  if (auto packed = AddPacked(all, limits, plan); !packed.ok()) return packed;
  return plan;
}

absl::StatusOr<DevicePlan> PlanOfIndex(std::span<const std::byte> bytes) {
  const auto index = FlatIndex::Read(bytes);
  if (!index.ok()) return index.status();
  DevicePlan plan;
  plan.segments = index->segment_count() > 0;
  auto parts = PartsOfSegments(*index);
  if (!parts.ok()) return parts.status();
  plan.parts = *std::move(parts);
  std::vector<Chosen> all;
  for (uint64_t i = 0; i < index->tensor_count(); ++i) {
    const auto chosen = ChosenOfTensor(*index, i);
    if (!chosen.ok()) return chosen.status();
    if (chosen->has_value()) all.push_back(**chosen);
  }
  if (auto added = AddPlaced(std::move(all), plan); !added.ok()) return added;
  return plan;
}

Digest PartDigest(const DevicePlan::Part& part) {
  std::vector<uint64_t> numbers = {part.ranges.size(), part.places.size(),
                                   part.segment_bytes.size()};
  numbers.reserve(3 + 2 * (part.ranges.size() + part.places.size()) + part.segment_bytes.size());
  for (const HostRange& range : part.ranges) {
    numbers.insert(numbers.end(), {range.offset, range.bytes});
  }
  for (const DevicePlace& place : part.places) {
    numbers.insert(numbers.end(), {place.segment, place.offset});
  }
  numbers.insert(numbers.end(), part.segment_bytes.begin(), part.segment_bytes.end());
  return Sha256(std::as_bytes(std::span(numbers)));
}

}  // namespace modelhost
