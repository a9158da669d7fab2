// What parses must come back the same from its own text, and name nothing that is not there.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "daemon/region/parked_record.h"

using modelhost::ParkedDevice;
using modelhost::ParkedRegion;
using modelhost::ParkedSegment;
using modelhost::ParkedVersion;
using modelhost::ParseParkedRecord;
using modelhost::SerializeParkedRecord;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto record =
      ParseParkedRecord(absl::string_view(reinterpret_cast<const char*>(data), size));
  if (!record.ok()) return 0;
  for (const ParkedVersion& version : record->versions) {
    for (const std::string& name : version.regions) {
      const auto named = [&name](const ParkedRegion& region) { return region.memory.name == name; };
      if (!std::ranges::any_of(record->regions, named)) std::abort();
    }
    if (!version.index.has_value()) continue;
    for (const uint32_t region : version.index->eager) {
      if (region >= version.contents.size()) std::abort();
    }
  }
  std::set<std::string> names;
  for (const ParkedDevice& device : record->devices) {
    if (device.gpu.empty() || device.segments.empty()) std::abort();
    for (const ParkedSegment& segment : device.segments) {
      if (segment.bytes == 0 || !names.insert(segment.name).second) std::abort();
    }
  }
  const std::string written = SerializeParkedRecord(*record);
  const auto again = ParseParkedRecord(written);
  if (!again.ok() || SerializeParkedRecord(*again) != written) std::abort();
  return 0;
}
