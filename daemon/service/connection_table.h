// Which peer is behind "fd:N", the only name that gRPC gives the connection of a call.
//
// Descriptor numbers are reused, and a call that a closed connection left in a queue must never be
// taken for one of a newer connection. So every accepted socket moves to a number of its own in a
// range far from where the kernel puts other descriptors, and one whose socket has closed rests for
// `quarantine` before it may come again. A call that names a number which is not in the table has
// no peer.
//
// Numbers and places are a common good, so each standing has a share: of strangers and readers a
// uid may have only so many open, and only so many numbers in use or resting; all of them together
// leave a quarter of both to those who may command. Connecting and closing in a loop thus costs the
// one who does it his own share.
//
// gRPC does not tell when a connection ends; the table finds out by looking at the open ones, at
// most once a second, or every kRefusalSweep while somebody is refused; at those of one uid
// whenever that uid has too many. What rests costs nothing. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

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
  enum class Standing { kStranger, kReader, kCommander };  // What the peer may do at all.
  static constexpr absl::Duration kRefusalSweep = absl::Milliseconds(20);

  struct Limits {
    int first_number = 0;
    int last_number = 0;  // Inclusive.
    size_t most_connections = 1024;
    size_t most_of_stranger = 8;  // Open, of one uid.
    size_t most_of_uid = 256;     // The same for readers and commanders.
    absl::Duration quarantine = absl::Seconds(30);
  };
  // A range that leaves low numbers alone and fits `most_fds` (RLIMIT_NOFILE).
  static Limits LimitsFor(int64_t most_fds);

  // `clock` outlives the table.
  ConnectionTable(Clock& clock, Limits limits);

  // The same socket under a number of its own, which is `peer` from now on.
  //   RESOURCE_EXHAUSTED  says which share is used up: the uid's, its standing's, or all of it
  absl::StatusOr<UniqueFd> Admit(UniqueFd socket, const Peer& peer, Standing standing);

  // `grpc_peer` is ServerContext::peer(). Copy it at the start of a call.
  std::optional<Peer> Find(absl::string_view grpc_peer) const;

  size_t open_connections() const;

 private:
  struct Entry {
    Peer peer;
    Standing standing = Standing::kStranger;
    uint64_t device = 0;  // With the inode: this socket and no other.
    uint64_t inode = 0;
  };
  struct Tally {
    size_t open = 0;
    size_t numbers = 0;  // In use or resting.
  };

  // Finds closed connections (all, or one uid's).
  void FindClosed(absl::Duration now, std::optional<uint32_t> uid)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // That of all, and lets those numbers go that have rested.
  void Sweep(absl::Duration now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // OK, or what is used up.
  absl::Status CheckRoom(uint32_t uid, Standing standing) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<UniqueFd> MoveToOwnNumber(const UniqueFd& socket)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Tally& Of(Standing standing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return of_standing_[static_cast<size_t>(standing)];
  }
  const Tally& Of(Standing standing) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return of_standing_[static_cast<size_t>(standing)];
  }

  Clock& clock_;
  const Limits limits_;

  mutable absl::Mutex mutex_;
  std::unordered_map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);  // By number.
  std::vector<int> open_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<absl::Duration, int>> resting_ ABSL_GUARDED_BY(mutex_);  // Since when.
  std::deque<int> free_ ABSL_GUARDED_BY(mutex_);  // The one that is free longest comes first.
  std::map<uint32_t, Tally> of_uid_ ABSL_GUARDED_BY(mutex_);
  std::array<Tally, 3> of_standing_ ABSL_GUARDED_BY(mutex_){};
  absl::Duration swept_ ABSL_GUARDED_BY(mutex_) = -absl::InfiniteDuration();
};

}  // namespace modelhost
