// Tells when something appears in, or leaves, a few directories.
//
//   change, change, change ... quiet for `settle` (or `settle` * 10 since the first) -> changed()
//
// Only the names in the directories are watched, not the files' contents, unless it is asked for:
// versions get there by rename. What is seen is a hint to look again, never what there is. Loop
// thread only; the callback too.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/task_runner.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class DirWatcher {
 public:
  struct Options {
    absl::Duration settle = absl::Milliseconds(300);
    bool contents = false;  // Also when somebody has written a file of them and closed it.
  };

  // RESOURCE_EXHAUSTED: the user's limit of inotify instances is reached (the text names the
  // sysctl).
  static absl::StatusOr<std::unique_ptr<DirWatcher>> Create(ControlLoop& loop, Clock& clock,
                                                            Options options,
                                                            std::function<void()> changed);
  ~DirWatcher();
  DirWatcher(const DirWatcher&) = delete;

  // Replaces what is watched. A path that was not counts as a change: something may have come into
  // it before it was watched. One that is not there, or is no directory, is skipped: its parent
  // is watched as a rule, and tells when it comes. RESOURCE_EXHAUSTED: the limit of watches; those
  // that were had stay.
  absl::Status SetPaths(const std::vector<std::string>& paths);

 private:
  DirWatcher(ControlLoop& loop, Clock& clock, Options options, std::function<void()> changed,
             UniqueFd inotify);
  void Drain();
  void Settle();

  ControlLoop& loop_;
  Clock& clock_;
  const Options options_;
  const std::function<void()> changed_;
  const UniqueFd inotify_;
  std::map<std::string, int> watched_;  // Path -> inotify's number.
  WatchId watch_ = 0;
  TimerId timer_ = 0;
  absl::Duration first_ = absl::InfiniteDuration();  // When the changes not yet told began.
};

}  // namespace modelhost
