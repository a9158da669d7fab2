// The two directories that one daemon has to itself, and how it takes them: runtime (sockets) and
// state (labels). A lock file in each is held for the life of the process; beside it a pid file
// tells people, and the next daemon's error, who has it. Start-up only.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/platform/os.h"

namespace modelhost {

// A directory that is ours: open, and locked against another daemon.
struct OwnedDir {
  UniqueFd dir;
  UniqueFd lock;
};

// Makes `path` (0700) where it is missing.
//   FAILED_PRECONDITION  another daemon has it (names its pid), or somebody else owns it or its
//   parent
absl::StatusOr<OwnedDir> TakeDir(Os& os, const std::string& path, uint32_t own_uid,
                                 int32_t own_pid);

}  // namespace modelhost
