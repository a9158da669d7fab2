// How many descriptors sent to one client are still on their way: sent, and not yet received.
//
// The kernel counts descriptors in flight against the sending user, all receivers together, so one
// client that asks and never reads could use up what all of them need. It does not say how many a
// socket holds; it says how much unread data there is (UnreadByPeer). Frames are read in order, so
// the unread ones are the last ones sent, and no more of them than fit into that much data.
//
// Counts high rather than low, and exactly when the client has read everything. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/time/time.h"

namespace modelhost {

class InFlight {
 public:
  // A frame was sent.
  void Sent(size_t frame_bytes, size_t fds, absl::Duration now);
  // `unread` as UnreadByPeer says.
  void Settle(uint64_t unread);

  uint64_t fds() const { return fds_; }
  // When the oldest unread frame with descriptors was sent (Clock::Monotonic); InfiniteDuration
  // when there is none.
  absl::Duration oldest() const;

 private:
  struct Frame {
    uint64_t least_cost;  // It takes at least this much of the kernel's measure.
    size_t fds;
    absl::Duration when;
  };
  std::deque<Frame> frames_;
  uint64_t fds_ = 0;
};

}  // namespace modelhost
