#include "daemon/registry/event_ring.h"

#include <algorithm>
#include <utility>

namespace modelhost {

const EventRecord& EventRing::Add(EventRecord event) {
  if (event.detail.size() > kMostDetail) {
    event.detail.resize(kMostDetail);
    event.detail += "...";
  }
  event.sequence = next_++;
  if (events_.size() >= kMostEvents) events_.pop_front();
  events_.push_back(std::move(event));
  return events_.back();
}

EventRing::Page EventRing::After(uint64_t sequence, size_t most) const {
  Page page;
  // A number that was never given: of another epoch, or made up. What comes next is what it gets.
  page.next = std::min(sequence, next_ - 1);
  if (events_.empty() || page.next == next_ - 1) return page;
  const uint64_t first = events_.front().sequence;
  if (page.next + 1 < first) page.lost = first - page.next - 1;
  const auto begin = static_cast<ptrdiff_t>(page.next + 1 < first ? 0 : page.next + 1 - first);
  const auto count =
      static_cast<ptrdiff_t>(std::min(most, events_.size() - static_cast<size_t>(begin)));
  page.events.assign(events_.begin() + begin, events_.begin() + begin + count);
  if (!page.events.empty()) page.next = page.events.back().sequence;
  return page;
}

uint64_t EventRing::Before(absl::Time since) const {
  // Not a search: the clock may have been set back in between.
  for (const EventRecord& event : events_) {
    if (event.when >= since) return event.sequence - 1;
  }
  return next_ - 1;
}

}  // namespace modelhost
