// The end of a swap or rollback: what it says and what its exit code is.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/modelctl/context.h"
#include "client/modelctl/json.h"
#include "client/modelctl/operation_run.h"
#include "modelhost/v1/control.pb.h"

namespace modelhost::modelctl {

// "planner:stable 7 -> 8  generation 12  load 1.84 s  flip 4.1 us  draining 3 leases"; a line for
// each further model. Unchanged: "planner:stable 8  unchanged".
std::string SwapLines(const v1::Operation& operation, const std::string& model,
                      const std::string& label, uint64_t version);

struct SwapGoal {
  std::string what;   // "swap planner:stable to 8"
  std::string kind;   // Of the JSON document: "Swap", "Rollback".
  std::string model;  // The one whose label decides whether an old version still serves.
  std::string label;
  uint64_t version = 0;                                  // 0: the previous one.
  std::vector<std::pair<std::string, uint64_t>> others;  // Of the set: each model and version.
  std::optional<uint64_t> if_current;                    // What the label must name; 0: nothing.
  bool wait = true;
};

// Follows the operation to its end, or with `wait` unset to its id. A swap that failed while the
// label goes on naming a READY version is kOldServes.
Outcome<v1::Operation> FollowSwap(Context& context, Interrupts& interrupts, const SwapGoal& goal,
                                  const OperationStarter& start);

// The keys of a swap in an open JSON object.
void WriteSwap(JsonWriter& json, const SwapGoal& goal, const v1::Operation& operation);

// FollowSwap, and what came of it on stdout.
Exit RunSwap(Context& context, Interrupts& interrupts, const SwapGoal& goal,
             const OperationStarter& start);

}  // namespace modelhost::modelctl
