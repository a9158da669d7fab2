// A program run for one answer: started with the descriptors it needs and no others, never waited
// for without a limit, never left behind. The only place that starts processes.
//
// ChildProcess is thread-compatible.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// How a child ended.
struct ChildEnd {
  bool signalled = false;
  int code = 0;  // Exit status, or the signal's number.
};

struct ChildProgram {
  std::string name;
  std::vector<std::string> arguments = {};  // The number of the first descriptor follows them.
  bool keep_environment = false;            // Else there is none.
  bool quiet = false;                       // Its error output is closed off, too.
};

class ChildProcess {
 public:
  static constexpr absl::Duration kKillPatience = absl::Seconds(1);

  // Runs `file` (an open program), with no signal blocked and its standard input and output
  // closed off. `descriptors` stay the caller's; in the child they have consecutive numbers.
  // RESOURCE_EXHAUSTED when there is no process or descriptor number left.
  static absl::StatusOr<ChildProcess> Start(const UniqueFd& file, const ChildProgram& program,
                                            const std::vector<const UniqueFd*>& descriptors);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  // Kills what still runs. One that a broken device keeps from ending is left behind as a zombie:
  // keep it, and ask Gone, where that may happen.
  ~ChildProcess();

  // DEADLINE_EXCEEDED after `most`, CANCELLED soon after `go_on` says false; both kill it.
  absl::StatusOr<ChildEnd> Wait(Clock& clock, absl::Duration most,
                                const std::function<bool()>& go_on);
  // Returns after `patience`, whether it has ended or not. The second time nothing is waited for.
  void Kill(absl::Duration patience = kKillPatience);
  // Whether it has ended and nothing of it is left; does not wait.
  bool Gone();

 private:
  ChildProcess(int pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}
  // Of one that has ended. nullopt: somebody keeps it from being taken away.
  absl::StatusOr<std::optional<ChildEnd>> Reap();

  int pid_ = -1;  // -1: reaped.
  UniqueFd pidfd_;
  bool killed_ = false;
};

// Those that were killed and have not ended yet: a device that does not answer keeps them.
// Thread-safe.
class LateChildren {
 public:
  // Nothing, when it is gone.
  void Keep(ChildProcess child);
  // Takes away those that have ended by now. How many are left.
  size_t Reap();

 private:
  absl::Mutex mutex_;
  std::vector<ChildProcess> children_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
