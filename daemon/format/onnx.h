// ONNX models: the wire format is walked over the mapped bytes, nothing is copied or built.
//
// Errors as ReadModel. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// Fills an index that has `name` as its file 0; files of external data follow. A tensor whose
// values stand in typed fields is not mappable, and its range is its TensorProto (onnx_values.h).
absl::Status ReadOnnx(const std::string& name, std::span<const std::byte> bytes, FileSource& source,
                      TensorIndex& index);

// The files that the tensors of a model name as theirs, each once; those before the damage of a
// model that is damaged.
std::vector<std::string> OnnxDataFilesOf(const std::string& name, std::span<const std::byte> bytes);

}  // namespace modelhost
