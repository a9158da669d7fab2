#include "daemon/platform/clock.h"

#include <ctime>

#include "absl/time/clock.h"

namespace modelhost {

absl::Duration SystemClock::Monotonic() const {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

absl::Time SystemClock::Wall() const { return absl::Now(); }

}  // namespace modelhost
