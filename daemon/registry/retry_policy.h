// When what failed is tried again by itself, as pure functions. No state, no I/O; any thread.
//
// Transient is what may be over in a moment although nobody does anything: a disk error, a lack of
// descriptors or of the kernel's memory, a network file system that is away. A missing file, a
// refused mode or bad bytes are not: those need somebody.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace modelhost {

struct RetryPolicy {
  int most = 5;  // Tries after the first; 0: none.
  absl::Duration first = absl::Seconds(1);
  absl::Duration longest = absl::Seconds(60);
  double jitter = 0.2;  // A delay is up to this part shorter or longer.
};

// `sys_errno` is that of the status, 0 without one.
bool IsTransient(const absl::Status& status, int sys_errno);

// Before try number `attempt` after the first, from 1: first, twice that, ... at most `longest`,
// with jitter. `random` is in [0, 1).
absl::Duration RetryDelay(const RetryPolicy& policy, int attempt, double random);

}  // namespace modelhost
