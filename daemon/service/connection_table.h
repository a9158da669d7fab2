// Which peer is behind "fd:N", the only name that gRPC gives the connection of a call.
//
// Descriptor numbers are reused, and a call that a closed connection left in a queue must never be
// taken for one of a newer connection. So every accepted socket moves to a number of its own in a
// range far from where the kernel puts other descriptors; numbers are handed out in rising order,
// around the range, and one whose socket has closed rests for `quarantine` before it may come
// again. A call that names a number which is not in the table has no peer.
//
// gRPC does not tell when a connection ends; the table finds out by looking, at most once a second,
// while connections are admitted. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"

namespace modelhost {

class ConnectionTable {
 public:
  struct Limits {
    int first_number = 0;
    int last_number = 0;  // Inclusive.
    size_t most_connections = 1024;
    absl::Duration quarantine = absl::Seconds(30);
  };
  // A range that leaves low numbers alone and fits `most_fds` (RLIMIT_NOFILE).
  static Limits LimitsFor(int64_t most_fds);

  // `clock` outlives the table.
  ConnectionTable(Clock& clock, Limits limits);

  // The same socket under a number of its own, which is `peer` from now on.
  //   RESOURCE_EXHAUSTED  `most_of_uid` or more connections of that uid are open, or too many in
  //                       all, or every number is in use or resting
  absl::StatusOr<UniqueFd> Admit(UniqueFd socket, const Peer& peer, size_t most_of_uid);

  // `grpc_peer` is ServerContext::peer(). Copy it at the start of a call.
  std::optional<Peer> Find(absl::string_view grpc_peer) const;

  size_t open_connections() const;

 private:
  struct Entry {
    Peer peer;
    uint64_t device = 0;  // With the inode: this socket and no other.
    uint64_t inode = 0;
    std::optional<absl::Duration> closed_at;
  };

  void Sweep(absl::Duration now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoom(uint32_t uid, size_t most_of_uid) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  Clock& clock_;
  const Limits limits_;

  mutable absl::Mutex mutex_;
  std::map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // Open and resting ones, by number.
  std::map<uint32_t, size_t> open_of_uid_ ABSL_GUARDED_BY(mutex_);
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  int next_ ABSL_GUARDED_BY(mutex_);
  absl::Duration swept_ ABSL_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
};

}  // namespace modelhost
