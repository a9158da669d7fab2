#include "daemon/registry/lease_table.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace modelhost {

SessionId LeaseTable::BeginSession(const Peer& peer, const std::string& transport, absl::Time now) {
  const SessionId id = next_session_++;
  sessions_.emplace(id, Session{id, peer, transport, now, {}});
  return id;
}

const Session* LeaseTable::NameSession(SessionId session, std::string comm) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return nullptr;
  it->second.peer.comm = std::move(comm);
  return &it->second;
}

std::vector<Lease> LeaseTable::EndSession(SessionId session) {
  std::vector<Lease> ended;
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return ended;
  const std::set<LeaseId> held = it->second.leases;
  for (const LeaseId lease : held) ended.push_back(Take(leases_.find(lease)));
  sessions_.erase(it);
  return ended;
}

LeaseId LeaseTable::Grant(SessionId session, const VersionKey& key, const std::string& label,
                          const std::string& transport, absl::Time now, const std::string& gpu) {
  const LeaseId id = next_lease_++;
  leases_.emplace(id, Lease{id, session, key, label, transport, now, gpu});
  Session& holder = sessions_.at(session);
  holder.leases.insert(id);
  ++of_uid_[holder.peer.uid];
  ++counts_[key];
  return id;
}

absl::StatusOr<Lease> LeaseTable::Release(SessionId session, LeaseId lease) {
  if (Find(session, lease) == nullptr) {
    return absl::NotFoundError(absl::StrCat("lease ", lease, ": not held by this connection"));
  }
  return Take(leases_.find(lease));
}

absl::StatusOr<Lease> LeaseTable::Evict(LeaseId lease) {
  const auto it = leases_.find(lease);
  if (it == leases_.end()) {
    return absl::NotFoundError(absl::StrCat("lease ", lease, ": there is none of this number"));
  }
  Lease lease_ended = Take(it);
  const auto session = sessions_.find(lease_ended.session);
  if (session == sessions_.end()) return lease_ended;
  for (auto& image : std::exchange(lease_ended.device_memory, {})) {
    auto& kept = session->second.kept;
    const auto same = std::ranges::find_if(
        kept, [&](const Session::Kept& one) { return one.image->regions == image->regions; });
    if (same != kept.end()) {
      same->leases.insert(lease);
    } else {
      kept.push_back({lease_ended.key, {lease}, std::move(image)});
    }
  }
  return lease_ended;
}

const Lease* LeaseTable::Find(SessionId session, LeaseId lease) const {
  const auto it = leases_.find(lease);
  return it == leases_.end() || it->second.session != session ? nullptr : &it->second;
}

uint64_t LeaseTable::CountOf(const VersionKey& key) const {
  const auto it = counts_.find(key);
  return it == counts_.end() ? 0 : it->second;
}

Lease LeaseTable::Take(std::map<LeaseId, Lease>::iterator it) {
  Lease lease = std::move(it->second);
  leases_.erase(it);
  if (const auto session = sessions_.find(lease.session); session != sessions_.end()) {
    session->second.leases.erase(lease.id);
    const auto own = of_uid_.find(session->second.peer.uid);
    if (--own->second == 0) of_uid_.erase(own);
  }
  if (!lease.released) Uncount(lease.key);
  return lease;
}

void LeaseTable::Uncount(const VersionKey& key) {
  if (const auto count = counts_.find(key); --count->second == 0) counts_.erase(count);
}

uint64_t LeaseTable::CountOfUid(uint32_t uid) const {
  const auto it = of_uid_.find(uid);
  return it == of_uid_.end() ? 0 : it->second;
}

void LeaseTable::MarkStale(LeaseId lease, absl::Duration now) {
  leases_.at(lease).stale_since = now;
}

void LeaseTable::ReviewStale(const std::string& model,
                             absl::FunctionRef<bool(const Lease&)> is_stale, absl::Duration now) {
  for (auto& [id, lease] : leases_) {
    if (lease.key.model != model) continue;
    if (!is_stale(lease)) {
      lease.stale_since = absl::InfiniteDuration();
    } else if (lease.stale_since == absl::InfiniteDuration()) {
      lease.stale_since = now;
    }
  }
}

void LeaseTable::LetGo(const VersionKey& key) {
  for (auto& [id, lease] : leases_) {
    if (lease.key != key || lease.released) continue;
    lease.released = true;
    Uncount(key);
  }
}

void LeaseTable::Hand(LeaseId lease, const DeviceImage& image) {
  if (image.regions.empty()) return;
  auto& handed = leases_.at(lease).device_memory;
  const bool there = std::ranges::any_of(
      handed, [&](const auto& before) { return before->regions == image.regions; });
  if (!there) handed.push_back(std::make_shared<const DeviceImage>(image));
}

LeaseTable::Images LeaseTable::TakeKept(SessionId session) {
  Images taken;
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return taken;
  for (Session::Kept& kept : std::exchange(it->second.kept, {})) {
    taken.push_back(std::move(kept.image));
  }
  return taken;
}

LeaseTable::Images LeaseTable::TakeKept(SessionId session, LeaseId lease) {
  Images taken;
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return taken;
  std::erase_if(it->second.kept, [&](Session::Kept& kept) {
    if (kept.leases.erase(lease) == 0 || !kept.leases.empty()) return false;
    taken.push_back(std::move(kept.image));
    return true;
  });
  return taken;
}

LeaseTable::Images LeaseTable::TakeLost() {
  Images taken;
  for (auto& [id, lease] : leases_) {
    std::erase_if(lease.device_memory, [&](auto& image) {
      if (!image->lost()) return false;
      taken.push_back(std::move(image));
      return true;
    });
  }
  for (auto& [id, session] : sessions_) {
    std::erase_if(session.kept, [&](Session::Kept& kept) {
      if (!kept.image->lost()) return false;
      taken.push_back(std::move(kept.image));
      return true;
    });
  }
  return taken;
}

}  // namespace modelhost
