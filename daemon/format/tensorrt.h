// TensorRT plans: opaque files, of which a few header fields are known.
//
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// Fills an index that has `name` as its file 0: no tensors, the header's fields as metadata.
absl::Status ReadTensorRt(const std::string& name, std::span<const std::byte> bytes,
                          TensorIndex& index);

}  // namespace modelhost
