// memcpy for bytes whose pages may be gone: a truncated store file, a failing disk. Any thread.
#pragma once

#include <cstddef>

#include "proto/handle/error.h"

namespace modelhost {

// Copies through the kernel, which reports a page that cannot be had as an error where a load would
// raise SIGBUS. No signal handler, no state.
//   DATA_LOSS           a page is not there; part of `to` may have been written
//   RESOURCE_EXHAUSTED  no descriptors (only where the sandbox forbids process_vm_readv)
Result<void> GuardedCopy(void* to, const void* from, size_t bytes);

// The same by way of a pipe, for sandboxes that forbid process_vm_readv.
Result<void> GuardedCopyByPipe(void* to, const void* from, size_t bytes);

}  // namespace modelhost
