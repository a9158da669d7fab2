// The control loop: one thread that waits on epoll and runs tasks, timers and watch callbacks.
//
// Run() is called by the thread that becomes the loop's. Until then the thread that made the loop
// counts as it, so that watches and timers can be set up first. Tasks run in the order posted, a
// batch between two looks at the descriptors; timers in the order they fall due.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/task_runner.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class EventLoop final : public ControlLoop {
 public:
  // RESOURCE_EXHAUSTED: no descriptor is left.
  static absl::StatusOr<std::unique_ptr<EventLoop>> Create(Clock& clock);
  ~EventLoop() override;
  EventLoop(const EventLoop&) = delete;

  // Until Quit(). Tasks that were posted before it still run.
  void Run();
  // Any thread; also before Run, which then returns once the tasks have run.
  void Quit();

  void Post(Task task) override;
  TimerId PostDelayed(absl::Duration delay, Task task) override;
  void CancelTimer(TimerId timer) override;
  // Should the kernel refuse the watch (its limit is reached), `ready` is called once with
  // EPOLLERR.
  WatchId Watch(int fd, uint32_t events, std::function<void(uint32_t)> ready) override;
  void ChangeWatch(WatchId watch, uint32_t events) override;
  void Unwatch(WatchId watch) override;
  bool InThread() const override;

 private:
  struct Watched {
    int fd;
    std::function<void(uint32_t)> ready;
  };

  EventLoop(Clock& clock, UniqueFd epoll, UniqueFd wake);
  void Wake();
  void RunTasks();
  void RunTimers();
  int TimeoutMs() const;
  bool Finished();

  Clock& clock_;
  const UniqueFd epoll_;
  const UniqueFd wake_;
  std::atomic<std::thread::id> thread_;

  absl::Mutex mutex_;
  std::vector<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool quit_ ABSL_GUARDED_BY(mutex_) = false;

  // Loop thread only.
  uint64_t next_id_ = 1;
  std::map<std::pair<absl::Duration, TimerId>, Task> timers_;  // By due time, then age.
  std::unordered_map<TimerId, absl::Duration> due_;
  std::unordered_map<WatchId, std::shared_ptr<Watched>> watches_;
};

}  // namespace modelhost
