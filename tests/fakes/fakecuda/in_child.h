// Runs pieces of a test in processes of their own: a driver's state is a process's, and what
// matters is what happens between processes.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "proto/cuda/handles.h"

namespace modelhost {

using Environment = std::map<std::string, std::string>;

class Child {
 public:
  // `body` gets its end of a SOCK_SEQPACKET pair. No driver may be loaded in this process. `held`
  // is held across the fork: what keeps other threads from being within an allocator then.
  explicit Child(const std::function<void(int socket)>& body, const Environment& environment = {},
                 std::unique_lock<std::mutex> held = {}) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) std::_Exit(3);
      ::close(pair[0]);
      // Its GPUs are this test's alone.
      ::setenv("FAKECUDA_MACHINE", std::to_string(parent).c_str(), 0);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      body(pair[1]);
      std::fflush(nullptr);
      std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    if (held.owns_lock()) held.unlock();
    ::close(pair[1]);
    socket_ = pair[0];
  }
  Child(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(socket_);
  }

  int socket() const { return socket_; }
  pid_t pid() const { return pid_; }
  // The status of waitpid.
  int Wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }
  void ExpectGood() { EXPECT_EQ(Wait(), 0); }
  void Kill() {
    ::kill(pid_, SIGKILL);
    (void)Wait();
  }

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

inline void InChild(const std::function<void()>& body, const Environment& environment = {},
                    std::unique_lock<std::mutex> held = {}) {
  Child([&](int) { body(); }, environment, std::move(held)).ExpectGood();
}

// One byte, perhaps with a descriptor.
inline void Say(int socket, char what, int fd = -1) {
  iovec part{&what, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != 1) std::_Exit(4);
}

// 0: the other end is gone.
inline char Hear(int socket, UniqueFd* fd = nullptr) {
  char what = 0;
  iovec part{&what, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) return 0;
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  if (fd != nullptr && head != nullptr) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(head), sizeof number);
    *fd = UniqueFd(number);
  }
  return what;
}

}  // namespace modelhost
