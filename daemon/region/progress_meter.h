// Tells a load's progress: at every change of phase, and at most ten times a second between.
// Thread-safe.
#pragma once

#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"

namespace modelhost {

struct LoadProgress {
  std::string phase;
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
};

class ProgressMeter {
 public:
  // `tell` may be empty. It is called with a lock held, so that its calls are in order: it must not
  // wait for the load.
  ProgressMeter(Clock& clock, std::function<void(const LoadProgress&)> tell)
      : clock_(clock), tell_(std::move(tell)) {}

  void Begin(const std::string& phase, uint64_t bytes_total);
  void Add(uint64_t bytes);
  void SetDone(uint64_t bytes_done);

 private:
  void TellIfDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Clock& clock_;
  const std::function<void(const LoadProgress&)> tell_;
  absl::Mutex mutex_;
  LoadProgress progress_ ABSL_GUARDED_BY(mutex_);
  absl::Duration told_at_ ABSL_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
};

}  // namespace modelhost
