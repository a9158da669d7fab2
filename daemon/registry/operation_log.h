// The operations of this epoch: ids, states, who watches. Control thread only.
//
// A finished operation is kept for an hour, at most kMostFinished of them. Every change raises
// `sequence` and tells the watchers and the observers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/registry/ids.h"
#include "daemon/registry/snapshots.h"

namespace modelhost {

class OperationLog {
 public:
  static constexpr size_t kMostFinished = 1000;
  using OnChange = std::function<void(const OperationSnapshot&)>;

  // `on_any` is told of every change of every operation.
  OperationLog(Clock& clock, OnChange on_any) : clock_(clock), on_any_(std::move(on_any)) {}

  // Starts one, RUNNING.
  OperationId Begin(OperationKind kind, const std::string& model, uint64_t version,
                    const std::string& label, uint32_t by);
  // Null when it is not known any more. Change it through Update.
  const OperationSnapshot* Find(OperationId id) const;
  bool IsRunning(OperationId id) const;

  // Ignored when it is finished: late progress must not revive it.
  void Update(OperationId id, const std::function<void(OperationSnapshot&)>& change);
  // SUCCEEDED, FAILED or CANCELLED, by the code of `status`. The first finish wins.
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
