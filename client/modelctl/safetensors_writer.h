// The beginning of a safetensors file: all but the data.
//
// Tensors are laid out in the order given, without holes; the header is padded with spaces so that
// the data starts at a multiple of 8. Pure; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/tensor_index.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

// One tensor of the file to write.
struct OutputTensor {
  std::string_view name;
  abi::DType dtype = abi::DType::kInvalid;
  std::span<const int64_t> shape;
  uint64_t nbytes = 0;
};

// Empty when a safetensors file can hold such a tensor; else why not.
std::string WhyNotInSafetensors(std::string_view name, abi::DType dtype,
                                std::span<const int64_t> shape);

// Length, header, padding. Every tensor has passed WhyNotInSafetensors; names are UTF-8 and unique.
// Of two items of one key the first counts. OUT_OF_RANGE when the header is more than the
// 100,000,000 bytes that readers accept.
absl::StatusOr<std::string> SafetensorsHead(const std::vector<OutputTensor>& tensors,
                                            const std::vector<MetadataItem>& metadata);

}  // namespace modelhost::modelctl
