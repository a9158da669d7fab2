// Who is at the other end of a Unix socket, as the kernel tells it. Never from a message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct Peer {
  int32_t pid = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;  // Supplementary.
  std::string comm;  // From /proc at connect time; for people only, never for decisions.
};

// SO_PEERCRED and SO_PEERGROUPS of a connected socket.
absl::StatusOr<Peer> PeerOf(const UniqueFd& socket);

// Who may read and who may command. Group names are resolved once, here; unknown names are kept out
// and reported. Immutable, so any thread.
class AccessPolicy {
 public:
  // Entries are group names or decimal numbers.
  static AccessPolicy Make(const std::vector<std::string>& read_groups,
                           const std::vector<std::string>& admin_groups, uint32_t own_uid,
                           std::vector<std::string>* unknown);

  // The daemon's own uid, root, or a member of admin_groups.
  bool MayCommand(const Peer& peer) const;
  // MayCommand, or a member of read_groups.
  bool MayRead(const Peer& peer) const;

 private:
  uint32_t own_uid_ = 0;
  std::vector<uint32_t> read_;
  std::vector<uint32_t> admin_;
};

}  // namespace modelhost
