// Look-ups in the index of a version (proto/abi/version_index.h), in place.
//
// The bytes are sealed but not trusted: the header is checked once, every number that is followed
// from an entry when it is followed. A broken index makes a look-up kBroken, never a crash and
// never a pointer outside the bytes. Shapes are in elements, outermost first; sizes in bytes.
// Success allocates nothing. Immutable: any thread, while the bytes are mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "proto/abi/version_index.h"
#include "proto/handle/error.h"

namespace modelhost {

enum class Find : uint8_t { kFound, kMissing, kAmbiguous, kBroken };

// Strings are followed by a NUL. All pointers point into the index.
struct IndexTensor {
  std::string_view name;
  std::string_view component;
  std::string_view file;
  std::string_view reason;
  const int64_t* shape = nullptr;    // `entry->rank` numbers, none negative.
  const int64_t* strides = nullptr;  // Null: row-major.
  const abi::TensorEntry* entry = nullptr;
};

struct IndexFile {
  std::string_view path;
  std::string_view role;
  const abi::FileEntry* entry = nullptr;
};

class IndexReader {
 public:
  // `bytes` begin at a multiple of 8 and outlive the reader. DATA_LOSS.
  static Result<IndexReader> Open(std::span<const std::byte> bytes);

  IndexReader() = default;  // Of an empty index.

  const abi::IndexHeader& header() const { return *header_; }
  std::string_view format() const;
  size_t tensor_count() const { return tensors_.size(); }
  size_t file_count() const { return files_.size(); }
  size_t component_count() const { return components_.size(); }
  size_t metadata_count() const { return metadata_.size(); }
  std::span<const abi::RegionEntry> regions() const { return regions_; }
  std::span<const abi::DeviceSegmentEntry> device_segments() const { return segments_; }

  // By bare name, else by "component/name". kFound sets `number`, kAmbiguous the first of several.
  Find FindTensor(std::string_view name, size_t* number) const;
  // False: out of range, or broken. What is mappable lies inside its region, and so does every
  // element that its shape and strides reach; what is on a device is mappable and lies inside its
  // segment, if it has one.
  bool Tensor(size_t number, IndexTensor* tensor) const;

  Find FindFile(std::string_view path, size_t* number) const;
  bool File(size_t number, IndexFile* file) const;

  Find FindMetadata(std::string_view key, size_t* number) const;
  bool Metadata(size_t number, std::string_view* key, std::string_view* value) const;
  bool Component(size_t number, std::string_view* name, std::string_view* format) const;

  // Why FindTensor or FindFile did not find it, with near names, for people.
  std::string ExplainTensor(std::string_view name, Find find) const;
  std::string ExplainFile(std::string_view path, Find find) const;

 private:
  bool Text(const abi::StringRef& ref, std::string_view* text) const;
  Find FindBare(std::string_view name, const std::string_view* component, size_t* number) const;
  bool DeviceFits(const abi::TensorEntry& entry) const;
  bool NameOf(size_t number, std::string_view* name) const;
  size_t LowerBound(std::string_view name) const;
  size_t PlaceOfFile(std::string_view path) const;

  const abi::IndexHeader* header_ = nullptr;
  std::span<const abi::TensorEntry> tensors_;
  std::span<const abi::Bucket> buckets_;
  std::span<const int64_t> dims_;
  std::span<const abi::FileEntry> files_;
  std::span<const abi::RegionEntry> regions_;
  std::span<const abi::DeviceSegmentEntry> segments_;
  std::span<const abi::ComponentEntry> components_;
  std::span<const abi::MetadataEntry> metadata_;
  std::string_view strings_;
};

}  // namespace modelhost
