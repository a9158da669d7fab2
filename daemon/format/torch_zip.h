// PyTorch checkpoints in a ZIP archive (torch.save since 1.6): an index, and never a call.
//
// Thread-safe: no state.
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
