#include "daemon/device_agent/daemon_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>

namespace modelhost {

DaemonWatch::DaemonWatch(const UniqueFd& socket) : stop_(::eventfd(0, EFD_CLOEXEC)) {
  thread_ = std::thread([this, &socket] {
    // No events of the socket are asked for: its end is told always, what it says is not ours.
    std::array<pollfd, 2> wanted{{{socket.get(), 0, 0}, {stop_.get(), POLLIN, 0}}};
    while (wanted[1].revents == 0) {
      if (::poll(wanted.data(), wanted.size(), -1) < 0) continue;
      if ((wanted[0].revents & (POLLHUP | POLLERR)) != 0) std::_Exit(0);
    }
  });
}

DaemonWatch::~DaemonWatch() {
  const uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

}  // namespace modelhost
