#include "daemon/publish/in_flight.h"

namespace modelhost {
namespace {

// The kernel's own part of a queued message is larger than this on every 64-bit kernel: struct
// sk_buff and struct skb_shared_info are over 500 bytes together.
constexpr uint64_t kLeastOverhead = 512;

}  // namespace

void InFlight::Sent(size_t frame_bytes, size_t fds, absl::Duration now) {
  // Frames without descriptors matter only behind one that has some.
  if (fds == 0 && frames_.empty()) return;
  frames_.push_back({frame_bytes + kLeastOverhead, fds, now});
  fds_ += fds;
}

void InFlight::Settle(uint64_t unread) {
  uint64_t cost = 0;
  size_t keep = 0;  // The last `keep` frames may be unread.
  while (keep < frames_.size()) {
    cost += frames_[frames_.size() - 1 - keep].least_cost;
    if (cost > unread) break;
    ++keep;
  }
  while (frames_.size() > keep) {
    fds_ -= frames_.front().fds;
    frames_.pop_front();
  }
  while (!frames_.empty() && frames_.front().fds == 0) frames_.pop_front();
}

absl::Duration InFlight::oldest() const {
  return frames_.empty() ? absl::InfiniteDuration() : frames_.front().when;
}

}  // namespace modelhost
