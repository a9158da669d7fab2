// Makes absl's locks visible to ThreadSanitizer.
//
// The absl of the distribution is built without it, so what its mutexes order looks unordered and
// every guarded field like a race. The linker (--wrap, see modelhost_targets.cmake) sends our calls
// through here, where they are told to the sanitizer: what was done before an unlock happens before
// what is done after the next lock. Only in builds with -fsanitize=thread.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

extern "C" {
// Notify ends inside the library, where the condition of who waits is read after our release; and
// the deadlock detector of the library has a lock of its own.
const char* __tsan_default_suppressions() {
  return "race:HasBeenNotifiedInternal\nrace:GraphCycles\n";
}
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}

using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;
using absl::Time;

// The names are those of the Itanium C++ ABI; `__real_` is what was wrapped.
#define MODELHOST_WRAP(result, symbol, ...)       \
  extern "C" result __real_##symbol(__VA_ARGS__); \
  extern "C" result __wrap_##symbol(__VA_ARGS__)

namespace {

// Whoever unlocks evaluates the conditions that others wait for, and reads what they guard when our
// release is told already.
class UnlockScope {
 public:
  explicit UnlockScope(void* lock) {
    __tsan_release(lock);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~UnlockScope() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

// A call that gives the lock up for a while, or takes it, and ends with it held.
class HoldScope {
 public:
  explicit HoldScope(void* lock) : lock_(lock) {
    __tsan_release(lock_);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  }
  ~HoldScope() {
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    __tsan_acquire(lock_);
  }

 private:
  void* lock_;
};

}  // namespace

MODELHOST_WRAP(void, _ZN4absl7debian35Mutex4LockEv, Mutex* m) {
  __real__ZN4absl7debian35Mutex4LockEv(m);
  __tsan_acquire(m);
}
MODELHOST_WRAP(void, _ZN4absl7debian35Mutex6UnlockEv, Mutex* m) {
  const UnlockScope scope(m);
  __real__ZN4absl7debian35Mutex6UnlockEv(m);
}
MODELHOST_WRAP(bool, _ZN4absl7debian35Mutex7TryLockEv, Mutex* m) {
  const bool locked = __real__ZN4absl7debian35Mutex7TryLockEv(m);
  if (locked) __tsan_acquire(m);
  return locked;
}
MODELHOST_WRAP(void, _ZN4absl7debian35Mutex10ReaderLockEv, Mutex* m) {
  __real__ZN4absl7debian35Mutex10ReaderLockEv(m);
  __tsan_acquire(m);
}
MODELHOST_WRAP(void, _ZN4absl7debian35Mutex12ReaderUnlockEv, Mutex* m) {
  const UnlockScope scope(m);
  __real__ZN4absl7debian35Mutex12ReaderUnlockEv(m);
}
MODELHOST_WRAP(void, _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE, Mutex* m, const Condition* c) {
  const HoldScope scope(m);
  __real__ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE(m, c);
}
MODELHOST_WRAP(bool, _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE,
               Mutex* m, const Condition* c, Duration d) {
  const HoldScope scope(m);
  return __real__ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE(m, c, d);
}
MODELHOST_WRAP(bool, _ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE,
               Mutex* m, const Condition* c, Time t) {
  const HoldScope scope(m);
  return __real__ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE(m, c, t);
}
MODELHOST_WRAP(void, _ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE, Mutex* m,
               const Condition* c) {
  const HoldScope scope(m);
  __real__ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE(m, c);
}
MODELHOST_WRAP(bool, _ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE,
               Mutex* m, const Condition* c, Duration d) {
  const HoldScope scope(m);
  return __real__ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE(m, c,
                                                                                            d);
}
MODELHOST_WRAP(void, _ZN4absl7debian37CondVar4WaitEPNS0_5MutexE, CondVar* v, Mutex* m) {
  const HoldScope scope(m);
  __real__ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(v, m);
}
MODELHOST_WRAP(bool, _ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE,
               CondVar* v, Mutex* m, Duration d) {
  const HoldScope scope(m);
  return __real__ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE(v, m, d);
}
MODELHOST_WRAP(bool, _ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE, CondVar* v,
               Mutex* m, Time t) {
  const HoldScope scope(m);
  return __real__ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE(v, m, t);
}
MODELHOST_WRAP(void, _ZN4absl7debian312Notification6NotifyEv, Notification* n) {
  __tsan_release(n);
  __real__ZN4absl7debian312Notification6NotifyEv(n);
}
MODELHOST_WRAP(void, _ZNK4absl7debian312Notification19WaitForNotificationEv,
               const Notification* n) {
  __real__ZNK4absl7debian312Notification19WaitForNotificationEv(n);
  __tsan_acquire(const_cast<Notification*>(n));
}
MODELHOST_WRAP(bool, _ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE,
               const Notification* n, Duration d) {
  const bool notified =
      __real__ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE(n, d);
  if (notified) __tsan_acquire(const_cast<Notification*>(n));
  return notified;
}
