// Takes from this process whatever a parser does not need, for good.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace modelhost {

struct SandboxLimits {
  uint64_t memory_bytes = 0;  // Private memory (heap, not mapped files), and of each file written.
  uint64_t cpu_seconds = 0;
};

// From here on the process can compute, allocate memory, write to descriptors that it has or close
// them, and end. Any other system call kills it at once (SIGSYS): it opens nothing, connects to
// nothing, starts nothing. Descriptors that it has stay; close what it may not touch. UNIMPLEMENTED
// in builds under a sanitizer, whose run time needs more.
absl::Status EnterSandbox(const SandboxLimits& limits);

}  // namespace modelhost
