#include "client/modelctl/tensor_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/onnx_values.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"
#include "proto/handle/mapping.h"

namespace modelhost::modelctl {
namespace {

// Of fewer bytes the system call would cost more than the pages.
constexpr size_t kDropBytes = 1 << 20;

template <size_t kBytes>
void GatherRow(const std::byte* from, int64_t stride, uint64_t count, std::byte* to) {
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * kBytes, from + i * static_cast<uint64_t>(stride) * kBytes, kBytes);
  }
}

void GatherRow(size_t unit, const std::byte* from, int64_t stride, uint64_t count, std::byte* to) {
  switch (unit) {
    case 1:
      return GatherRow<1>(from, stride, count, to);
    case 2:
      return GatherRow<2>(from, stride, count, to);
    case 4:
      return GatherRow<4>(from, stride, count, to);
    case 8:
      return GatherRow<8>(from, stride, count, to);
    default:
      return GatherRow<16>(from, stride, count, to);
  }
}

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
                                                FileSource& files) {
  const TensorInfo info = index.at(tensor);
  const std::string what = TensorText(index, info);
  const std::string& file = index.files()[info.file];
  absl::StatusOr<std::span<const std::byte>> all = files.Open(file);
  if (!all.ok()) return all.status();
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
  if (!info.mappable) {
    if (index.format() != "onnx") {
      return absl::UnimplementedError(
          absl::StrCat(what, " cannot be read as values: ", AsAbsl(info.reason)));
    }
    absl::StatusOr<std::vector<std::byte>> values = DecodeOnnxValues(file, *all, info);
    if (!values.ok()) return values.status();
    reader.decoded_ = *std::move(values);
    reader.bytes_ = reader.decoded_;
  } else {
    if (info.offset > all->size() || info.nbytes > all->size() - info.offset) {
      return absl::InvalidArgumentError(absl::StrCat(what, " lies outside the file"));
    }
    reader.bytes_ = all->subspan(info.offset, info.nbytes);
  }
  if (!info.strides.empty()) {
    reader.shape_ = info.shape;
    reader.strides_ = info.strides;
    if (absl::Status status = reader.CheckStrides(what, info); !status.ok()) return status;
  } else if (reader.bytes_.size() != *bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", reader.bytes_.size(), " bytes where its shape needs ", *bytes));
  }
  return reader;
}

absl::Status TensorReader::CheckStrides(const std::string& what, const TensorInfo& tensor) {
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
  if (!fits || last >= bytes_.size() / unit_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is a view that leaves its range"));
  }
  return absl::OkStatus();
}

std::span<const std::byte> TensorReader::Read(uint64_t first, uint64_t count) {
  if (strides_.empty()) return bytes_.subspan(first * unit_bytes_, count * unit_bytes_);
  gathered_.resize(count * unit_bytes_);
  // Where `first` is in the view, then on from there as an odometer counts.
  std::vector<uint64_t> at(shape_.size());
  uint64_t rest = first;
  for (size_t i = shape_.size(); i-- > 0;) {
    at[i] = rest % static_cast<uint64_t>(shape_[i]);
    rest /= static_cast<uint64_t>(shape_[i]);
  }
  const size_t row = shape_.size() - 1;  // A view of rank 0 has no strides.
  for (uint64_t done = 0; done < count;) {
    uint64_t unit = 0;
    for (size_t i = 0; i < at.size(); ++i) unit += at[i] * static_cast<uint64_t>(strides_[i]);
    const uint64_t run = std::min(count - done, static_cast<uint64_t>(shape_[row]) - at[row]);
    GatherRow(unit_bytes_, bytes_.data() + unit * unit_bytes_, strides_[row], run,
              gathered_.data() + done * unit_bytes_);
    done += run;
    at[row] += run;
    for (size_t i = row; i > 0 && at[i] == static_cast<uint64_t>(shape_[i]); --i) {
      at[i] = 0;
      ++at[i - 1];
    }
  }
  return gathered_;
}

void TensorReader::Drop(uint64_t end) {
  if (!decoded_.empty()) return;
  if (!strides_.empty()) {
    if (end == units_ && bytes_.size() >= kDropBytes) DropResident(bytes_);
    return;
  }
  const uint64_t bytes = (end - dropped_) * unit_bytes_;
  if (bytes < kDropBytes) return;
  DropResident(bytes_.subspan(dropped_ * unit_bytes_, bytes));
  dropped_ = end;
}

}  // namespace modelhost::modelctl
