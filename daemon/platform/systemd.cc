#include "daemon/platform/systemd.h"

#include <systemd/sd-daemon.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

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

// A line break would start another assignment.
std::string OneLine(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\n", " "}, {"\r", " "}});
}

}  // namespace

std::map<std::string, UniqueFd> TakeInheritedFds() {
  std::map<std::string, UniqueFd> fds;
  char** raw_names = nullptr;
  const int count = ::sd_listen_fds_with_names(/*unset_environment=*/1, &raw_names);
  const std::unique_ptr<char*, FreeNames> names(raw_names);
  for (int i = 0; i < count; ++i) {
    // Owned before it is looked at: a second descriptor of one name is closed.
    UniqueFd fd(SD_LISTEN_FDS_START + i);
    fds.try_emplace(names == nullptr ? "unknown" : names.get()[i], std::move(fd));
  }
  return fds;
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
