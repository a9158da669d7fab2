#include "daemon/platform/fd_closer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/hanging_fd.h"

namespace modelhost {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

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
