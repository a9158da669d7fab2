// What an attach costs when nothing is checked, kept or looked up: connect to a process that sits
// in accept(), two round trips, three descriptors, each mapped and touched in one place, all given
// back. No design with a round trip for the page and one for the grant can be faster here.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/bench/bench_util.h"

namespace modelhost::bench {

struct FloorMessage {
  uint64_t bytes[3];
};

inline void FloorSend(int socket, const std::vector<int>& fds, const FloorMessage& text) {
  iovec part{const_cast<FloorMessage*>(&text), sizeof(text)};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) Die("floor", "cannot send");
}

// False: the peer has closed.
inline bool FloorReceive(int socket, std::vector<int>* fds, FloorMessage* text) {
  iovec part{text, sizeof(*text)};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) <= 0) return false;
  fds->clear();
  if (const cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr) {
    fds->resize((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(fds->data(), CMSG_DATA(head), fds->size() * sizeof(int));
  }
  return true;
}

inline const void* FloorTouch(int fd, size_t bytes) {
  const void* at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) Die("floor", "cannot map");
  ::close(fd);
  (void)*static_cast<const volatile char*>(at);
  return at;
}

inline int FloorMemory(size_t bytes) {
  const int fd = ::memfd_create("floor", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) Die("floor", "no memory");
  const char one = 1;
  if (::pwrite(fd, &one, 1, 0) != 1) Die("floor", "cannot write");
  return fd;
}

// Nanoseconds of each round. `path` is the model file that an attach would map.
inline std::vector<uint64_t> AttachFloor(const std::string& path, int rounds) {
  constexpr size_t kPageBytes = size_t{768} << 10;
  constexpr size_t kIndexBytes = size_t{1} << 20;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat stat = {};
  if (file < 0 || ::fstat(file, &stat) != 0) Die(path, "cannot be opened");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;  // An address of the kernel's own choice.
  socklen_t length = sizeof(sa_family_t);
  const int listener = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener, 16) != 0) {
    Die("floor", "cannot listen");
  }
  length = sizeof(address);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  const pid_t server = ::fork();
  if (server == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int page = FloorMemory(kPageBytes);
    const int index = FloorMemory(kIndexBytes);
    while (true) {
      const int socket = ::accept(listener, nullptr, nullptr);
      std::vector<int> none;
      FloorMessage text{};
      if (FloorReceive(socket, &none, &text)) FloorSend(socket, {page}, text);
      if (FloorReceive(socket, &none, &text)) FloorSend(socket, {index, file}, text);
      ::close(socket);
    }
  }
  std::vector<uint64_t> samples;
  for (int i = -rounds / 10 - 1; i < rounds; ++i) {
    const uint64_t start = NowNs();
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    std::vector<int> fds;
    FloorMessage text{};
    if (::connect(socket, reinterpret_cast<sockaddr*>(&address), length) != 0) {
      Die("floor", "cannot connect");
    }
    FloorSend(socket, {}, text);
    if (!FloorReceive(socket, &fds, &text) || fds.size() != 1) Die("floor", "no page came");
    const void* page = FloorTouch(fds[0], kPageBytes);
    FloorSend(socket, {}, text);
    if (!FloorReceive(socket, &fds, &text) || fds.size() != 2) Die("floor", "no index came");
    const void* index = FloorTouch(fds[0], kIndexBytes);
    const auto bytes = static_cast<size_t>(stat.st_size);
    const void* data = FloorTouch(fds[1], bytes);
    if (i >= 0) samples.push_back(NowNs() - start);
    ::munmap(const_cast<void*>(data), bytes);
    ::munmap(const_cast<void*>(index), kIndexBytes);
    ::munmap(const_cast<void*>(page), kPageBytes);
    ::close(socket);
  }
  ::kill(server, SIGKILL);
  ::waitpid(server, nullptr, 0);
  ::close(listener);
  ::close(file);
  return samples;
}

}  // namespace modelhost::bench
