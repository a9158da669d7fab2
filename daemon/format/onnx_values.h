// The values of an ONNX tensor that stand in typed fields (varints), for who must have them as
// bytes.
//
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// The values of a tensor that ReadOnnx listed as not mappable, row-major and little-endian: what
// raw_data would hold. `file` are the bytes of the file that the tensor names: the range of such a
// tensor is its TensorProto. UNIMPLEMENTED for STRING.
absl::StatusOr<std::vector<std::byte>> DecodeOnnxValues(const std::string& name,
                                                        std::span<const std::byte> file,
                                                        const TensorInfo& tensor);

}  // namespace modelhost
