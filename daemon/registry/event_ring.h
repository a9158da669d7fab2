// The last events of all models, numbered without gaps. Control thread only.
//
// Bounded in number and in bytes: who reads too slowly learns how many have gone, and costs
// nothing.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/time/time.h"
#include "daemon/registry/snapshots.h"

namespace modelhost {

class EventRing {
 public:
  static constexpr size_t kMostEvents = 4096;
  static constexpr size_t kMostDetail = 512;  // Bytes; more are cut.

  // Gives it the next sequence.
  const EventRecord& Add(EventRecord event);

  struct Page {
    std::vector<EventRecord> events;  // At most `most`, from the first after `sequence`.
    uint64_t lost = 0;                // After `sequence`, and not kept.
    uint64_t next = 0;                // To go on after.
  };
  Page After(uint64_t sequence, size_t most) const;
  // The sequence before the first event that is not older than `since`.
  uint64_t Before(absl::Time since) const;

 private:
  uint64_t next_ = 1;
  std::deque<EventRecord> events_;
};

}  // namespace modelhost
