// The values of one tensor of a model file in row-major order, piece by piece, whatever way they
// are stored: as one range, as a strided view, or in ONNX's typed fields.
//
// Memory: a contiguous tensor is lent from the file, a strided one takes the size of a piece, typed
// fields take the size of the tensor. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/tensor_index.h"

namespace modelhost::modelctl {

// Elements of a shape: 0 when a dimension is 0, nothing when 64 bits cannot count them.
std::optional<uint64_t> ElementCount(std::span<const int64_t> shape);
// Bytes of `shape` in `dtype`, row-major. Nothing when 64 bits cannot count them, for STRING, and
// for rows that a block type does not divide.
std::optional<uint64_t> ByteCount(abi::DType dtype, std::span<const int64_t> shape);

class TensorReader {
 public:
  // `index` and what `files` gives are lent for the life of the reader.
  //   UNIMPLEMENTED     the values cannot be read as they are; the text names the tensor and why
  //   INVALID_ARGUMENT  the index has a tensor that its file cannot hold
  static absl::StatusOr<TensorReader> Open(const TensorIndex& index, size_t tensor,
                                           FileSource& files);

  // A unit is an element, or a byte of a type whose elements are no whole bytes.
  uint64_t units() const { return units_; }
  size_t unit_bytes() const { return unit_bytes_; }

  // Units [first, first + count), which must exist; good until the next call.
  std::span<const std::byte> Read(uint64_t first, uint64_t count);
  // Units before `end` are not needed again: their pages need not stay in this process.
  void Drop(uint64_t end);

 private:
  TensorReader() = default;
  absl::Status CheckStrides(const std::string& what, const TensorInfo& tensor);

  std::span<const std::byte> bytes_;  // The range in the file, or all of decoded_.
  std::vector<std::byte> decoded_;
  std::vector<std::byte> gathered_;
  std::span<const int64_t> shape_;
  std::span<const int64_t> strides_;  // Empty: contiguous.
  size_t unit_bytes_ = 1;
  uint64_t units_ = 0;
  uint64_t dropped_ = 0;
};

}  // namespace modelhost::modelctl
