#include "daemon/format/tensor_index.h"

#include <utility>

namespace modelhost {

TensorInfo TensorIndex::at(size_t i) const {
  const Entry& entry = tensors_[i];
  const std::span<const int64_t> dims(dims_);
  TensorInfo tensor;
  tensor.name = std::string_view(names_).substr(entry.name_at, entry.name_size);
  tensor.dtype = entry.dtype;
  tensor.shape = dims.subspan(entry.shape_at, entry.rank);
  if (entry.strided) tensor.strides = dims.subspan(entry.shape_at + entry.rank, entry.rank);
  tensor.file = entry.file;
  tensor.offset = entry.offset;
  tensor.nbytes = entry.nbytes;
  tensor.mappable = entry.mappable;
  if (entry.reason != 0) tensor.reason = reasons_[entry.reason - 1];
  return tensor;
}

uint32_t TensorIndex::AddFile(std::string name) {
  files_.push_back(std::move(name));
  return static_cast<uint32_t>(files_.size() - 1);
}

void TensorIndex::Reserve(size_t tensors, size_t name_bytes, size_t dims) {
  tensors_.reserve(tensors_.size() + tensors);
  names_.reserve(names_.size() + name_bytes);
  dims_.reserve(dims_.size() + dims);
}

void TensorIndex::Add(const TensorInfo& tensor) {
  Entry entry{};
  entry.name_at = names_.size();
  entry.name_size = static_cast<uint32_t>(tensor.name.size());
  entry.shape_at = dims_.size();
  entry.rank = static_cast<uint32_t>(tensor.shape.size());
  entry.file = tensor.file;
  entry.offset = tensor.offset;
  entry.nbytes = tensor.nbytes;
  entry.dtype = tensor.dtype;
  entry.mappable = tensor.mappable;
  // Strides of another length than the shape would be a bug of the reader; they are not kept.
  entry.strided = !tensor.strides.empty() && tensor.strides.size() == tensor.shape.size();
  if (!tensor.reason.empty()) {
    // Readers give the same few reasons over and over: one of the last is usually right.
    constexpr size_t kLast = 8;
    size_t number = reasons_.size();
    const size_t end = number > kLast ? number - kLast : 0;
    while (number > end && reasons_[number - 1] != tensor.reason) --number;
    if (number == end) {
      reasons_.emplace_back(tensor.reason);
      number = reasons_.size();
    }
    entry.reason = static_cast<uint32_t>(number);
  }
  names_.append(tensor.name);
  dims_.insert(dims_.end(), tensor.shape.begin(), tensor.shape.end());
  if (entry.strided) dims_.insert(dims_.end(), tensor.strides.begin(), tensor.strides.end());
  tensors_.push_back(entry);
}

void TensorIndex::ShiftOffsets(size_t first, uint64_t by) {
  for (size_t i = first; i < tensors_.size(); ++i) tensors_[i].offset += by;
}

void TensorIndex::AddMetadata(std::string key, std::string value) {
  metadata_.push_back({std::move(key), std::move(value)});
}

void TensorIndex::AddWarning(std::string text) { warnings_.push_back(std::move(text)); }

}  // namespace modelhost
