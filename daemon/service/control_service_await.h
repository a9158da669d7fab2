// How a handler waits for what the control thread answers later. Included by the
// control_service*.cc files that do.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/service/control_service.h"

namespace modelhost {

// A result that comes later, from the control thread.
template <typename T>
class Later {
 public:
  void Set(absl::StatusOr<T> value) {
    absl::MutexLock lock(&mutex_);
    value_.emplace(std::move(value));
  }
  std::optional<absl::StatusOr<T>> Wait(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(this, &Later::HasValue), timeout);
    return value_;
  }

 private:
  bool HasValue() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return value_.has_value(); }
  absl::Mutex mutex_;
  std::optional<absl::StatusOr<T>> value_ ABSL_GUARDED_BY(mutex_);
};

template <typename T>
absl::StatusOr<T> ControlService::Await(
    const grpc::ServerContext& context,
    std::function<void(std::function<void(absl::StatusOr<T>)>)> start) {
  auto later = std::make_shared<Later<T>>();
  deps_.loop.Post([start = std::move(start), later] {
    start([later](absl::StatusOr<T> value) { later->Set(std::move(value)); });
  });
  while (true) {
    if (auto value = later->Wait(kStreamTick); value.has_value()) return *std::move(value);
    if (auto status = StillWanted(context); !status.ok()) return status;
  }
}

}  // namespace modelhost
