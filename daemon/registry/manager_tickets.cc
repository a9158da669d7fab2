// A lease that one transport holds and another brings the descriptors of.
#include <openssl/rand.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

absl::Duration ModelManager::ticket_life() const { return impl_->options.ticket_life; }

absl::StatusOr<LeaseTicket> ModelManager::IssueTicket(SessionId session, const Grant& grant,
                                                      bool device) {
  Impl& impl = *impl_;
  const auto holder = impl.leases.sessions().find(session);
  if (holder == impl.leases.sessions().end() || impl.leases.Find(session, grant.lease) == nullptr) {
    return absl::NotFoundError(absl::StrCat("lease ", grant.lease, ": not held by this stream"));
  }
  LeaseTicket ticket;
  if (RAND_bytes(ticket.data(), static_cast<int>(ticket.size())) != 1) {
    return absl::InternalError("acquire: no random numbers to be had for a ticket");
  }
  TicketedGrant ticketed{grant.lease, session, grant.label, grant.generation, grant.slot,
                         device,      0};
  ticketed.timer = impl.deps.loop.PostDelayed(
      impl.options.ticket_life,
      [&impl, lease = grant.lease] { (void)impl.lease_tickets.Drop(lease); });
  if (const auto earlier =
          impl.lease_tickets.Put(holder->second.peer.uid, ticket, std::move(ticketed));
      earlier.has_value()) {
    impl.deps.loop.CancelTimer(*earlier);
  }
  return ticket;
}

absl::StatusOr<ModelManager::RedeemedGrant> ModelManager::Redeem(SessionId session,
                                                                 const LeaseTicket& ticket) {
  Impl& impl = *impl_;
  const auto redeemer = impl.leases.sessions().find(session);
  if (redeemer == impl.leases.sessions().end()) {
    return absl::FailedPreconditionError("redeem: the session is over");
  }
  const auto ticketed = impl.lease_tickets.Take(redeemer->second.peer.uid, ticket);
  if (!ticketed.has_value()) {
    return absl::PermissionDeniedError(
        "redeem: the ticket is not known (used, too old, its lease is over, or somebody else's: "
        "acquire again)");
  }
  impl.deps.loop.CancelTimer(ticketed->timer);
  auto resident = Leased(ticketed->holder, ticketed->lease);
  if (!resident.ok()) return resident.status();
  const Lease& lease = *impl.leases.Find(ticketed->holder, ticketed->lease);
  RedeemedGrant redeemed;
  redeemed.device = ticketed->device;
  redeemed.grant.lease = lease.id;
  redeemed.grant.key = lease.key;
  redeemed.grant.label = ticketed->label;
  redeemed.grant.generation = ticketed->generation;
  redeemed.grant.slot = ticketed->slot;
  redeemed.grant.resident = *std::move(resident);
  if (!lease.gpu.empty()) {
    // Another one than at the grant, maybe, or none: it goes with the index that is handed out.
    const DeviceImage* image = redeemed.grant.resident->DeviceOf(lease.gpu);
    if (image != nullptr && image->lost()) image = nullptr;
    if (image == nullptr && lease.gpu_required) {
      return absl::FailedPreconditionError(
          absl::StrCat("redeem: ", lease.key.ToString(), ": its copy on ", lease.gpu,
                       " was lost since the grant (release the lease and acquire again)"));
    }
    if (image != nullptr) impl.leases.Hand(lease.id, *image);
    redeemed.grant.device = image;
  }
  impl.lease_tickets.NoteRedeemed(lease.id, session);
  return redeemed;
}

void ModelManager::Impl::EndTicket(LeaseId lease) {
  if (const auto ended = lease_tickets.Drop(lease); ended.has_value()) {
    deps.loop.CancelTimer(ended->timer);
  }
  lease_tickets.ForgetRedeemed(lease);
}

}  // namespace modelhost
