// How fast loads may go while somebody uses what is there.
//
// The threads of loads have a low priority of their own (Os::MakeThreadBackground), which decides
// who gets a core that two want. This decides how many cores loads want at all: what they leave
// alone is awake in microseconds, and its caches stay its own.
//
//   auto    no rest while no client is connected; else as many rests that all loads together use
//           one core less than there are (half of one where there is only one)
//   off     no rest
//   N/s     all loads together pass no more than N bytes a second, clients or not
//
// The rules are pure functions; LoadPacer holds the counts and sleeps. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/os.h"
#include "daemon/region/cancel_token.h"

namespace modelhost {

struct LoadPace {
  enum class Kind { kAuto, kOff, kRate };
  Kind kind = Kind::kAuto;
  uint64_t bytes_per_second = 0;  // kRate: at least 1.
};

// How long a worker rests that has used a core for `worked`, so that `workers` of them, who all do
// the same, use no more than `cores` - 1 cores.
absl::Duration RestAfter(absl::Duration worked, int workers, int cores);

// A rate as a line of pieces: `free_at` is when the line is free again. Takes the next place in it
// for `bytes` and returns how long that piece has to wait for its end.
absl::Duration RestForRate(uint64_t bytes, uint64_t bytes_per_second, absl::Duration now,
                           absl::Duration& free_at);

class LoadPacer {
 public:
  // No rest is longer than this but by rate.
  static constexpr absl::Duration kLongestRest = absl::Milliseconds(100);

  // `os` and `clock` outlive the pacer.
  LoadPacer(Os& os, Clock& clock, LoadPace pace, int cores);
  LoadPacer(const LoadPacer&) = delete;

  // How many processes are connected that could be disturbed.
  void SetClients(size_t clients) { clients_.store(clients, std::memory_order_relaxed); }
  size_t clients() const { return clients_.load(std::memory_order_relaxed); }

  // One thread that is at work on a load. For that thread only.
  class Worker {
   public:
    explicit Worker(LoadPacer& pacer);
    ~Worker();
    Worker(const Worker&) = delete;
    // After each piece. Returns at once when nothing calls for a rest, and soon when `cancel` is
    // set or the last client leaves.
    void Rest(uint64_t bytes, const CancelToken& cancel);

   private:
    LoadPacer& pacer_;
    absl::Duration cpu_;  // Of this thread, after the last rest.
  };

 private:
  bool Disturbs() const { return clients() > 0; }
  absl::Duration RestOf(absl::Duration worked, uint64_t bytes);
  void GiveBack(absl::Duration rest);

  Os& os_;
  Clock& clock_;
  const LoadPace pace_;
  const int cores_;
  std::atomic<size_t> clients_{0};
  std::atomic<int> workers_{0};
  absl::Mutex mutex_;
  absl::Duration free_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
