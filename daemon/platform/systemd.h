// systemd, where there is one: inherited sockets, readiness, watchdog. Without it every call is a
// no-op.
#pragma once

#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// The descriptors of LISTEN_FDS by their FileDescriptorName; the variables are removed from the
// environment. Call once, before threads start.
std::map<std::string, UniqueFd> TakeInheritedFds();

void NotifyReady(absl::string_view status);
void NotifyStatus(absl::string_view status);  // One line for `systemctl status`.
void NotifyStopping();
void NotifyReloading();
void NotifyExtendTimeout(absl::Duration more);
void NotifyWatchdog();
// Half the watchdog period, or InfiniteDuration without one.
absl::Duration WatchdogInterval();

}  // namespace modelhost
