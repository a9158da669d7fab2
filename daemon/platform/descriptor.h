// Descriptors that are handed to other processes.
#pragma once

#include "absl/status/statusor.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// Opens the file behind `fd` once more, for reading. A second descriptor made by dup or SCM_RIGHTS
// shares the offset and the status flags of the first; this one shares nothing, so that a stranger
// may read() and lseek() through it.
//   PERMISSION_DENIED, RESOURCE_EXHAUSTED (out of descriptors)
absl::StatusOr<UniqueFd> ReopenReadOnly(const UniqueFd& fd);

}  // namespace modelhost
