// A mutex, its guard and its condition variable, with the annotations that clang checks.
//
// libmodelhost links no absl, and std::mutex carries no annotations. The names follow clang's
// documentation; under other compilers they vanish. Thread-safe, as they must be.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define MH_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define MH_THREAD_ATTRIBUTE(x)
#endif
#define MH_GUARDED_BY(x) MH_THREAD_ATTRIBUTE(guarded_by(x))
#define MH_REQUIRES(...) MH_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define MH_EXCLUDES(...) MH_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))

namespace modelhost {

class MH_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void Lock() MH_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void Unlock() MH_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class MH_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) MH_THREAD_ATTRIBUTE(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.Lock();
  }
  ~MutexLock() MH_THREAD_ATTRIBUTE(release_capability()) { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class CondVar {
 public:
  // Waits for a notification, not past `deadline`; may wake with none.
  void WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point deadline) MH_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait_until(lock, deadline);
    lock.release();
  }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace modelhost
