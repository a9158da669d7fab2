// The Machine that is really there: a child looks at it, once, when somebody asks first.
//
// What was found is kept; what is still unknown is looked for again after kRetry, since a driver
// may come up late, and everything after Forget() (a reload). What the operator gave is not looked
// for, nor what nobody needs. A look is given up after kDeadline, and at most a second more until
// its child is gone; a child that a driver keeps even then is left to end when it can, and until it
// has no other one is started. Looks go one after the other: who asks during one waits for it,
// until `cancelled`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/child_process.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/machine_facts.h"

namespace modelhost {

class ProbedMachine final : public Machine {
 public:
  static constexpr absl::Duration kDeadline = absl::Seconds(15);
  static constexpr absl::Duration kRetry = absl::Seconds(5);

  // `command` is run with "--no-driver", where that is not needed, and "--answer NUMBER" after it,
  // and writes what ProbeMachine makes to that descriptor. By default this program itself, as
  // "modelhostd probe-machine".
  ProbedMachine(Clock& clock, std::vector<std::string> command = DefaultCommand(),
                absl::Duration deadline = kDeadline);
  ~ProbedMachine() override;
  static std::vector<std::string> DefaultCommand();

  // A known fact of `overrides` stands for what would be found.
  void SetOverrides(MachineFacts overrides);
  void Forget();

  absl::StatusOr<MachineFacts> Facts(const FactsNeeded& needed,
                                     const std::function<bool()>& cancelled) override;
  std::shared_ptr<const MachineFacts> Known() override;

 private:
  MachineFacts WithOverrides(MachineFacts facts) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void UpdateKnown() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Without those that the operator gave.
  FactsNeeded ToFind(FactsNeeded needed) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Never fails but by cancellation: what could not be found says why.
  absl::StatusOr<MachineFacts> Look(const FactsNeeded& needed,
                                    const std::function<bool()>& cancelled);
  // `text`: what the child said, whatever became of it.
  absl::Status RunChild(bool with_driver, const std::function<bool()>& cancelled,
                        std::string* text);

  Clock& clock_;
  const std::vector<std::string> command_;
  const absl::Duration deadline_;
  absl::Mutex mutex_;
  MachineFacts overrides_ ABSL_GUARDED_BY(mutex_);
  // A fact with neither value nor reason was not looked for.
  MachineFacts found_ ABSL_GUARDED_BY(mutex_);
  bool stale_ ABSL_GUARDED_BY(mutex_) = true;       // Forgotten: only Known still tells of it.
  uint64_t forgotten_ ABSL_GUARDED_BY(mutex_) = 0;  // How often.
  absl::Duration looked_at_ ABSL_GUARDED_BY(mutex_);
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const MachineFacts> known_ ABSL_GUARDED_BY(mutex_);
  LateChildren late_;  // Killed, and hanging in the driver.
};

}  // namespace modelhost
