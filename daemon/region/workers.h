// A few threads at one job: the caller's own, and as many of the pool as have time.
#pragma once

#include <string>

#include "absl/functional/function_ref.h"
#include "daemon/platform/os.h"
#include "daemon/platform/task_runner.h"

namespace modelhost {

// Runs `body` on this thread and on up to `threads` - 1 of the executor's, and returns when all
// that have begun have ended. `body` takes its work from a place that all share and ends when
// there is none. A busy pool only means fewer helpers: nothing waits for a thread to become free,
// so a task of the same pool may call this.
void RunOnWorkers(Executor& executor, int threads, absl::FunctionRef<void()> body);

// The calling thread's disk reads have this priority while it lives. A kernel or container that
// refuses is put up with: the reads are then as urgent as any.
class ScopedIoPriority {
 public:
  ScopedIoPriority(Os& os, const std::string& io_class);
  ~ScopedIoPriority();
  ScopedIoPriority(const ScopedIoPriority&) = delete;

 private:
  Os& os_;
  bool set_;
};

}  // namespace modelhost
