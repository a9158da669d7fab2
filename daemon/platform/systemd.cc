#include "daemon/platform/systemd.h"

#include <systemd/sd-daemon.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

struct FreeNames {
  void operator()(char** names) const {
    if (names == nullptr) return;
    for (char** name = names; *name != nullptr; ++name) std::free(*name);
    std::free(names);
  }
};

// Nobody to tell, or nobody listening, is no error: the daemon runs the same without systemd.
void Notify(const std::string& state) { (void)::sd_notify(/*unset_environment=*/0, state.c_str()); }

absl::Status Told(int result, absl::string_view what, const std::string& name) {
  if (result > 0) return absl::OkStatus();
  if (result == 0) return absl::UnavailableError("there is no systemd to keep descriptors");
  return ErrnoStatus(-result, absl::StrCat("fd store: ", what, " ", name));
}

// A line break would start another assignment.
std::string OneLine(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\n", " "}, {"\r", " "}});
}

}  // namespace

InheritedFds TakeInheritedFds(const std::set<std::string>& socket_names) {
  InheritedFds fds;
  char** raw_names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &raw_names);
  const std::unique_ptr<char*, FreeNames> names(raw_names);
  for (int i = 0; i < count; ++i) {
    // Owned before it is looked at.
    UniqueFd fd(SD_LISTEN_FDS_START + i);
    const std::string name = names == nullptr ? "unknown" : names.get()[i];
    if (socket_names.contains(name)) {
      fds.sockets.try_emplace(name, std::move(fd));
    } else {
      fds.stored.push_back({name, std::move(fd)});
    }
  }
  return fds;
}

size_t FdStoreRoom() {
  if (std::getenv("NOTIFY_SOCKET") == nullptr) return 0;
  const char* told = std::getenv("FDSTORE");
  uint64_t room = kFdStoreMax;
  if (told != nullptr && !absl::SimpleAtoi(told, &room)) room = 0;
  return static_cast<size_t>(std::min<uint64_t>(room, kFdStoreMax));
}

absl::Status SystemdFdStore::Store(const std::string& name, const UniqueFd& fd) {
  // Without FDPOLL=0 systemd would watch for a hang-up, which memory never has.
  const std::string state = absl::StrCat("FDSTORE=1\nFDPOLL=0\nFDNAME=", name);
  const int number = fd.get();
  return Told(::sd_pid_notify_with_fds(0, /*unset_environment=*/0, state.c_str(), &number, 1),
              "store", name);
}

absl::Status SystemdFdStore::Remove(const std::string& name) {
  const std::string state = absl::StrCat("FDSTOREREMOVE=1\nFDNAME=", name);
  return Told(::sd_notify(/*unset_environment=*/0, state.c_str()), "remove", name);
}

void NotifyReady(absl::string_view status) {
  Notify(absl::StrCat("READY=1\nSTATUS=", OneLine(status)));
}

void NotifyStatus(absl::string_view status) { Notify(absl::StrCat("STATUS=", OneLine(status))); }

void NotifyStopping() { Notify("STOPPING=1"); }

void NotifyReloading() {
  // Type=notify-reload wants to know when, on the clock that it keeps itself.
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC, &now);
  const uint64_t usec =
      static_cast<uint64_t>(now.tv_sec) * 1'000'000 + static_cast<uint64_t>(now.tv_nsec) / 1000;
  Notify(absl::StrCat("RELOADING=1\nMONOTONIC_USEC=", usec));
}

void NotifyExtendTimeout(absl::Duration more) {
  Notify(absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(more)));
}

void NotifyWatchdog() { Notify("WATCHDOG=1"); }

absl::Duration WatchdogInterval() {
  uint64_t usec = 0;
  if (::sd_watchdog_enabled(/*unset_environment=*/0, &usec) <= 0) return absl::InfiniteDuration();
  return absl::Microseconds(static_cast<int64_t>(usec)) / 2;
}

}  // namespace modelhost
