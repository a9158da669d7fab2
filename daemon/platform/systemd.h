// systemd, where there is one: inherited sockets, the fd store, readiness, watchdog. Without it
// every call is a no-op.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/platform/fd_store.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct InheritedFds {
  std::map<std::string, UniqueFd> sockets;  // A second one of a name is closed.
  std::vector<NamedFd> stored;              // All that came back from the fd store, in order.
};
// The descriptors of LISTEN_FDS; the variables are removed from the environment. systemd does not
// tell sockets from what was stored but by name: sockets are those in `socket_names`. Call once,
// before threads start.
InheritedFds TakeInheritedFds(const std::set<std::string>& socket_names);

// How many descriptors may be left in the fd store: 0 without systemd; what $FDSTORE says (systemd
// 254 and later); else kFdStoreMax, for which FileDescriptorStoreMax= of the unit must have room.
// Never more: the names of all must fit into one environment variable (128 KiB).
inline constexpr size_t kFdStoreMax = 4096;
size_t FdStoreRoom();

class SystemdFdStore final : public FdStore {
 public:
  absl::Status Store(const std::string& name, const UniqueFd& fd) override;
  absl::Status Remove(const std::string& name) override;
};

void NotifyReady(absl::string_view status);
void NotifyStatus(absl::string_view status);  // One line for `systemctl status`.
void NotifyStopping();
void NotifyReloading();
void NotifyExtendTimeout(absl::Duration more);
void NotifyWatchdog();
// Half the watchdog period, or InfiniteDuration without one.
absl::Duration WatchdogInterval();

}  // namespace modelhost
