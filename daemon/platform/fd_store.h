// A place outside this process that keeps descriptors over a restart. systemd's is in systemd.h.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// A descriptor with the name that it was kept under.
struct NamedFd {
  std::string name;
  UniqueFd fd;
};

// Calls may block while the keeper is busy: not for the control thread. They take effect in the
// order made. What the keeper refuses or drops it does not tell: only what comes back was kept.
// Thread-safe.
class FdStore {
 public:
  virtual ~FdStore() = default;
  // Gives away a second descriptor of `fd`. `name`: printable ASCII without ':'.
  virtual absl::Status Store(const std::string& name, const UniqueFd& fd) = 0;
  // Every descriptor of that name; an unknown one is no error.
  virtual absl::Status Remove(const std::string& name) = 0;
};

}  // namespace modelhost
