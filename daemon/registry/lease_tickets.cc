#include "daemon/registry/lease_tickets.h"

namespace modelhost {

std::optional<TimerId> LeaseTickets::Put(uint32_t uid, const LeaseTicket& ticket,
                                         TicketedGrant grant) {
  const auto earlier = Drop(grant.lease);
  of_lease_[grant.lease] = {uid, ticket};
  tickets_[{uid, ticket}] = std::move(grant);
  return earlier.has_value() ? std::optional(earlier->timer) : std::nullopt;
}

std::optional<TicketedGrant> LeaseTickets::Take(uint32_t uid, const LeaseTicket& ticket) {
  auto node = tickets_.extract(Key{uid, ticket});
  if (node.empty()) return std::nullopt;
  of_lease_.erase(node.mapped().lease);
  return std::move(node.mapped());
}

std::optional<TicketedGrant> LeaseTickets::Drop(LeaseId lease) {
  const auto found = of_lease_.find(lease);
  if (found == of_lease_.end()) return std::nullopt;
  const Key key = found->second;
  return Take(key.first, key.second);
}

bool LeaseTickets::HasRedeemed(LeaseId lease, SessionId session) const {
  const auto found = redeemed_.find(lease);
  return found != redeemed_.end() && found->second == session;
}

}  // namespace modelhost
