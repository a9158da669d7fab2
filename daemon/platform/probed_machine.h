// The Machine that is really there: a child looks at it, once, when somebody asks first.
//
// What was found is kept; a look that failed, or left something unknown, is taken again after
// kRetry, since a driver may come up late. Forget() (a reload) takes every look again. No look
// takes longer than kDeadline, whatever the driver does.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/machine_facts.h"

namespace modelhost {

class ProbedMachine final : public Machine {
 public:
  static constexpr absl::Duration kDeadline = absl::Seconds(15);
  static constexpr absl::Duration kRetry = absl::Seconds(30);

  // `command` prints what ProbeMachine makes. By default this program itself, as
  // "modelhostd probe-machine".
  ProbedMachine(Clock& clock, std::vector<std::string> command = DefaultCommand(),
                absl::Duration deadline = kDeadline);
  ~ProbedMachine() override;
  static std::vector<std::string> DefaultCommand();

  // A known fact of `overrides` stands for what would be found.
  void SetOverrides(MachineFacts overrides);
  void Forget();

  absl::StatusOr<MachineFacts> Facts(bool only_platform,
                                     const std::function<bool()>& cancelled) override;

 private:
  MachineFacts WithOverrides(MachineFacts facts) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Never fails but by cancellation: what could not be found says why.
  absl::StatusOr<MachineFacts> Look(const std::function<bool()>& cancelled);
  // `text`: what the child said, whatever became of it.
  absl::Status RunChild(const std::function<bool()>& cancelled, std::string* text);
  void Reap(pid_t pid);

  Clock& clock_;
  const std::vector<std::string> command_;
  const absl::Duration deadline_;
  absl::Mutex mutex_;
  MachineFacts overrides_ ABSL_GUARDED_BY(mutex_);
  std::optional<MachineFacts> found_ ABSL_GUARDED_BY(mutex_);
  absl::Duration looked_at_ ABSL_GUARDED_BY(mutex_);
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<pid_t> unreaped_ ABSL_GUARDED_BY(mutex_);  // Killed, and hanging in the driver.
};

}  // namespace modelhost
