// What is, as gauges: made from a snapshot of the registry at each scrape, so that a series is
// there exactly while what it describes is, and none can drift.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"

namespace modelhost {

struct RegistryState {
  StatusSnapshot status;
  std::vector<ModelSnapshot> models;
  std::vector<Lease> leases;
  std::vector<OperationSnapshot> operations;
};

// Bytes in memory now, by version; from mincore, so not for the control thread.
using ResidentBytes = std::map<VersionKey, uint64_t>;

// Pure. `resident` has the loaded versions of `state`; one that it lacks gets no such series.
std::vector<prometheus::MetricFamily> RenderState(const RegistryState& state,
                                                  const ResidentBytes& resident);

// Thread-safe. A scrape waits a second at most for the control thread and then shows the last
// state; memory is sampled every kSampleEvery at most, on the scraping thread.
class StateCollector final : public prometheus::Collectable {
 public:
  static constexpr absl::Duration kSampleEvery = absl::Seconds(5);

  // All outlive this; see HttpEndpoint for the order at the end.
  StateCollector(const ModelManager& manager, ControlLoop& loop, Clock& clock)
      : manager_(manager), loop_(loop), clock_(clock) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  std::shared_ptr<const RegistryState> Fetch() const;
  void Sample(const RegistryState& state) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ModelManager& manager_;
  ControlLoop& loop_;
  Clock& clock_;

  mutable absl::Mutex mutex_;
  mutable std::shared_ptr<const RegistryState> last_ ABSL_GUARDED_BY(mutex_);
  mutable ResidentBytes resident_ ABSL_GUARDED_BY(mutex_);
  mutable std::optional<absl::Duration> sampled_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
