// Where the daemon's handles.sock may be. Reads the environment; any thread that does not write it.
#pragma once

#include <string>
#include <vector>

namespace modelhost {

// The paths to try, in order. `runtime_dir` non-empty: only that one. Otherwise
// $MODELHOST_RUNTIME_DIR alone when set, else the user's and then the system's. A directory in /tmp
// that belongs to neither this user nor root is left out: whoever made it could serve anything.
std::vector<std::string> SocketCandidates(const std::string& runtime_dir);

}  // namespace modelhost
