// What a reader found in the files of one model: tensors, their bytes' places, metadata.
//
// Names, shapes and strings are kept in shared arrays, so 100,000 tensors take memory in proportion
// to their header. Built once by a reader, then immutable; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/abi/dtype.h"

namespace modelhost {

// A borrowed view of one entry; valid while the index lives.
struct TensorInfo {
  std::string_view name;
  abi::DType dtype = abi::DType::kInvalid;
  // Outermost dimension first. A dimension of 2^63 or more can only stand beside a 0 in a
  // safetensors file; it is kept as its 64 bits.
  std::span<const int64_t> shape;
  std::span<const int64_t> strides;  // In elements; empty = row-major.
  uint32_t file = 0;                 // Number in files().
  uint64_t offset = 0;               // Absolute in the file.
  uint64_t nbytes = 0;               // Of the range; for a strided view the range that covers it.
  bool mappable = true;              // The range holds the values as they are.
  std::string_view reason;           // Why not; empty when mappable.
};

struct MetadataItem {
  std::string key;
  std::string value;  // UTF-8; numbers and arrays as JSON.
};

class TensorIndex {
 public:
  // `format` is "safetensors", "gguf", "onnx", "torch" or "tensorrt".
  explicit TensorIndex(std::string format) : format_(std::move(format)) {}

  const std::string& format() const { return format_; }
  // Names as given to the reader, relative to the folder of the model; [0] is the file asked for.
  const std::vector<std::string>& files() const { return files_; }
  size_t size() const { return tensors_.size(); }
  TensorInfo at(size_t i) const;
  const std::vector<MetadataItem>& metadata() const { return metadata_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

  // For readers.
  void SetFormat(std::string format) { format_ = std::move(format); }
  uint32_t AddFile(std::string name);
  void Reserve(size_t tensors, size_t name_bytes, size_t dims);
  void Add(const TensorInfo& tensor);
  // Adds `by` to the offsets of tensors `first` and later.
  void ShiftOffsets(size_t first, uint64_t by);
  void AddMetadata(std::string key, std::string value);
  void AddWarning(std::string text);

 private:
  struct Entry {
    uint64_t name_at, offset, nbytes;
    uint64_t shape_at;
    uint32_t name_size;
    uint32_t rank;
    uint32_t file;
    abi::DType dtype;
    bool mappable;
    bool strided;     // rank numbers after the shape are strides.
    uint32_t reason;  // 1 + number in reasons_, 0 = none.
  };

  std::string format_;
  std::vector<std::string> files_;
  std::vector<Entry> tensors_;
  std::string names_;
  std::vector<int64_t> dims_;
  std::vector<std::string> reasons_;
  std::vector<MetadataItem> metadata_;
  std::vector<std::string> warnings_;
};

}  // namespace modelhost
