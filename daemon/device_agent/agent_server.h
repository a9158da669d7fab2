// The device agent: a process of its own in which every CUDA call of the daemon happens.
//
// It serves one daemon over one socket, one request at a time, until that end is closed. With
// vmm_fd it holds nothing between requests but a context and the ring, and those only for
// kKeepContext: a segment's descriptor is the daemon's. With cuda_ipc it holds the segments.
#pragma once

#include "proto/cuda/driver.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// Serves `socket`. The exit status of the process: 0 the daemon is gone; 3 the context died (said
// in the last reply); 4 a frame made no sense.
int RunDeviceAgent(UniqueFd socket, const char* library = cuda::kDriverLibrary);

}  // namespace modelhost
