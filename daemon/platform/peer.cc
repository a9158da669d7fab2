#include "daemon/platform/peer.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

// The kernel allows 65536 groups for one process.
constexpr size_t kMaxGroups = 65536;
// A group's entry lists its members, so it can be large; this is far beyond any real one.
constexpr size_t kMaxGroupEntryBytes = size_t{16} << 20;

absl::StatusOr<std::vector<uint32_t>> GroupsOf(const UniqueFd& socket) {
  static_assert(sizeof(gid_t) == sizeof(uint32_t));
  std::vector<uint32_t> groups(32);
  while (true) {
    socklen_t bytes = static_cast<socklen_t>(groups.size() * sizeof(uint32_t));
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
      groups.resize(bytes / sizeof(uint32_t));
      return groups;
    }
    if (errno == ENODATA) return std::vector<uint32_t>();
    if (errno != ERANGE) return ErrnoStatus(errno, "groups of a peer");
    // The kernel has put the needed size into `bytes`.
    const size_t wanted = std::max<size_t>(bytes / sizeof(uint32_t), groups.size() * 2);
    if (wanted > kMaxGroups) return ErrnoStatus(ERANGE, "groups of a peer");
    groups.resize(wanted);
  }
}

std::optional<uint32_t> GroupNumber(const std::string& entry) {
  uint32_t number = 0;
  if (absl::SimpleAtoi(entry, &number)) return number;
  std::vector<char> buffer(1024);
  while (true) {
    group found{};
    group* result = nullptr;
    const int error = ::getgrnam_r(entry.c_str(), &found, buffer.data(), buffer.size(), &result);
    if (error == ERANGE && buffer.size() < kMaxGroupEntryBytes) {
      buffer.resize(buffer.size() * 2);
      continue;
    }
    if (error == EINTR) continue;
    if (result == nullptr) return std::nullopt;
    return found.gr_gid;
  }
}

std::vector<uint32_t> GroupNumbers(const std::vector<std::string>& entries,
                                   std::vector<std::string>* unknown) {
  std::vector<uint32_t> numbers;
  for (const std::string& entry : entries) {
    if (const auto number = GroupNumber(entry); number.has_value()) {
      numbers.push_back(*number);
    } else if (unknown != nullptr) {
      unknown->push_back(entry);
    }
  }
  return numbers;
}

bool IsMember(const Peer& peer, const std::vector<uint32_t>& wanted) {
  return std::ranges::any_of(wanted, [&](uint32_t group) {
    return group == peer.gid || std::ranges::find(peer.groups, group) != peer.groups.end();
  });
}

}  // namespace

absl::StatusOr<Peer> PeerOf(const UniqueFd& socket) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return ErrnoStatus(errno, "credentials of a peer");
  }
  auto groups = GroupsOf(socket);
  if (!groups.ok()) return groups.status();
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  peer.groups = *std::move(groups);
  return peer;
}

std::string CommOf(int32_t pid) {
  if (pid <= 0) return "";  // In a pid namespace that this process cannot see.
  const std::string path = absl::StrCat("/proc/", pid, "/comm");
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return "";
  std::array<char, 64> text;
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got <= 0) return "";
  return std::string(
      absl::StripSuffix(absl::string_view(text.data(), static_cast<size_t>(got)), "\n"));
}

uint64_t UnreadByPeer(const UniqueFd& socket) {
  int unread = 0;
  if (::ioctl(socket.get(), SIOCOUTQ, &unread) != 0 || unread < 0) return 0;
  return static_cast<uint64_t>(unread);
}

void RefuseInput(const UniqueFd& socket) {
  // Fails only when the peer has gone already, and then there is nothing to refuse.
  (void)::shutdown(socket.get(), SHUT_RD);
}

void HangUp(const UniqueFd& socket) { (void)::shutdown(socket.get(), SHUT_RDWR); }

AccessPolicy AccessPolicy::Make(const std::vector<std::string>& read_groups,
                                const std::vector<std::string>& admin_groups, uint32_t own_uid,
                                std::vector<std::string>* unknown) {
  AccessPolicy policy;
  policy.own_uid_ = own_uid;
  policy.read_ = GroupNumbers(read_groups, unknown);
  policy.admin_ = GroupNumbers(admin_groups, unknown);
  return policy;
}

bool AccessPolicy::MayCommand(const Peer& peer) const {
  return peer.uid == own_uid_ || peer.uid == 0 || IsMember(peer, admin_);
}

bool AccessPolicy::MayRead(const Peer& peer) const {
  return MayCommand(peer) || IsMember(peer, read_);
}

}  // namespace modelhost
