// A wish to stop, set from any thread and looked at between pieces of work.
#pragma once

#include <atomic>

namespace modelhost {

class CancelToken {
 public:
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

}  // namespace modelhost
