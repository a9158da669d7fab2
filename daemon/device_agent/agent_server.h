// The device agent: a process of its own in which every CUDA call of the daemon happens.
//
// It serves one daemon over one socket, one request at a time, until that end is closed. With
// vmm_fd it holds nothing between requests but a context and the ring, and those only for
// kKeepContext: a segment's descriptor is the daemon's. With cuda_ipc it holds the segments and
// the context that they are in. The ring is host memory that the daemon books only while it is
// used: it goes in time whatever else is asked.
#pragma once

#include <chrono>

#include "proto/cuda/driver.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// Making a context and pinning a ring cost a tenth of a second and more; loads often come together.
inline constexpr std::chrono::milliseconds kKeepContext{10'000};

// Serves `socket`. The exit status of the process: 0 the daemon is gone; 3 the context or the
// driver failed for good (said in the last reply); 4 a frame made no sense. `keep`: how long a
// context and the ring stay after their last use.
int RunDeviceAgent(UniqueFd socket, const char* library = cuda::kDriverLibrary,
                   std::chrono::milliseconds keep = kKeepContext);

}  // namespace modelhost
