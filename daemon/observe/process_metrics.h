// The standard process_* metrics of this process, read from /proc/self at each scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace modelhost {

struct ProcessStat {
  double cpu_seconds = 0;
  double resident_bytes = 0;
  double virtual_bytes = 0;
  double threads = 0;
  double started_after_boot_seconds = 0;
};

// The text of /proc/<pid>/stat; nullopt for anything else.
std::optional<ProcessStat> ParseProcessStat(absl::string_view text, double ticks_per_second,
                                            double page_bytes);

// Thread-safe: no state. What cannot be read is left out.
class ProcessCollector final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace modelhost
