// Takes from this process whatever a parser does not need, for good.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace modelhost {

struct SandboxLimits {
  uint64_t memory_bytes = 0;  // Of address space, beside what is mapped already.
  uint64_t file_bytes = 0;    // Of the largest file written.
  uint64_t cpu_seconds = 0;   // SIGXCPU, and SIGKILL a little later.
};

// From here on the process can compute, allocate memory, write to descriptors that it has or close
// them, and end. Any other system call kills it at once (SIGSYS): it opens nothing, connects to
// nothing, starts nothing. Standard output and error lead nowhere; other descriptors stay, so close
// what it may not touch. Whoever looks for memory to free takes this process first. UNIMPLEMENTED
// in builds under a sanitizer, whose run time needs more calls.
absl::Status EnterSandbox(const SandboxLimits& limits);

// What the sandbox forbids. Returns only where there is none.
void BreakOut();

}  // namespace modelhost
