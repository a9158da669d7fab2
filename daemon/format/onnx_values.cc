#include "daemon/format/onnx_values.h"

#include "daemon/format/text.h"

namespace modelhost {

absl::StatusOr<std::vector<std::byte>> DecodeOnnxValues(const std::string& name,
                                                        std::span<const std::byte>,
                                                        const TensorInfo&) {
  return ModelError(name, "typed fields", "");
}

}  // namespace modelhost
