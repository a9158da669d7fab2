#include "daemon/service/connection_table.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

// The socket behind a number, if there is one.
struct FileId {
  uint64_t device = 0;
  uint64_t inode = 0;
};
std::optional<FileId> IdOf(int number) {
  struct stat info {};
  if (fstat(number, &info) != 0) return std::nullopt;
  return FileId{info.st_dev, info.st_ino};
}

}  // namespace

ConnectionTable::Limits ConnectionTable::LimitsFor(int64_t most_fds) {
  constexpr int64_t kMostNumbers = 16384;
  Limits limits;
  const int64_t first = std::min<int64_t>(1024, most_fds / 4);
  limits.first_number = static_cast<int>(first);
  limits.last_number = static_cast<int>(std::min(most_fds, first + kMostNumbers) - 1);
  limits.most_connections =
      std::min<size_t>(limits.most_connections, static_cast<size_t>(most_fds / 4));
  return limits;
}

ConnectionTable::ConnectionTable(Clock& clock, Limits limits)
    : clock_(clock), limits_(limits), next_(limits.first_number) {}

absl::StatusOr<UniqueFd> ConnectionTable::Admit(UniqueFd socket, const Peer& peer,
                                                size_t most_of_uid) {
  const auto id = IdOf(socket.get());
  if (!id.has_value()) return ErrnoStatus(errno, "control connection");
  const absl::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  if (now - swept_ >= absl::Seconds(1) || !HasRoom(peer.uid, most_of_uid)) Sweep(now);
  if (!HasRoom(peer.uid, most_of_uid)) {
    return absl::ResourceExhaustedError(absl::StrCat("control connection of uid ", peer.uid, ": ",
                                                     open_, " are open, too many (close some)"));
  }

  const int numbers = limits_.last_number - limits_.first_number + 1;
  for (int tried = 0; tried < numbers; ++tried) {
    const int number = next_;
    next_ = number == limits_.last_number ? limits_.first_number : number + 1;
    if (entries_.contains(number)) continue;
    UniqueFd moved(fcntl(socket.get(), F_DUPFD_CLOEXEC, number));
    if (!moved.valid() && errno != EMFILE && errno != EINVAL) {
      return ErrnoStatus(errno, "control connection");
    }
    // Another number: something else has this one. Numbers above are looked at in their turn.
    if (!moved.valid() || moved.get() != number) continue;
    entries_[number] = {peer, id->device, id->inode, std::nullopt};
    ++open_;
    ++open_of_uid_[peer.uid];
    return moved;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("control connection: none of ", numbers,
                   " descriptor numbers is free (fewer calls, or a higher RLIMIT_NOFILE)"));
}

std::optional<Peer> ConnectionTable::Find(absl::string_view grpc_peer) const {
  int number = 0;
  if (!absl::ConsumePrefix(&grpc_peer, "fd:") || grpc_peer.empty() ||
      !std::all_of(grpc_peer.begin(), grpc_peer.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(grpc_peer, &number)) {
    return std::nullopt;
  }
  absl::ReaderMutexLock lock(&mutex_);
  const auto it = entries_.find(number);
  if (it == entries_.end()) return std::nullopt;
  return it->second.peer;
}

size_t ConnectionTable::open_connections() const {
  absl::ReaderMutexLock lock(&mutex_);
  return open_;
}

bool ConnectionTable::HasRoom(uint32_t uid, size_t most_of_uid) const {
  const auto it = open_of_uid_.find(uid);
  return open_ < limits_.most_connections && (it == open_of_uid_.end() || it->second < most_of_uid);
}

void ConnectionTable::Sweep(absl::Duration now) {
  swept_ = now;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    if (!entry.closed_at.has_value()) {
      const auto id = IdOf(it->first);
      const bool open = id.has_value() && id->device == entry.device && id->inode == entry.inode;
      if (!open) {
        entry.closed_at = now;
        --open_;
        const auto count = open_of_uid_.find(entry.peer.uid);
        if (--count->second == 0) open_of_uid_.erase(count);
      }
      ++it;
    } else if (now - *entry.closed_at >= limits_.quarantine) {
      it = entries_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace modelhost
