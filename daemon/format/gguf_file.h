// One GGUF file, read front to back. The parts of a set are put together in gguf.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/format/gguf.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

struct GgufFileWants {
  TensorIndex* tensors = nullptr;   // Gets the tensors, as those of file number `file`.
  TensorIndex* metadata = nullptr;  // Gets the metadata as text.
  uint32_t file = 0;
};

// Reads as far as it must for what is wanted.
absl::Status ReadGgufFile(std::string_view name, std::span<const std::byte> bytes,
                          const GgufFileWants& wants, GgufSplit* split);

}  // namespace modelhost
