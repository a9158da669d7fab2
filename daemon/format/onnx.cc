#include "daemon/format/onnx.h"

#include "daemon/format/sniff.h"

namespace modelhost {

absl::Status ReadOnnx(const std::string& name, std::span<const std::byte> bytes, FileSource&,
                      TensorIndex&) {
  return RefuseFormat(name, FileFormat::kOnnx, bytes);
}

}  // namespace modelhost
