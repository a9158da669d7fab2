// Whatever checksums.sha256 says, it names plain paths only.
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "daemon/store/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  if (auto sums = modelhost::ParseChecksums(text); sums.ok()) {
    for (const auto& [path, digest] : *sums) {
      if (!modelhost::CheckVersionPath(path).ok()) std::abort();
    }
  }
  if (auto number = modelhost::ParseVersionNumber(text);
      number.ok() && std::to_string(*number) != std::string(text)) {
    std::abort();
  }
  return 0;
}
