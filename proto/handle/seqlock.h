// A seqlock: one writer, many readers, no reader can stop the writer.
//
// The word is odd while a write is under way. The guarded words are themselves atomics, read and
// written relaxed inside the lock, so a torn read is a retry and never undefined behaviour.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace modelhost {

// Holds the write side from construction to destruction. One at a time, on the writer's thread.
class SeqlockWrite {
 public:
  explicit SeqlockWrite(std::atomic<uint64_t>& sequence) : sequence_(sequence) {
    sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  SeqlockWrite(const SeqlockWrite&) = delete;
  SeqlockWrite& operator=(const SeqlockWrite&) = delete;
  ~SeqlockWrite() {
    sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t>& sequence_;
};

// Runs `copy` until it saw no write, at most `attempts` times. False: give up and ask the daemon;
// what `copy` made then must not be used.
template <typename Copy>
bool SeqlockRead(const std::atomic<uint64_t>& sequence, int attempts, Copy copy) {
  for (int i = 0; i < attempts; ++i) {
    // A writer that was put aside inside its write needs the processor.
    if (i != 0) std::this_thread::yield();
    const uint64_t before = sequence.load(std::memory_order_acquire);
    if ((before & 1) != 0) continue;
    copy();
    std::atomic_thread_fence(std::memory_order_acquire);
    if (sequence.load(std::memory_order_relaxed) == before) return true;
  }
  return false;
}

}  // namespace modelhost
