// What parses must come back the same from its own text.
#include <cstdint>
#include <cstdlib>

#include "absl/strings/string_view.h"
#include "daemon/store/labels_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto labels =
      modelhost::ParseLabels(absl::string_view(reinterpret_cast<const char*>(data), size));
  if (!labels.ok()) return 0;
  const std::string written = modelhost::SerializeLabels(*labels);
  auto again = modelhost::ParseLabels(written);
  if (!again.ok() || modelhost::SerializeLabels(*again) != written) std::abort();
  return 0;
}
