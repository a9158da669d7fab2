// What parses must come back the same from its own lines, and lie within the limits.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/store/desired_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto wanted = modelhost::ParseDesired(
      absl::string_view(reinterpret_cast<const char*>(data), size), "desired");
  if (!wanted.ok()) return 0;
  if (wanted->size() > modelhost::kMostDesiredLines) std::abort();
  std::string written;
  for (const auto& [name, version] : *wanted) {
    absl::StrAppend(&written, name.first, ".", name.second, " = ", version.version, "\n");
  }
  auto again = modelhost::ParseDesired(written, "desired");
  if (!again.ok() || again->size() != wanted->size()) std::abort();
  for (const auto& [name, version] : *wanted) {
    if (version.version == 0 || (*again)[name].version != version.version) std::abort();
  }
  return 0;
}
