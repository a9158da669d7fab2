// Time, behind an interface so that tests move it by hand (tests/fakes/manual_clock.h).
#pragma once

#include "absl/time/time.h"

namespace modelhost {

class Clock {
 public:
  virtual ~Clock() = default;
  // For durations and deadlines: never jumps.
  virtual absl::Duration Monotonic() const = 0;
  // For people and records: may jump.
  virtual absl::Time Wall() const = 0;
};

class SystemClock final : public Clock {
 public:
  absl::Duration Monotonic() const override;
  absl::Time Wall() const override;
};

}  // namespace modelhost
