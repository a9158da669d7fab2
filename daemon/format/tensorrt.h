// TensorRT plans ("engines"): opaque files, of which a few header fields are known.
//
//   [u32 length, JSON]             only from some exporters (Ultralytics)
//   "ptrt" or "ftrt"               u32 safe serialization version, u32 serialization version,
//   u64 payload bytes, u32         in this order since version 0x57; before, u32 and then u64
//   payload                        to the end of the file
//
// NVIDIA documents none of this, and newer generations differ: an unknown header is a warning, not
// an error. What a plan is bound to (TensorRT, GPU, platform) is not in it; see requires.h. One
// changed byte of the payload is not seen either: that is what the version's digests are for.
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
// INVALID_ARGUMENT when the file is cut, has bytes too many, or is something else.
absl::Status ReadTensorRt(const std::string& name, std::span<const std::byte> bytes,
                          TensorIndex& index);

}  // namespace modelhost
