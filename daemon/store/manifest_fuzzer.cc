// What parses must come back the same from its own text.
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "daemon/store/computed_manifest.h"
#include "daemon/store/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  if (auto manifest = modelhost::ParseManifest(text); manifest.ok()) {
    const std::string written = modelhost::SerializeManifest(*manifest);
    auto again = modelhost::ParseManifest(written);
    if (!again.ok() || modelhost::SerializeManifest(*again) != written) std::abort();
  }
  if (auto computed = modelhost::ParseComputedManifest(text); computed.ok()) {
    const std::string written = modelhost::SerializeComputedManifest(*computed);
    auto again = modelhost::ParseComputedManifest(written);
    if (!again.ok() || modelhost::SerializeComputedManifest(*again) != written) std::abort();
  }
  return 0;
}
