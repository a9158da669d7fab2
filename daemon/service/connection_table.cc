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
  // What the fd store gives back after a restart lies in one piece at the bottom.
  constexpr int64_t kHighFirst = 49152;
  const int64_t first =
      most_fds >= kHighFirst + kMostNumbers ? kHighFirst : std::min<int64_t>(1024, most_fds / 4);
  limits.first_number = static_cast<int>(first);
  limits.last_number = static_cast<int>(std::min(most_fds, first + kMostNumbers) - 1);
  limits.most_connections =
      std::min<size_t>(limits.most_connections, static_cast<size_t>(most_fds / 4));
  return limits;
}

ConnectionTable::ConnectionTable(Clock& clock, Limits limits) : clock_(clock), limits_(limits) {
  absl::MutexLock lock(&mutex_);
  for (int number = limits.first_number; number <= limits.last_number; ++number) {
    free_.push_back(number);
  }
}

absl::StatusOr<UniqueFd> ConnectionTable::Admit(UniqueFd socket, const Peer& peer,
                                                Standing standing) {
  const auto id = IdOf(socket.get());
  if (!id.has_value()) return ErrnoStatus(errno, "control connection");
  const absl::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  if (now - swept_ >= absl::Seconds(1)) Sweep(now);
  absl::Status room = CheckRoom(peer.uid, standing);
  if (!room.ok()) {
    FindClosed(now, peer.uid);
    room = CheckRoom(peer.uid, standing);
  }
  if (!room.ok() && now - swept_ >= kRefusalSweep) {
    Sweep(now);
    room = CheckRoom(peer.uid, standing);
  }
  if (!room.ok()) return room;
  auto moved = MoveToOwnNumber(socket);
  if (!moved.ok()) return moved;
  entries_[moved->get()] = {peer, standing, id->device, id->inode};
  open_.push_back(moved->get());
  for (Tally* tally : {&of_uid_[peer.uid], &Of(standing)}) {
    ++tally->open;
    ++tally->numbers;
  }
  return moved;
}

absl::StatusOr<UniqueFd> ConnectionTable::MoveToOwnNumber(const UniqueFd& socket) {
  constexpr size_t kMostTries = 64;
  for (size_t tries = std::min(free_.size(), kMostTries); tries > 0; --tries) {
    const int number = free_.front();
    free_.pop_front();
    UniqueFd moved(fcntl(socket.get(), F_DUPFD_CLOEXEC, number));
    const int error = moved.valid() ? 0 : errno;
    if (moved.valid() && moved.get() == number) return moved;
    // Something else has this one, and all up to the one that came. It is looked at again in its
    // turn. The regions of a version with many files may have thousands: so the one that came is
    // taken where it is free.
    free_.push_back(number);
    if (moved.valid()) {
      const auto came = std::find(free_.begin(), free_.end(), moved.get());
      if (came != free_.end()) {
        free_.erase(came);
        return moved;
      }
    }
    if (error != 0 && error != EMFILE && error != EINVAL) {
      return ErrnoStatus(error, "control connection");
    }
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("control connection: of ", limits_.last_number - limits_.first_number + 1,
                   " descriptor numbers none is free (connect less often, or raise "
                   "RLIMIT_NOFILE)"));
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
  return open_.size();
}

absl::Status ConnectionTable::CheckRoom(uint32_t uid, Standing standing) const {
  const auto refuse = [&](absl::string_view whose, size_t have, absl::string_view what) {
    return absl::ResourceExhaustedError(
        absl::StrCat("control connection of uid ", uid, ": ", whose, have, " ", what));
  };
  const size_t numbers = static_cast<size_t>(limits_.last_number - limits_.first_number) + 1;
  if (open_.size() >= limits_.most_connections) {
    return refuse("", open_.size(), "are open, as many as there may be (close some)");
  }
  const auto found = of_uid_.find(uid);
  const Tally own = found == of_uid_.end() ? Tally{} : found->second;
  const bool stranger = standing == Standing::kStranger;
  if (own.open >= (stranger ? limits_.most_of_stranger : limits_.most_of_uid)) {
    return refuse("it has ", own.open, "open, as many as it may (close some)");
  }
  if (standing == Standing::kCommander) return absl::OkStatus();

  // A stranger never has use for many; a reader may run small programs in a loop.
  if (own.numbers >= std::max<size_t>(numbers / (stranger ? 64 : 4), 1)) {
    return refuse("it made ", own.numbers, "lately, as many as it may (connect less often)");
  }
  const Tally& strangers = Of(Standing::kStranger);
  const Tally& readers = Of(Standing::kReader);
  const auto within = [&](const Tally& all, size_t parts, size_t of) {
    return all.open < std::max<size_t>(limits_.most_connections * parts / of, 1) &&
           all.numbers < std::max<size_t>(numbers * parts / of, 1);
  };
  if (stranger && !within(strangers, 1, 8)) {
    return refuse("users without rights made ", strangers.numbers, "lately (connect less often)");
  }
  const Tally both{strangers.open + readers.open, strangers.numbers + readers.numbers};
  if (!within(both, 3, 4)) {
    return refuse("users who may not command made ", both.numbers, "lately (connect less often)");
  }
  return absl::OkStatus();
}

void ConnectionTable::FindClosed(absl::Duration now, std::optional<uint32_t> uid) {
  size_t kept = 0;
  for (const int number : open_) {
    const Entry& entry = entries_.at(number);
    if (uid.has_value() && entry.peer.uid != *uid) {
      open_[kept++] = number;
      continue;
    }
    const auto id = IdOf(number);
    if (id.has_value() && id->device == entry.device && id->inode == entry.inode) {
      open_[kept++] = number;
      continue;
    }
    --of_uid_[entry.peer.uid].open;
    --Of(entry.standing).open;
    resting_.emplace_back(now, number);
  }
  open_.resize(kept);
}

void ConnectionTable::Sweep(absl::Duration now) {
  swept_ = now;
  FindClosed(now, std::nullopt);
  while (!resting_.empty() && now - resting_.front().first >= limits_.quarantine) {
    const int number = resting_.front().second;
    resting_.pop_front();
    const auto entry = entries_.find(number);
    const auto tally = of_uid_.find(entry->second.peer.uid);
    if (--tally->second.numbers == 0) of_uid_.erase(tally);
    --Of(entry->second.standing).numbers;
    entries_.erase(entry);
    free_.push_back(number);
  }
}

}  // namespace modelhost
