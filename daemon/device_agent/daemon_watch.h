// Ends this process when the daemon does, also while a call of the driver hangs: the other end of
// the socket is closed then, however the daemon ended.
//
// Not PR_SET_PDEATHSIG: that comes when the thread ends that started this process.
#pragma once

#include <thread>

#include "proto/handle/unique_fd.h"

namespace modelhost {

class DaemonWatch {
 public:
  // `socket` is lent and outlives this. Status 0 of the process when the daemon is gone.
  explicit DaemonWatch(const UniqueFd& socket);
  DaemonWatch(const DaemonWatch&) = delete;
  ~DaemonWatch();

 private:
  const UniqueFd stop_;
  std::thread thread_;
};

}  // namespace modelhost
