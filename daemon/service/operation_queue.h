// What a stream has still to say about one operation. Bounded: progress within a phase replaces
// what waits, and of very many phases the oldest go. The last state is never lost.
#pragma once

#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/registry/snapshots.h"

namespace modelhost {

class OperationQueue {
 public:
  static constexpr size_t kMostWaiting = 64;

  // The control thread.
  void Push(const OperationSnapshot& operation);
  // The stream's thread; nullopt when nothing came within `timeout`.
  std::optional<OperationSnapshot> Pop(absl::Duration timeout);

 private:
  bool HasSome() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !waiting_.empty(); }

  absl::Mutex mutex_;
  std::deque<OperationSnapshot> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
