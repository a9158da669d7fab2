// A fixed number of threads that run tasks in the order posted.
//
// Destruction runs every task that was posted, then joins. A task that posts during destruction is
// run too. Tasks that wait for other tasks of the same pool must do so only for tasks that have
// started: there may be no thread left to start one.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/task_runner.h"

namespace modelhost {

class ThreadPool final : public Executor {
 public:
  // `name` shows in `top -H` (15 characters are kept). At least one thread is made.
  // Each thread calls `begin` before its first task.
  ThreadPool(const std::string& name, int threads, std::function<void()> begin = nullptr);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;

  void Post(Task task) override;

 private:
  void Work();

  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace modelhost
