// Runners that run when the test says so.
//
//   ManualLoop       a ControlLoop without a thread: RunTasks(), AdvanceTime(), Fire()
//   ManualExecutor   an Executor that keeps its tasks: RunOne(), RunAll()
//   InlineExecutor   an Executor that runs each task where it is posted
//
// ManualLoop::Post and ManualExecutor::Post may be called from any thread; the rest by the test's.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/task_runner.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {

class ManualExecutor final : public Executor {
 public:
  void Post(Task task) override;
  // False when there was nothing to run.
  bool RunOne();
  // Also what the tasks post. How many ran.
  int RunAll();
  int waiting() const;

 private:
  mutable absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
};

class InlineExecutor final : public Executor {
 public:
  void Post(Task task) override { std::move(task)(); }
};

class ManualLoop final : public ControlLoop {
 public:
  explicit ManualLoop(ManualClock& clock) : clock_(clock) {}

  // Runs what was posted, and what that posts; due timers too. How many ran.
  int RunTasks();
  // Runs one task; false when there was none.
  bool RunOne() { return tasks_.RunOne(); }
  // Moves the clock, stopping at each timer on the way to run it (and what it posts).
  void AdvanceTime(absl::Duration by);
  // As if `events` held on the descriptor. False when nobody watches it for any of them.
  bool Fire(int fd, uint32_t events);
  // The events that the descriptor is watched for; 0 when it is not.
  uint32_t WatchedEvents(int fd) const;
  int waiting() const { return tasks_.waiting(); }
  int timers() const { return static_cast<int>(timers_.size()); }
  // The thread that the loop is to count as its own; true everywhere until told.
  void set_in_thread(bool in_thread) { in_thread_ = in_thread; }

  void Post(Task task) override { tasks_.Post(std::move(task)); }
  TimerId PostDelayed(absl::Duration delay, Task task) override;
  void CancelTimer(TimerId timer) override;
  WatchId Watch(int fd, uint32_t events, std::function<void(uint32_t)> ready) override;
  void ChangeWatch(WatchId watch, uint32_t events) override;
  void Unwatch(WatchId watch) override;
  bool InThread() const override { return in_thread_; }

 private:
  struct Timer {
    absl::Duration due;
    Task task;
  };
  struct Watched {
    int fd;
    uint32_t events;
    std::function<void(uint32_t)> ready;
  };
  // The timer that is due next, by time and then age; end() when none is due by `until`.
  std::map<TimerId, Timer>::iterator NextTimer(absl::Duration until);
  bool RunTimerDueBy(absl::Duration until);

  ManualClock& clock_;
  ManualExecutor tasks_;
  bool in_thread_ = true;
  uint64_t next_id_ = 1;
  std::map<TimerId, Timer> timers_;
  std::map<WatchId, Watched> watches_;
};

}  // namespace modelhost
