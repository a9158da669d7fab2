#include "client/modelctl/tensor_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/modelctl/strided_gather.h"
#include "daemon/format/onnx_values.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {
namespace {

std::string TensorText(const TensorIndex& index, const TensorInfo& tensor) {
  return absl::StrCat(Printable(index.files()[tensor.file]), ": tensor ", Quoted(tensor.name));
}

}  // namespace

std::optional<uint64_t> ElementCount(std::span<const int64_t> shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  uint64_t elements = 1;
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(elements, static_cast<uint64_t>(dim), &elements)) {
      return std::nullopt;
    }
  }
  return elements;
}

std::optional<uint64_t> ByteCount(abi::DType dtype, std::span<const int64_t> shape) {
  const abi::DTypeInfo* info = abi::FindDType(dtype);
  const std::optional<uint64_t> elements = ElementCount(shape);
  if (info == nullptr || !elements.has_value()) return std::nullopt;
  uint64_t bytes = 0;
  if (info->block_bytes != 0) {
    const uint64_t row = shape.empty() ? 1 : static_cast<uint64_t>(shape.back());
    if (row % info->block_elements != 0 ||
        __builtin_mul_overflow(*elements / info->block_elements, info->block_bytes, &bytes)) {
      return std::nullopt;
    }
    return bytes;
  }
  uint64_t bits = 0;
  if (info->bits == 0 || __builtin_mul_overflow(*elements, info->bits, &bits)) return std::nullopt;
  return bits / 8 + (bits % 8 != 0 ? 1 : 0);
}

absl::StatusOr<TensorReader> TensorReader::Open(const TensorIndex& index, size_t tensor,
                                                RangeSource& files, uint64_t tile_bytes) {
  const TensorInfo info = index.at(tensor);
  const std::string what = TensorText(index, info);
  const std::string& file = index.files()[info.file];
  const absl::StatusOr<uint64_t> file_bytes = files.SizeOf(file);
  if (!file_bytes.ok()) return file_bytes.status();
  const std::optional<uint64_t> bytes = ByteCount(info.dtype, info.shape);
  if (!bytes.has_value()) {
    return absl::UnimplementedError(absl::StrCat(what, " is ", AsAbsl(abi::DTypeName(info.dtype)),
                                                 ", which has no bytes here"));
  }
  TensorReader reader;
  if (const abi::DTypeInfo* dtype = abi::FindDType(info.dtype); dtype->bits >= 8) {
    reader.unit_bytes_ = dtype->bits / 8;
  }
  reader.units_ = *bytes / reader.unit_bytes_;
  if (*bytes == 0) return reader;
  if (info.offset > *file_bytes || info.nbytes > *file_bytes - info.offset) {
    return absl::InvalidArgumentError(absl::StrCat(what, " lies outside the file"));
  }
  reader.files_ = &files;
  reader.file_ = file;
  reader.offset_ = info.offset;
  reader.tile_bytes_ = tile_bytes;
  uint64_t there = info.nbytes;
  if (!info.mappable) {
    if (index.format() != "onnx") {
      return absl::UnimplementedError(
          absl::StrCat(what, " cannot be read as values: ", AsAbsl(info.reason)));
    }
    std::vector<std::byte> field(info.nbytes);
    if (absl::Status status = files.ReadAt(file, info.offset, field); !status.ok()) return status;
    TensorInfo alone = info;
    alone.offset = 0;
    absl::StatusOr<std::vector<std::byte>> values = DecodeOnnxValues(file, field, alone);
    if (!values.ok()) return values.status();
    reader.bytes_ = *std::move(values);
    reader.decoded_ = true;
    there = reader.bytes_.size();
  }
  if (!info.strides.empty()) {
    if (reader.decoded_) {
      return absl::UnimplementedError(absl::StrCat(what, " is a view of typed values"));
    }
    reader.shape_ = info.shape;
    reader.strides_ = info.strides;
    if (absl::Status status = reader.CheckStrides(what, info); !status.ok()) return status;
  } else if (there != *bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", there, " bytes where its shape needs ", *bytes));
  }
  return reader;
}

absl::Status TensorReader::CheckStrides(const std::string& what, const TensorInfo& tensor) const {
  const abi::DTypeInfo* dtype = abi::FindDType(tensor.dtype);
  if (dtype->bits < 8) {
    return absl::UnimplementedError(
        absl::StrCat(what, " is a strided view of ", AsAbsl(dtype->name)));
  }
  uint64_t last = 0;  // The unit that lies furthest.
  bool fits = tensor.strides.size() == tensor.shape.size();
  for (size_t i = 0; fits && i < tensor.shape.size(); ++i) {
    uint64_t reach = 0;
    fits = tensor.strides[i] >= 0 &&
           !__builtin_mul_overflow(static_cast<uint64_t>(tensor.shape[i]) - 1,
                                   static_cast<uint64_t>(tensor.strides[i]), &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  if (!fits || last >= tensor.nbytes / unit_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is a view that leaves its range"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> TensorReader::Read(uint64_t first, uint64_t count) {
  const std::span<const std::byte> all(bytes_);
  if (decoded_) return all.subspan(first * unit_bytes_, count * unit_bytes_);
  if (strides_.empty()) {
    bytes_.resize(count * unit_bytes_);
    const absl::Status status = count == 0
                                    ? absl::OkStatus()
                                    : files_->ReadAt(file_, offset_ + first * unit_bytes_, bytes_);
    if (!status.ok()) return status;
    return std::span<const std::byte>(bytes_);
  }
  if (first < tile_first_ || first + count > tile_first_ + tile_count_) {
    tile_first_ = first;
    tile_count_ = std::min(units_ - first, std::max(count, tile_bytes_ / unit_bytes_));
    bytes_.resize(tile_count_ * unit_bytes_);
    const StridedView view = {file_, offset_, unit_bytes_, shape_, strides_};
    if (absl::Status status = GatherStrided(*files_, view, tile_first_, bytes_); !status.ok()) {
      tile_count_ = 0;
      return status;
    }
  }
  return std::span<const std::byte>(bytes_).subspan((first - tile_first_) * unit_bytes_,
                                                    count * unit_bytes_);
}

}  // namespace modelhost::modelctl
