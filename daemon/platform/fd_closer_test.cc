#include "daemon/platform/fd_closer.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace modelhost {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

// A descriptor whose close waits until `peer` is closed, for an hour at most.
struct Hanging {
  UniqueFd fd;
  UniqueFd peer;
};

Hanging MakeHanging() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), generic, length), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), generic, &length), 0);
  Hanging made;
  made.fd = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(made.fd.get(), generic, length), 0);
  made.peer = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const std::vector<char> bytes(size_t{1} << 20);
  while (::send(made.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  const linger wait{1, 3600};
  EXPECT_EQ(::setsockopt(made.fd.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait)), 0);
  return made;
}

// A descriptor, and the end that tells when it was closed.
struct Watched {
  UniqueFd fd;
  UniqueFd other;
};

Watched MakeWatched() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
  return {UniqueFd(ends[1]), UniqueFd(ends[0])};
}

bool ClosedInTime(const Watched& watched) {
  const auto deadline = steady_clock::now() + seconds(20);
  while (steady_clock::now() < deadline) {
    char byte = 0;
    if (::read(watched.other.get(), &byte, 1) == 0) return true;
    // lint: allow(sleep) the pause of a poll with a deadline.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

bool EmptyInTime(const FdCloser& closer) {
  const auto deadline = steady_clock::now() + seconds(20);
  while (closer.waiting() != 0 && steady_clock::now() < deadline) {
    // lint: allow(sleep) the pause of a poll with a deadline.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return closer.waiting() == 0;
}

TEST(FdCloser, ClosesWhatItIsGiven) {
  FdCloser closer;
  std::vector<Watched> watched;
  for (uint32_t uid = 0; uid < 100; ++uid) {
    watched.push_back(MakeWatched());
    closer.Close(uid % 10, std::move(watched.back().fd));
  }
  closer.Close(5, UniqueFd());
  closer.Close(5, std::vector<UniqueFd>());
  for (const Watched& each : watched) EXPECT_TRUE(ClosedInTime(each));
  EXPECT_TRUE(EmptyInTime(closer));
}

TEST(FdCloser, ADescriptorThatHangsHoldsUpItsOwnUserAlone) {
  FdCloser closer;
  Hanging hanging = MakeHanging();
  closer.Close(7, std::move(hanging.fd));
  Watched own = MakeWatched();
  closer.Close(7, std::move(own.fd));
  for (int i = 0; i < 50; ++i) {
    Watched other = MakeWatched();
    closer.Close(8, std::move(other.fd));
    ASSERT_TRUE(ClosedInTime(other));
  }
  char byte = 0;
  EXPECT_EQ(::read(own.other.get(), &byte, 1), -1);  // Still open.
  EXPECT_EQ(closer.waiting(7), 2U);
  hanging.peer.Reset();
  EXPECT_TRUE(ClosedInTime(own));
  EXPECT_TRUE(EmptyInTime(closer));
}

TEST(FdCloser, EveryUserHasItsTurnThoughSeveralHang) {
  FdCloser closer;
  std::vector<Hanging> hanging;
  for (uint32_t uid = 1; uid < FdCloser::kMostThreads; ++uid) {
    hanging.push_back(MakeHanging());
    closer.Close(uid, std::move(hanging.back().fd));
  }
  for (uint32_t uid = 100; uid < 110; ++uid) {
    Watched other = MakeWatched();
    closer.Close(uid, std::move(other.fd));
    ASSERT_TRUE(ClosedInTime(other));
  }
  EXPECT_EQ(closer.waiting(), hanging.size());
  hanging.clear();
  EXPECT_TRUE(EmptyInTime(closer));
}

TEST(FdCloser, DestructionDoesNotWaitForWhatHangs) {
  Hanging hanging = MakeHanging();
  const auto before = steady_clock::now();
  {
    FdCloser closer;
    closer.Close(7, std::move(hanging.fd));
  }
  EXPECT_LT(steady_clock::now() - before, seconds(15));
  hanging.peer.Reset();  // Lets the thread end.
}

TEST(FdCloser, DestructionClosesWhatDoesNotHang) {
  std::vector<Watched> watched;
  {
    FdCloser closer;
    for (uint32_t uid = 0; uid < 100; ++uid) {
      watched.push_back(MakeWatched());
      closer.Close(uid % 3, std::move(watched.back().fd));
    }
  }
  for (const Watched& each : watched) {
    char byte = 0;
    EXPECT_EQ(::read(each.other.get(), &byte, 1), 0);
  }
}

}  // namespace
}  // namespace modelhost
