// The values of one tensor of a model file in row-major order, piece by piece, whatever way they
// are stored: as one range, as a strided view, or in ONNX's typed fields.
//
// Memory: of a contiguous tensor the piece, of a strided one the piece and a tile of 16 MiB, of
// typed fields the field and the tensor. The file is read, not mapped. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/modelctl/range_source.h"
#include "daemon/format/tensor_index.h"

namespace modelhost::modelctl {

// Elements of a shape: 0 when a dimension is 0, nothing when 64 bits cannot count them.
std::optional<uint64_t> ElementCount(std::span<const int64_t> shape);
// Bytes of `shape` in `dtype`, row-major. Nothing when 64 bits cannot count them, for STRING, and
// for rows that a block type does not divide.
std::optional<uint64_t> ByteCount(abi::DType dtype, std::span<const int64_t> shape);

class TensorReader {
 public:
  // A strided view is collected so many bytes at a time: the more, the longer the runs that one
  // call of the system reads of a transposed tensor.
  static constexpr uint64_t kTileBytes = 16 << 20;

  // `index` and `files` are lent for the life of the reader.
  //   UNIMPLEMENTED     the values cannot be read as they are; the text names the tensor and why
  //   INVALID_ARGUMENT  the index has a tensor that its file cannot hold
  static absl::StatusOr<TensorReader> Open(const TensorIndex& index, size_t tensor,
                                           RangeSource& files, uint64_t tile_bytes = kTileBytes);

  // A unit is an element, or a byte of a type whose elements are no whole bytes.
  uint64_t units() const { return units_; }
  size_t unit_bytes() const { return unit_bytes_; }

  // Units [first, first + count), which must exist; good until the next call. Errors are those of
  // RangeSource::ReadAt.
  absl::StatusOr<std::span<const std::byte>> Read(uint64_t first, uint64_t count);

 private:
  TensorReader() = default;
  absl::Status CheckStrides(const std::string& what, const TensorInfo& tensor) const;

  RangeSource* files_ = nullptr;
  std::string file_;
  uint64_t offset_ = 0;  // Of the range in the file.
  bool decoded_ = false;
  std::vector<std::byte> bytes_;  // The piece or the tile; of typed fields all.
  std::span<const int64_t> shape_;
  std::span<const int64_t> strides_;  // Empty: contiguous.
  size_t unit_bytes_ = 1;
  uint64_t units_ = 0;
  uint64_t tile_bytes_ = 0;
  uint64_t tile_first_ = 0;  // Of a strided view: what bytes_ has.
  uint64_t tile_count_ = 0;
};

}  // namespace modelhost::modelctl
