// A plan that is read from an index has every range once, in order, apart on the device.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "daemon/region/device_plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::DevicePlan;
  using modelhost::HostRange;
  // Aligned as a mapped index is.
  const std::vector<uint8_t> copy(data, data + size);
  const auto plan = modelhost::PlanOfIndex(std::as_bytes(std::span(copy)));
  if (!plan.ok()) return 0;
  uint32_t segments = 0;
  for (size_t p = 0; p < plan->parts.size(); ++p) {
    const DevicePlan::Part& part = plan->parts[p];
    if (p > 0 && plan->parts[p - 1].region >= part.region) std::abort();
    if (part.ranges.empty() || part.first_segment != segments) std::abort();
    segments += static_cast<uint32_t>(part.segment_bytes.size());
    for (size_t i = 0; i < part.ranges.size(); ++i) {
      const HostRange& range = part.ranges[i];
      const auto place = plan->Find(part.region, range);
      if (range.bytes == 0 || !plan->Has(part.region, range)) std::abort();
      if (place.has_value() != plan->segments) std::abort();
      if (!place.has_value()) continue;
      const auto& own = part.places[i];
      if (own.segment >= part.segment_bytes.size() ||
          place->segment != own.segment + part.first_segment ||
          range.bytes > part.segment_bytes[own.segment] ||
          own.offset > part.segment_bytes[own.segment] - range.bytes) {
        std::abort();
      }
      if (i == 0 || part.places[i - 1].segment != own.segment) continue;
      if (own.offset - part.places[i - 1].offset < part.ranges[i - 1].bytes) std::abort();
    }
  }
  if (segments != plan->SegmentCount()) std::abort();
  return 0;
}
