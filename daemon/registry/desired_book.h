// What the manager keeps about the desired state file. Control thread only; see manager_desired.cc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/desired_plan.h"
#include "daemon/registry/ids.h"
#include "daemon/store/desired_file.h"

namespace modelhost {

struct DesiredBook {
  using Name = std::pair<std::string, std::string>;  // Model and label.

  std::string file;  // Empty: none is followed.
  DesiredFileState state = DesiredFileState::kOff;
  std::string error;
  std::string text;        // Of the last good read; `wanted` is what it says.
  DesiredVersions wanted;  // Stays while the file is missing or broken, and is not acted on.
  absl::Time last_read = absl::InfinitePast();

  bool reading = false;
  bool look_again = false;  // Asked for while one read was under way.
  uint64_t look = 0;        // Another number whenever what is read counts no more.
  std::string unconfirmed;  // Read once, and its last line may go on.
  TimerId poll_timer = 0;
  TimerId deadline_timer = 0;

  bool review_posted = false;
  TimerId retry_timer = 0;
  std::map<Name, DesiredAttempt> attempts;  // That failed, with the present wish.
  struct Run {
    Name name;
    uint64_t to = 0;
  };
  std::map<OperationId, Run> running;  // Swaps that the file has asked for.
  std::map<Name, uint64_t> synced;     // The wish that was fulfilled last.
  struct Told {
    DesiredLabelState state = DesiredLabelState::kPending;
    bool drifting = false;
    friend bool operator==(const Told&, const Told&) = default;
  };
  std::map<Name, Told> told;  // To the observers.
  bool all_in_sync = false;
  absl::Time last_converged = absl::InfinitePast();
};

}  // namespace modelhost
