// Tickets by which the holder of a lease on one transport gets its descriptors on another.
//
// A ticket is good once, for the uid that holds the lease, and no longer than the lease. Who has
// redeemed one may fetch more of that lease, which stays the holder's.
//
// Control thread only. What there is, is bounded by the leases: one ticket for each. Since a ticket
// of another uid is not looked at, and one uid has no secrets from itself, how long a look-up takes
// tells nothing.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "daemon/platform/task_runner.h"
#include "daemon/registry/ids.h"

namespace modelhost {

using LeaseTicket = std::array<uint8_t, 16>;

// What the grant said that the lease does not know.
struct TicketedGrant {
  LeaseId lease = 0;
  SessionId holder = 0;
  std::string label;
  uint64_t generation = 0;
  uint32_t slot = 0;
  bool device = false;  // Device memory was asked for.
  TimerId timer = 0;    // Ends the ticket.
};

class LeaseTickets {
 public:
  // One for each lease: an earlier one is not good any more (its timer is returned).
  std::optional<TimerId> Put(uint32_t uid, const LeaseTicket& ticket, TicketedGrant grant);
  // Uses the ticket up. Nullopt: there is none of this uid.
  std::optional<TicketedGrant> Take(uint32_t uid, const LeaseTicket& ticket);
  // The ticket of a lease ends unused; nullopt: it has none. Who has redeemed one stays.
  std::optional<TicketedGrant> Drop(LeaseId lease);

  void NoteRedeemed(LeaseId lease, SessionId by) { redeemed_[lease] = by; }
  bool HasRedeemed(LeaseId lease, SessionId session) const;
  void ForgetRedeemed(LeaseId lease) { redeemed_.erase(lease); }

  size_t size() const { return tickets_.size(); }

 private:
  using Key = std::pair<uint32_t, LeaseTicket>;
  std::map<Key, TicketedGrant> tickets_;
  std::map<LeaseId, Key> of_lease_;
  std::map<LeaseId, SessionId> redeemed_;
};

}  // namespace modelhost
