#include "daemon/region/flat_index.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "proto/abi/dtype.h"

namespace modelhost {

absl::StatusOr<FlatIndex> FlatIndex::Map(const SealedRegion& index) {
  auto mapping = ReadOnlyMapping::MapSealed(index.fd, index.bytes, Align::kPage);
  if (!mapping.ok()) return ToStatus(mapping.error(), "version index");
  auto view = Read(mapping->bytes());
  if (view.ok()) view->mapping_ = *std::move(mapping);
  return view;
}

absl::StatusOr<FlatIndex> FlatIndex::Read(std::span<const std::byte> bytes) {
  FlatIndex view;
  view.bytes_ = bytes;
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(abi::IndexHeader) != 0) {
    std::abort();  // The caller's bug: mapped bytes are aligned, and so are those of a vector.
  }
  if (bytes.size() < sizeof(abi::IndexHeader) || !abi::IndexFits(view.header(), bytes.size())) {
    return absl::DataLossError(absl::StrCat("version index of ", bytes.size(),
                                            " bytes: not one, or its tables do not fit"));
  }
  return view;
}

absl::Status FlatIndex::Broken(std::string_view what, uint64_t number) const {
  return absl::DataLossError(
      absl::StrCat("version index: ", absl::string_view(what.data(), what.size()), " ", number,
                   " points outside of it"));
}

absl::StatusOr<std::string_view> FlatIndex::Text(const abi::StringRef& ref) const {
  if (ref.length == 0) return std::string_view();
  const uint64_t end = uint64_t{ref.offset} + ref.length;
  if (end >= header().strings.count) return Broken("the text at", ref.offset);
  return std::string_view(&At<char>(header().strings, ref.offset), ref.length);
}

absl::StatusOr<std::span<const int64_t>> FlatIndex::Dims(uint32_t first, uint16_t rank) const {
  if (rank == 0) return std::span<const int64_t>();
  if (uint64_t{first} + rank > header().dims.count) return Broken("the shape at", first);
  return std::span(&At<int64_t>(header().dims, first), rank);
}

absl::StatusOr<FlatIndex::Pair> FlatIndex::PairOf(const abi::StringRef& first,
                                                  const abi::StringRef& second) const {
  const auto one = Text(first);
  if (!one.ok()) return one.status();
  const auto two = Text(second);
  if (!two.ok()) return two.status();
  return Pair{*one, *two};
}

FlatIndex::Region FlatIndex::RegionAt(uint64_t number) const {
  const auto& entry = At<abi::RegionEntry>(header().regions, number);
  return {entry.bytes, entry.digest, entry.kind == static_cast<uint32_t>(abi::RegionKind::kSealed),
          entry.eager != 0};
}

absl::StatusOr<FlatIndex::File> FlatIndex::FileAt(uint64_t number) const {
  const auto& entry = At<abi::FileEntry>(header().files, number);
  const auto texts = PairOf(entry.path, entry.role);
  if (!texts.ok()) return texts.status();
  if (entry.region >= region_count()) return Broken("the region of file", number);
  return File{texts->first, texts->second, entry.bytes, entry.digest, entry.region};
}

absl::StatusOr<FlatIndex::Pair> FlatIndex::ComponentAt(uint64_t number) const {
  const auto& entry = At<abi::ComponentEntry>(header().components, number);
  return PairOf(entry.name, entry.format);
}

absl::StatusOr<FlatIndex::Pair> FlatIndex::MetadataAt(uint64_t number) const {
  const auto& entry = At<abi::MetadataEntry>(header().metadata, number);
  return PairOf(entry.key, entry.value);
}

FlatIndex::Segment FlatIndex::SegmentAt(uint64_t number) const {
  const auto& entry = At<abi::DeviceSegmentEntry>(header().device_segments, number);
  return {entry.bytes, entry.region};
}

absl::StatusOr<FlatIndex::Tensor> FlatIndex::TensorAt(uint64_t number) const {
  const abi::TensorEntry& entry = EntryAt(number);
  const auto texts = PairOf(entry.name, entry.reason);
  if (!texts.ok()) return texts.status();
  const auto shape = Dims(entry.shape, entry.rank);
  if (!shape.ok()) return shape.status();
  Tensor tensor;
  tensor.name = texts->first;
  tensor.reason = texts->second;
  tensor.dtype = abi::DTypeName(static_cast<abi::DType>(entry.dtype));
  tensor.shape = *shape;
  if ((entry.flags & abi::kTensorStrided) != 0 && entry.strides != abi::kNone) {
    const auto strides = Dims(entry.strides, entry.rank);
    if (!strides.ok()) return strides.status();
    tensor.strides = *strides;
  }
  tensor.mappable = (entry.flags & abi::kTensorMappable) != 0;
  if (tensor.mappable) {
    if (entry.region >= region_count()) return Broken("the region of tensor", number);
    const uint64_t bytes = RegionAt(entry.region).bytes;
    if (entry.region_offset > bytes || entry.nbytes > bytes - entry.region_offset) {
      return Broken("tensor", number);
    }
  }
  tensor.region = entry.region;
  tensor.offset = entry.region_offset;
  tensor.nbytes = entry.nbytes;
  tensor.file = entry.file;
  tensor.component = entry.component;
  tensor.block_elements = entry.block_elements;
  tensor.block_bytes = entry.block_bytes;
  tensor.on_device = (entry.flags & abi::kTensorOnDevice) != 0;
  tensor.has_segment = tensor.on_device && entry.device_segment != abi::kNone;
  if (tensor.has_segment) {
    if (entry.device_segment >= segment_count()) return Broken("the segment of tensor", number);
    tensor.segment = entry.device_segment;
    tensor.segment_offset = entry.device_offset;
  }
  return tensor;
}

}  // namespace modelhost
