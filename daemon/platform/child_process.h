// A program run for one answer: started with the descriptors it needs and no others, never waited
// for without a limit, never left behind.
//
// Thread-compatible.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// How a child ended.
struct ChildEnd {
  bool signalled = false;
  int code = 0;  // Exit status, or the signal's number.
};

class ChildProcess {
 public:
  // Runs `program` (an open file), with no environment, no signal blocked and its standard output
  // and input closed off. `descriptors` stay the caller's; in the child they have consecutive
  // numbers, and the first of these is its only argument. RESOURCE_EXHAUSTED when there is no
  // process or descriptor number left.
  static absl::StatusOr<ChildProcess> Start(const UniqueFd& program, const std::string& name,
                                            const std::vector<const UniqueFd*>& descriptors);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  // Kills what still runs. One that a broken device keeps from ending for a second stays behind as
  // a zombie.
  ~ChildProcess();

  // DEADLINE_EXCEEDED after `most`, CANCELLED soon after `go_on` says false; both kill it.
  absl::StatusOr<ChildEnd> Wait(Clock& clock, absl::Duration most,
                                const std::function<bool()>& go_on);

 private:
  ChildProcess(int pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}
  absl::StatusOr<ChildEnd> Reap();  // Of one that has ended.
  void Kill();

  int pid_ = -1;  // -1: reaped.
  UniqueFd pidfd_;
};

}  // namespace modelhost
