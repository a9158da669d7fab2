#include "daemon/platform/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

constexpr uint64_t kWakeId = 0;  // No watch has it.

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create(Clock& clock) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "create the control loop");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoStatus(errno, "create the control loop's wake-up descriptor");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeId;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return ErrnoStatus(errno, "watch the control loop's wake-up descriptor");
  }
  return std::unique_ptr<EventLoop>(new EventLoop(clock, std::move(epoll), std::move(wake)));
}

EventLoop::EventLoop(Clock& clock, UniqueFd epoll, UniqueFd wake)
    : clock_(clock),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      thread_(std::this_thread::get_id()) {}

EventLoop::~EventLoop() = default;

bool EventLoop::InThread() const { return thread_.load() == std::this_thread::get_id(); }

void EventLoop::Run() {
  thread_.store(std::this_thread::get_id());
  std::array<epoll_event, 64> events;
  while (true) {
    RunTasks();
    RunTimers();
    if (Finished()) return;
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), TimeoutMs());
    if (count < 0 && errno != EINTR) std::abort();  // Only a bad descriptor or address.
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kWakeId) {
        uint64_t ignored = 0;
        (void)!::read(wake_.get(), &ignored, sizeof(ignored));
        continue;
      }
      // An earlier callback of this batch may have ended this watch.
      const auto found = watches_.find(event.data.u64);
      if (found == watches_.end()) continue;
      const std::shared_ptr<Watched> watched = found->second;  // It may end itself.
      watched->ready(event.events);
    }
  }
}

void EventLoop::Quit() {
  {
    absl::MutexLock lock(&mutex_);
    quit_ = true;
  }
  Wake();
}

bool EventLoop::Finished() {
  absl::MutexLock lock(&mutex_);
  if (!quit_ || !tasks_.empty()) return false;
  quit_ = false;
  return true;
}

void EventLoop::Post(Task task) {
  bool was_empty = false;
  {
    absl::MutexLock lock(&mutex_);
    was_empty = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (was_empty) Wake();
}

void EventLoop::Wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));  // EAGAIN: it is awake already.
}

void EventLoop::RunTasks() {
  std::vector<Task> batch;
  {
    absl::MutexLock lock(&mutex_);
    batch.swap(tasks_);
  }
  for (Task& task : batch) {
    std::move(task)();
    task = nullptr;  // What it owns goes now, not with the batch.
  }
}

TimerId EventLoop::PostDelayed(absl::Duration delay, Task task) {
  const TimerId id = next_id_++;
  const absl::Duration due = clock_.Monotonic() + std::max(delay, absl::ZeroDuration());
  timers_.emplace(std::pair(due, id), std::move(task));
  due_.emplace(id, due);
  return id;
}

void EventLoop::CancelTimer(TimerId timer) {
  const auto found = due_.find(timer);
  if (found == due_.end()) return;
  timers_.erase({found->second, timer});
  due_.erase(found);
}

void EventLoop::RunTimers() {
  if (timers_.empty()) return;
  const absl::Duration now = clock_.Monotonic();
  const TimerId first_new = next_id_;  // A timer that re-arms itself at once waits for its turn.
  while (true) {
    const auto next = timers_.begin();
    if (next == timers_.end() || next->first.first > now || next->first.second >= first_new) return;
    Task task = std::move(next->second);
    due_.erase(next->first.second);
    timers_.erase(next);
    std::move(task)();
  }
}

int EventLoop::TimeoutMs() const {
  if (timers_.empty()) return -1;
  const absl::Duration left = timers_.begin()->first.first - clock_.Monotonic();
  if (left <= absl::ZeroDuration()) return 0;
  // Rounded up: waking early would only go round again.
  const int64_t ms = absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1)));
  return static_cast<int>(std::min<int64_t>(ms, 3'600'000));
}

WatchId EventLoop::Watch(int fd, uint32_t events, std::function<void(uint32_t)> ready) {
  const WatchId id = next_id_++;
  watches_.emplace(id, std::make_shared<Watched>(Watched{fd, std::move(ready)}));
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    if (errno != ENOSPC && errno != ENOMEM) std::abort();  // Not open, or watched already: a bug.
    Post([this, id] {
      const auto found = watches_.find(id);
      if (found == watches_.end()) return;
      const std::shared_ptr<Watched> watched = found->second;
      watched->ready(EPOLLERR);
    });
  }
  return id;
}

void EventLoop::ChangeWatch(WatchId watch, uint32_t events) {
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = watch;
  // ENOENT: the kernel refused the watch when it was made; its owner has been told.
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, found->second->fd, &event) != 0 && errno != ENOENT) {
    std::abort();
  }
}

void EventLoop::Unwatch(WatchId watch) {
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->fd, nullptr);
  watches_.erase(found);
}

}  // namespace modelhost
