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
  std::string comm;  // CommOf(pid), where somebody asked; for people only, never for decisions.
};

// SO_PEERCRED and SO_PEERGROUPS of a connected socket. `comm` stays empty.
absl::StatusOr<Peer> PeerOf(const UniqueFd& socket);

// The name of a process as /proc has it now; empty when it is gone or cannot be seen.
std::string CommOf(int32_t pid);

// What was sent on `socket` and not yet read by the peer, in the kernel's measure: at least the
// bytes of the frames, plus its bookkeeping for each. 0: the peer has read everything.
uint64_t UnreadByPeer(const UniqueFd& socket);

// From now on the peer cannot send; what it sent before can still be received. A Unix socket that
// is closed with unread input takes the last replies away from its peer (ECONNRESET): call this
// and receive what is left before closing.
void RefuseInput(const UniqueFd& socket);

// The peer reads what was sent before and then the end, whenever the socket itself is closed.
void HangUp(const UniqueFd& socket);

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
