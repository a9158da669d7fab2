// Where code runs. Two kinds of place:
//
//   ControlLoop  one thread; owns every state transition, the lease table and both sockets. Nothing
//                on it blocks: no file I/O, no fsync, no hashing, no unmapping of weights.
//   Executor     a pool of threads for everything that takes time. Work posts its result back.
//
// Tasks are run in the order posted (ControlLoop) and never dropped while the runner lives.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace modelhost {

using Task = absl::AnyInvocable<void()>;

class Executor {
 public:
  virtual ~Executor() = default;
  // Any thread.
  virtual void Post(Task task) = 0;
};

using TimerId = uint64_t;
using WatchId = uint64_t;

class ControlLoop : public Executor {
 public:
  // Loop thread only, all of these.

  // Runs `task` once, `delay` from now. 0 is never a valid id.
  virtual TimerId PostDelayed(absl::Duration delay, Task task) = 0;
  // A timer that has fired or was cancelled is ignored.
  virtual void CancelTimer(TimerId timer) = 0;

  // Calls `ready(epoll_events)` while any of `events` (EPOLLIN, EPOLLOUT, ...) holds on the
  // descriptor, which stays the caller's and must outlive the watch. Errors and hang-ups are always
  // reported.
  virtual WatchId Watch(int fd, uint32_t events, std::function<void(uint32_t)> ready) = 0;
  virtual void ChangeWatch(WatchId watch, uint32_t events) = 0;
  // After this returns the callback will not run again; safe inside the callback itself.
  virtual void Unwatch(WatchId watch) = 0;

  // True on the loop's thread.
  virtual bool InThread() const = 0;
};

// Runs `function` on the loop and returns its result; the caller's thread waits. Not for the loop's
// own thread (CHECK). The loop never waits for other threads, so this ends.
template <typename Function>
auto RunAndWait(ControlLoop& loop, Function function) -> decltype(function());

}  // namespace modelhost

#include "daemon/platform/task_runner_inl.h"
