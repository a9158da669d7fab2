#include "daemon/format/tensorrt.h"

#include "daemon/format/sniff.h"

namespace modelhost {

absl::Status ReadTensorRt(const std::string& name, std::span<const std::byte> bytes, TensorIndex&) {
  return RefuseFormat(name, FileFormat::kTensorRt, bytes);
}

}  // namespace modelhost
