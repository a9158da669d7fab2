// PyTorch checkpoints in a ZIP archive (torch.save since 1.6): an index, and never a call.
//
// A tensor's name is its path through dicts and lists, joined by dots; values that are no tensors
// are skipped. Views keep their strides and have the range that covers them. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// Fills an index; the tensors lie in `file` of it, which `bytes` are.
absl::Status ReadTorchZip(const std::string& name, std::span<const std::byte> bytes, uint32_t file,
                          TensorIndex& index);

}  // namespace modelhost
