#include "proto/handle/fd_channel.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace modelhost {
namespace {

constexpr size_t kSendControlBytes = CMSG_SPACE(sizeof(int) * abi::kMaxFdsPerFrame);
// Room for all that the kernel takes with one message (SCM_MAX_FD): more than a frame may carry is
// then malformed, and MSG_CTRUNC means that this process is out of descriptors and nothing else.
constexpr size_t kReceiveControlBytes = CMSG_SPACE(sizeof(int) * 253);

// A reply that needs no disk comes within this; falling asleep and being woken costs as much.
constexpr std::chrono::microseconds kStayAwake{50};

std::vector<UniqueFd> TakeFds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

// Waits until `socket` has something to read. False: the deadline came first.
bool WaitReadable(const UniqueFd& socket, SteadyTime deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{socket.get(), POLLIN, 0};
    const int timeout = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
    const int ready = ::poll(&entry, 1, timeout);
    if (ready > 0) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

}  // namespace

Result<UniqueFd> ConnectSeqpacket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error{Code::kInvalidArgument, path + ": longer than a socket path may be", 0};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoError(errno, "make a socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoError(errno, path);
  }
  return socket;
}

Result<std::pair<UniqueFd, UniqueFd>> MakeSeqpacketPair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    return ErrnoError(errno, "make a pair of sockets");
  }
  return std::pair(UniqueFd(ends[0]), UniqueFd(ends[1]));
}

Result<void> SendFrame(const UniqueFd& socket, std::span<const std::byte> head,
                       std::span<const std::byte> tail, std::span<const UniqueFd* const> fds) {
  if (fds.size() > abi::kMaxFdsPerFrame) {
    return Error{Code::kInternal, "a frame with more descriptors than it may carry", 0};
  }
  std::array<iovec, 2> parts{};
  parts[0] = {const_cast<std::byte*>(head.data()), head.size()};
  parts[1] = {const_cast<std::byte*>(tail.data()), tail.size()};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = tail.empty() ? 1 : 2;
  alignas(cmsghdr) std::array<char, kSendControlBytes> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    for (size_t i = 0; i < fds.size(); ++i) {
      const int fd = fds[i]->get();
      std::memcpy(CMSG_DATA(part) + i * sizeof(int), &fd, sizeof(int));
    }
  }
  while (true) {
    if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return {};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == ENOBUFS) {
      return Error{Code::kResourceExhausted, "send a frame: the peer reads too slowly", errno};
    }
    if (errno == ETOOMANYREFS) {
      return Error{Code::kResourceExhausted,
                   "send a frame: too many descriptors of this user are in flight", errno};
    }
    return ErrnoError(errno, "send a frame");
  }
}

Result<ReceivedFrame> ReceiveFrame(const UniqueFd& socket, std::span<std::byte> buffer,
                                   ReceiveWait wait, SteadyTime deadline,
                                   std::vector<UniqueFd>* refused) {
  alignas(cmsghdr) std::array<char, kReceiveControlBytes> control;
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  ssize_t got = 0;
  SteadyTime awake_until{};
  while (true) {
    message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got >= 0) break;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ErrnoError(errno, "receive a frame");
    if (wait == ReceiveWait::kUntilDeadline) {
      const SteadyTime now = std::chrono::steady_clock::now();
      if (awake_until == SteadyTime{}) awake_until = std::min(deadline, now + kStayAwake);
      if (now < awake_until) {
        ::sched_yield();
        continue;
      }
    }
    if (wait == ReceiveWait::kNo || !WaitReadable(socket, deadline)) {
      return Error{Code::kDeadlineExceeded, "receive a frame: nothing came in time", 0};
    }
  }
  ReceivedFrame frame;
  frame.fds = TakeFds(message);
  const auto refuse = [&](Code code, const char* why) {
    if (refused != nullptr) std::ranges::move(frame.fds, std::back_inserter(*refused));
    return Error{code, why, 0};
  };
  if (got == 0) return refuse(Code::kUnavailable, "the peer closed the connection");
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return refuse(Code::kResourceExhausted,
                  "receive a frame: descriptors were lost; raise RLIMIT_NOFILE (ulimit -n) of this "
                  "process");
  }
  if ((message.msg_flags & MSG_TRUNC) != 0 || static_cast<size_t>(got) < sizeof(abi::FrameHeader)) {
    return refuse(Code::kInvalidArgument, "malformed frame: its length is wrong");
  }
  std::memcpy(&frame.header, buffer.data(), sizeof(abi::FrameHeader));
  frame.bytes = static_cast<size_t>(got);
  if (frame.header.magic != abi::kFrameMagic || frame.header.bytes != frame.bytes) {
    return refuse(Code::kInvalidArgument, "malformed frame: bad magic or length");
  }
  if (frame.header.fd_count != frame.fds.size() || frame.fds.size() > abi::kMaxFdsPerFrame) {
    return refuse(Code::kInvalidArgument, "malformed frame: its descriptor count is wrong");
  }
  return frame;
}

void EndChannel(const UniqueFd& socket) { (void)::shutdown(socket.get(), SHUT_RDWR); }

}  // namespace modelhost
