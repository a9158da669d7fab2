#include "daemon/service/operation_queue.h"

#include <utility>

namespace modelhost {

void OperationQueue::Push(const OperationSnapshot& operation) {
  absl::MutexLock lock(&mutex_);
  const bool same_step = !waiting_.empty() && waiting_.back().state == operation.state &&
                         waiting_.back().phase == operation.phase;
  if (same_step) {
    waiting_.back() = operation;
    return;
  }
  waiting_.push_back(operation);
  if (waiting_.size() > kMostWaiting) waiting_.pop_front();
}

std::optional<OperationSnapshot> OperationQueue::Pop(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(this, &OperationQueue::HasSome), timeout)) {
    return std::nullopt;
  }
  OperationSnapshot next = std::move(waiting_.front());
  waiting_.pop_front();
  return next;
}

}  // namespace modelhost
