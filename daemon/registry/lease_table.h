// Who holds what. A lease ends when it is released or when its session ends, whichever comes first.
//
// Control thread only. Granting and ending are O(log n) and free nothing big.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/peer.h"
#include "daemon/region/device_region.h"
#include "daemon/registry/ids.h"

namespace modelhost {

struct Lease {
  LeaseId id = 0;
  SessionId session = 0;
  VersionKey key;
  std::string label;      // What was asked for; empty for a fixed version.
  std::string transport;  // "host_file", "host_memfd", "device_vmm_fd", ...
  absl::Time since;
  std::string gpu = {};       // UUID of the GPU whose memory it has; empty: host memory alone.
  bool gpu_required = false;  // Without device memory it would not have been granted.
  // What its holder was handed of device memory and has mapped: it stays, and stays booked, until
  // the lease ends, whatever the version has by then.
  std::vector<std::shared_ptr<const DeviceImage>> device_memory = {};
  // The daemon let go of the version at a drain deadline; the client's mappings stay good.
  bool released = false;
  // How long its label has named another version or, of a fixed version, none has named it. Unset:
  // it is what was asked for. Filled in by ModelManager::Leases.
  std::optional<absl::Duration> stale_for = std::nullopt;
  absl::Duration stale_since = absl::InfiniteDuration();  // Monotonic; infinite: not stale.
};

struct Session {
  SessionId id = 0;
  Peer peer;
  std::string transport;  // "native" (handles.sock) or "grpc".
  absl::Time since;
  std::set<LeaseId> leases;
  // Of leases that were evicted: the process still has it mapped.
  struct Kept {
    VersionKey key;
    std::set<LeaseId> leases;  // Those that were handed it.
    std::shared_ptr<const DeviceImage> image;
  };
  std::vector<Kept> kept = {};
};

class LeaseTable {
 public:
  SessionId BeginSession(const Peer& peer, const std::string& transport, absl::Time now);
  // Sets its peer's comm. Null: there is no such session.
  const Session* NameSession(SessionId session, std::string comm);
  // Returns the leases that ended with it.
  std::vector<Lease> EndSession(SessionId session);

  LeaseId Grant(SessionId session, const VersionKey& key, const std::string& label,
                const std::string& transport, absl::Time now, const std::string& gpu = "");
  // NOT_FOUND unless `session` holds `lease`: nobody can release what is another's.
  absl::StatusOr<Lease> Release(SessionId session, LeaseId lease);
  // Ends a lease whoever holds it (evict). The session keeps its device memory.
  absl::StatusOr<Lease> Evict(LeaseId lease);

  const Lease* Find(SessionId session, LeaseId lease) const;
  // Of those that hold bytes: without released ones.
  uint64_t CountOf(const VersionKey& key) const;
  uint64_t CountOfUid(uint32_t uid) const;
  void MarkStale(LeaseId lease, absl::Duration now);
  // Those on `model` for which `is_stale` holds are stale from now on, or were already; the others
  // are not.
  void ReviewStale(const std::string& model, absl::FunctionRef<bool(const Lease&)> is_stale,
                   absl::Duration now);
  // The daemon's references are gone: the leases stay, and hold nothing any more but their
  // `device_memory`.
  void LetGo(const VersionKey& key);

  // The holder of the lease is handed this, unless it was before.
  void Hand(LeaseId lease, const DeviceImage& image);
  void RequireGpu(LeaseId lease) { leases_.at(lease).gpu_required = true; }
  using Images = std::vector<std::shared_ptr<const DeviceImage>>;
  // For the caller to drop where that may take a while.
  Images TakeKept(SessionId session);
  // Of one evicted lease, whose holder has let go of it now: what no other one has.
  Images TakeKept(SessionId session, LeaseId lease);
  // All that is lost: it is nobody's any more.
  Images TakeLost();
  const std::map<LeaseId, Lease>& leases() const { return leases_; }
  const std::map<SessionId, Session>& sessions() const { return sessions_; }

 private:
  void Uncount(const VersionKey& key);
  Lease Take(std::map<LeaseId, Lease>::iterator it);

  LeaseId next_lease_ = 1;
  SessionId next_session_ = 1;
  std::map<LeaseId, Lease> leases_;
  std::map<SessionId, Session> sessions_;
  std::map<VersionKey, uint64_t> counts_;
  std::map<uint32_t, uint64_t> of_uid_;
};

}  // namespace modelhost
