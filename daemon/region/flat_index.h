// Reads the index of a version (proto/abi/version_index.h) back, for those who tell of it in other
// words than its bytes.
//
// Every number that leads somewhere is checked when it is followed: a broken index is DATA_LOSS,
// never a crash. Texts borrow from the view. Mapping it is a system call or two: not for the
// control thread. Immutable; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/abi/version_index.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"

namespace modelhost {

class FlatIndex {
 public:
  struct Region {
    uint64_t bytes = 0;
    std::span<const uint8_t> digest;
    bool sealed = false;
    bool eager = false;
  };
  struct File {
    std::string_view path;
    std::string_view role;
    uint64_t bytes = 0;
    std::span<const uint8_t> digest;
    uint32_t region = 0;
  };
  struct Pair {
    std::string_view first;
    std::string_view second;
  };
  struct Segment {
    uint64_t bytes = 0;
    uint32_t region = 0;
  };
  struct Tensor {
    std::string_view name;
    std::string_view dtype;
    std::span<const int64_t> shape;
    std::span<const int64_t> strides;  // Empty: row-major.
    uint32_t region = 0;
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    uint32_t file = 0;
    uint32_t component = 0;
    bool mappable = false;
    std::string_view reason;
    uint32_t block_elements = 1;
    uint32_t block_bytes = 0;
    bool on_device = false;
    bool has_segment = false;
    uint32_t segment = 0;
    uint64_t segment_offset = 0;
  };

  // The caller may drop `index` afterwards.
  static absl::StatusOr<FlatIndex> Map(const SealedRegion& index);
  // Of bytes that outlive the view and are aligned to 8, as the tables are among themselves.
  static absl::StatusOr<FlatIndex> Read(std::span<const std::byte> bytes);

  std::string_view model() const { return header().model; }
  uint64_t version() const { return header().version; }
  std::span<const uint8_t> digest() const { return header().digest; }
  absl::StatusOr<std::string_view> format() const { return Text(header().format); }

  uint64_t tensor_count() const { return header().tensors.count; }
  uint64_t region_count() const { return header().regions.count; }
  uint64_t file_count() const { return header().files.count; }
  uint64_t component_count() const { return header().components.count; }
  uint64_t metadata_count() const { return header().metadata.count; }
  uint64_t segment_count() const { return header().device_segments.count; }

  // Numbers below the counts.
  Region RegionAt(uint64_t number) const;
  absl::StatusOr<File> FileAt(uint64_t number) const;
  absl::StatusOr<Pair> ComponentAt(uint64_t number) const;  // Name and format.
  absl::StatusOr<Pair> MetadataAt(uint64_t number) const;   // Key and value.
  Segment SegmentAt(uint64_t number) const;
  absl::StatusOr<Tensor> TensorAt(uint64_t number) const;
  // As it stands, nothing checked.
  const abi::TensorEntry& EntryAt(uint64_t number) const {
    return At<abi::TensorEntry>(header().tensors, number);
  }

 private:
  FlatIndex() = default;
  const abi::IndexHeader& header() const {
    return *reinterpret_cast<const abi::IndexHeader*>(bytes_.data());
  }
  template <typename T>
  const T& At(const abi::TableRef& table, uint64_t number) const {
    return reinterpret_cast<const T*>(bytes_.data() + table.offset)[number];
  }
  absl::StatusOr<std::string_view> Text(const abi::StringRef& ref) const;
  absl::StatusOr<std::span<const int64_t>> Dims(uint32_t first, uint16_t rank) const;
  absl::StatusOr<Pair> PairOf(const abi::StringRef& first, const abi::StringRef& second) const;
  absl::Status Broken(std::string_view what, uint64_t number) const;

  ReadOnlyMapping mapping_;
  std::span<const std::byte> bytes_;
};

}  // namespace modelhost
