// ONNX models: the wire format is walked over the mapped bytes, nothing is copied or built.
//
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// Fills an index that has `name` as its file 0; files of external data follow.
absl::Status ReadOnnx(const std::string& name, std::span<const std::byte> bytes, FileSource& source,
                      TensorIndex& index);

}  // namespace modelhost
