// The operations: ids, states, who watches. Control thread only.
//
// A finished operation is kept for kKept, at most kMostFinished of them. Every change raises
// `sequence` and tells the watchers and the observers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/registry/ids.h"
#include "daemon/registry/snapshots.h"

namespace modelhost {

// ABORTED, "WHAT: superseded by op-N"; SuccessorOf has the N again.
absl::Status SupersededBy(absl::string_view what, OperationId by);
OperationId SuccessorOf(const absl::Status& status);  // 0: it has none.

// The inverse of the names.
std::optional<OperationKind> OperationKindOf(absl::string_view name);
std::optional<OperationState> OperationStateOf(absl::string_view name);

class OperationLog {
 public:
  static constexpr size_t kMostFinished = 1000;
  static constexpr absl::Duration kKept = absl::Hours(24);
  using OnChange = std::function<void(const OperationSnapshot&)>;

  // `on_any` is told of every change of every operation.
  OperationLog(Clock& clock, OnChange on_any) : clock_(clock), on_any_(std::move(on_any)) {}

  // What an earlier daemon did, and the number to go on with. Before the first Begin; tells nobody.
  void Restore(std::vector<OperationSnapshot> operations, OperationId next_id);
  OperationId next_id() const { return next_id_; }

  // Starts one, RUNNING.
  OperationId Begin(OperationKind kind, const std::string& model, uint64_t version,
                    const std::string& label, uint32_t by);
  // Null when it is not known any more. Change it through Update.
  const OperationSnapshot* Find(OperationId id) const;
  bool IsRunning(OperationId id) const;

  // Ignored when it is finished: late progress must not revive it.
  void Update(OperationId id, const std::function<void(OperationSnapshot&)>& change);
  // SUCCEEDED, FAILED, CANCELLED or ABORTED, by the code of `status`. The first finish wins.
  void Finish(OperationId id, const absl::Status& status);

  // Newest first.
  std::vector<OperationSnapshot> List() const;

  uint64_t Watch(OperationId id, OnChange on_change);  // Calls it once at once.
  void Unwatch(uint64_t watch);

 private:
  void Tell(const OperationSnapshot& operation);
  void Prune();

  Clock& clock_;
  OnChange on_any_;
  OperationId next_id_ = 1;
  uint64_t next_watch_ = 1;
  std::map<OperationId, OperationSnapshot> operations_;
  struct Watcher {
    OperationId id;
    OnChange on_change;
  };
  std::map<uint64_t, Watcher> watchers_;
};

}  // namespace modelhost
