#include "tests/fakes/manual_loop.h"

#include <sys/epoll.h>

#include <algorithm>

namespace modelhost {

void ManualExecutor::Post(Task task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

bool ManualExecutor::RunOne() {
  Task task;
  {
    absl::MutexLock lock(&mutex_);
    if (tasks_.empty()) return false;
    task = std::move(tasks_.front());
    tasks_.pop_front();
  }
  std::move(task)();
  return true;
}

int ManualExecutor::RunAll() {
  int count = 0;
  while (RunOne()) ++count;
  return count;
}

int ManualExecutor::waiting() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(tasks_.size());
}

int ManualLoop::RunTasks() {
  int count = 0;
  while (tasks_.RunOne() || RunTimerDueBy(clock_.Monotonic())) ++count;
  return count;
}

void ManualLoop::AdvanceTime(absl::Duration by) {
  const absl::Duration until = clock_.Monotonic() + by;
  RunTasks();
  for (auto next = NextTimer(until); next != timers_.end(); next = NextTimer(until)) {
    const absl::Duration now = clock_.Monotonic();
    if (next->second.due > now) clock_.Advance(next->second.due - now);
    RunTasks();
  }
  clock_.Advance(until - clock_.Monotonic());
  RunTasks();
}

std::map<TimerId, ManualLoop::Timer>::iterator ManualLoop::NextTimer(absl::Duration until) {
  const auto next =
      std::min_element(timers_.begin(), timers_.end(),
                       [](const auto& a, const auto& b) { return a.second.due < b.second.due; });
  return next != timers_.end() && next->second.due <= until ? next : timers_.end();
}

bool ManualLoop::RunTimerDueBy(absl::Duration until) {
  const auto next = NextTimer(until);
  if (next == timers_.end()) return false;
  Task task = std::move(next->second.task);
  timers_.erase(next);
  std::move(task)();
  return true;
}

TimerId ManualLoop::PostDelayed(absl::Duration delay, Task task) {
  const TimerId id = next_id_++;
  timers_.emplace(
      id, Timer{clock_.Monotonic() + std::max(delay, absl::ZeroDuration()), std::move(task)});
  return id;
}

void ManualLoop::CancelTimer(TimerId timer) { timers_.erase(timer); }

WatchId ManualLoop::Watch(int fd, uint32_t events, std::function<void(uint32_t)> ready) {
  const WatchId id = next_id_++;
  watches_.emplace(id, Watched{fd, events, std::move(ready)});
  return id;
}

void ManualLoop::ChangeWatch(WatchId watch, uint32_t events) {
  const auto found = watches_.find(watch);
  if (found != watches_.end()) found->second.events = events;
}

void ManualLoop::Unwatch(WatchId watch) { watches_.erase(watch); }

bool ManualLoop::Fire(int fd, uint32_t events) {
  for (const auto& [id, watched] : watches_) {
    const uint32_t told = events & (watched.events | EPOLLERR | EPOLLHUP);
    if (watched.fd != fd || told == 0) continue;
    const auto ready = watched.ready;  // It may end its own watch.
    ready(told);
    return true;
  }
  return false;
}

uint32_t ManualLoop::WatchedEvents(int fd) const {
  for (const auto& [id, watched] : watches_) {
    if (watched.fd == fd) return watched.events;
  }
  return 0;
}

}  // namespace modelhost
