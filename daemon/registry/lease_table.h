// Who holds what. A lease ends when it is released or when its session ends, whichever comes first.
//
// Control thread only. Granting and ending are O(log n) and free nothing big.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/peer.h"
#include "daemon/registry/ids.h"

namespace modelhost {

struct Lease {
  LeaseId id = 0;
  SessionId session = 0;
  VersionKey key;
  std::string label;      // What was asked for; empty for a fixed version.
  std::string transport;  // "host_file" or "host_memfd".
  absl::Time since;
};

struct Session {
  SessionId id = 0;
  Peer peer;
  std::string transport;  // "native" (handles.sock) or "grpc".
  absl::Time since;
  std::set<LeaseId> leases;
};

class LeaseTable {
 public:
  SessionId BeginSession(const Peer& peer, const std::string& transport, absl::Time now);
  // Sets its peer's comm. Null: there is no such session.
  const Session* NameSession(SessionId session, std::string comm);
  // Returns the leases that ended with it.
  std::vector<Lease> EndSession(SessionId session);

  LeaseId Grant(SessionId session, const VersionKey& key, const std::string& label,
                const std::string& transport, absl::Time now);
  // NOT_FOUND unless `session` holds `lease`: nobody can release what is another's.
  absl::StatusOr<Lease> Release(SessionId session, LeaseId lease);
  // Ends a lease whoever holds it (evict).
  absl::StatusOr<Lease> Evict(LeaseId lease);

  const Lease* Find(SessionId session, LeaseId lease) const;
  uint64_t CountOf(const VersionKey& key) const;
  const std::map<LeaseId, Lease>& leases() const { return leases_; }
  const std::map<SessionId, Session>& sessions() const { return sessions_; }

 private:
  Lease Take(std::map<LeaseId, Lease>::iterator it);

  LeaseId next_lease_ = 1;
  SessionId next_session_ = 1;
  std::map<LeaseId, Lease> leases_;
  std::map<SessionId, Session> sessions_;
  std::map<VersionKey, uint64_t> counts_;
};

}  // namespace modelhost
