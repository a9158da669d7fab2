// An fd store in this process, as systemd's is: it keeps second descriptors, drops silently what it
// has no room for, and gives all back to the next one that starts.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "daemon/platform/fd_store.h"

namespace modelhost {

class MemoryFdStore final : public FdStore {
 public:
  absl::Status Store(const std::string& name, const UniqueFd& fd) override {
    if (hang != nullptr) hang->WaitForNotification();
    absl::MutexLock lock(&mutex_);
    log.push_back("+" + name);
    if (fds_.size() < room) fds_.push_back({name, *fd.Duplicate()});
    return absl::OkStatus();
  }
  absl::Status Remove(const std::string& name) override {
    absl::MutexLock lock(&mutex_);
    log.push_back("-" + name);
    std::erase_if(fds_, [&name](const NamedFd& each) { return each.name == name; });
    return absl::OkStatus();
  }

  // What the next start gets. They stay in the store until it removes them.
  std::vector<NamedFd> GiveAll() const {
    absl::MutexLock lock(&mutex_);
    std::vector<NamedFd> all;
    for (const NamedFd& each : fds_) all.push_back({each.name, *each.fd.Duplicate()});
    return all;
  }
  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return fds_.size();
  }
  std::vector<std::string> names() const {
    absl::MutexLock lock(&mutex_);
    std::vector<std::string> all;
    for (const NamedFd& each : fds_) all.push_back(each.name);
    return all;
  }

  size_t room = SIZE_MAX;
  absl::Notification* hang = nullptr;  // Store waits for it.
  std::vector<std::string> log;        // Read it while nothing runs.

 private:
  mutable absl::Mutex mutex_;
  std::vector<NamedFd> fds_;
};

}  // namespace modelhost
