// A clock that stands still until a test moves it. Thread-safe.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/clock.h"

namespace modelhost {

class ManualClock final : public Clock {
 public:
  explicit ManualClock(absl::Time wall = absl::FromUnixSeconds(1'767'225'600)) : wall_(wall) {}

  absl::Duration Monotonic() const override {
    absl::MutexLock lock(&mutex_);
    return monotonic_;
  }
  absl::Time Wall() const override {
    absl::MutexLock lock(&mutex_);
    return wall_;
  }

  void Advance(absl::Duration by) {
    absl::MutexLock lock(&mutex_);
    monotonic_ += by;
    wall_ += by;
  }
  // As when somebody sets the machine's clock.
  void JumpWall(absl::Time to) {
    absl::MutexLock lock(&mutex_);
    wall_ = to;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Duration monotonic_ ABSL_GUARDED_BY(mutex_) = absl::Seconds(1000);
  absl::Time wall_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
