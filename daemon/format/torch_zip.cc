#include "daemon/format/torch_zip.h"

#include "daemon/format/sniff.h"

namespace modelhost {

absl::Status ReadTorchZip(const std::string& name, std::span<const std::byte> bytes, uint32_t,
                          TensorIndex&) {
  return RefuseFormat(name, FileFormat::kTorchZip, bytes);
}

}  // namespace modelhost
