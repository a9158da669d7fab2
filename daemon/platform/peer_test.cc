// Who is there, and what they may do: the kernel's word, never the message's.
#include "daemon/platform/peer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "daemon/platform/descriptor.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;

struct Pair {
  UniqueFd a;
  UniqueFd b;
};
Pair MakePair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

TEST(PeerOf, TellsTheProcessAtTheOtherEnd) {
  const Pair pair = MakePair();
  const auto peer = PeerOf(pair.a);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::getuid());
  EXPECT_EQ(peer->gid, ::getgid());
  EXPECT_EQ(CommOf(peer->pid), std::string(program_invocation_short_name).substr(0, 15));
  std::vector<uint32_t> own(static_cast<size_t>(::getgroups(0, nullptr)));
  ASSERT_EQ(::getgroups(static_cast<int>(own.size()), own.data()), static_cast<int>(own.size()));
  EXPECT_EQ(peer->groups, own);
}

TEST(PeerOf, TakesMoreGroupsThanItsFirstBufferHolds) {
  if (::getuid() != 0) GTEST_SKIP() << "only root may choose its groups";
  // A child that has 1,000 groups when it makes its sockets.
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<gid_t> groups(1000);
    for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<gid_t>(5000 + i);
    if (::setgroups(groups.size(), groups.data()) != 0) ::_exit(1);
    const Pair pair = MakePair();
    const auto peer = PeerOf(pair.a);
    ::_exit(peer.ok() && peer->groups.size() == 1000 && peer->groups.back() == 5999 ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(PeerOf, ADescriptorThatIsNoSocketIsAnError) {
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(PeerOf(file).ok());
}

Peer Somebody(uint32_t uid, uint32_t gid, std::vector<uint32_t> groups) {
  Peer peer;
  peer.uid = uid;
  peer.gid = gid;
  peer.groups = std::move(groups);
  return peer;
}

TEST(AccessPolicy, OwnUidAndRootMayDoEverything) {
  const AccessPolicy policy = AccessPolicy::Make({}, {}, 1234, nullptr);
  EXPECT_TRUE(policy.MayCommand(Somebody(1234, 9, {})));
  EXPECT_TRUE(policy.MayCommand(Somebody(0, 0, {})));
  EXPECT_TRUE(policy.MayRead(Somebody(1234, 9, {})));
  EXPECT_FALSE(policy.MayRead(Somebody(1235, 9, {})));
}

TEST(AccessPolicy, GroupsGiveTheirRightAndNoMore) {
  const AccessPolicy policy = AccessPolicy::Make({"700"}, {"800"}, 1, nullptr);
  EXPECT_TRUE(policy.MayRead(Somebody(5, 700, {})));
  EXPECT_TRUE(policy.MayRead(Somebody(5, 6, {3, 700})));
  EXPECT_FALSE(policy.MayCommand(Somebody(5, 700, {700})));
  EXPECT_TRUE(policy.MayCommand(Somebody(5, 6, {800})));
  EXPECT_TRUE(policy.MayRead(Somebody(5, 6, {800})));
  EXPECT_FALSE(policy.MayRead(Somebody(5, 6, {701, 799})));
}

TEST(AccessPolicy, NamesAreResolvedAndUnknownOnesReported) {
  std::vector<std::string> unknown;
  // Group 0 is "root" on every Linux.
  const AccessPolicy policy =
      AccessPolicy::Make({"root", "no-such-group-a"}, {"no-such-group-b"}, 1, &unknown);
  EXPECT_TRUE(policy.MayRead(Somebody(5, 0, {})));
  EXPECT_THAT(unknown, ElementsAre("no-such-group-a", "no-such-group-b"));
}

TEST(AccessPolicy, AnUnknownGroupGivesNobodyARight) {
  std::vector<std::string> unknown;
  const AccessPolicy policy = AccessPolicy::Make({"no-such-group"}, {"-1"}, 1, &unknown);
  EXPECT_FALSE(policy.MayRead(Somebody(5, 0xffffffffU, {0xffffffffU})));
  EXPECT_FALSE(policy.MayRead(Somebody(5, 6, {})));
}

TEST(UnreadByPeer, IsZeroExactlyWhenThePeerHasReadEverything) {
  const Pair pair = MakePair();
  EXPECT_EQ(UnreadByPeer(pair.a), 0U);
  ASSERT_EQ(::send(pair.a.get(), "12345", 5, 0), 5);
  EXPECT_GE(UnreadByPeer(pair.a), 5U + 512U);  // What in_flight.cc relies on.
  std::array<char, 8> buffer{};
  ASSERT_EQ(::recv(pair.b.get(), buffer.data(), buffer.size(), 0), 5);
  EXPECT_EQ(UnreadByPeer(pair.a), 0U);
}

TEST(RefuseInput, LeavesTheLastReplyReadable) {
  Pair pair = MakePair();
  ASSERT_EQ(::send(pair.b.get(), "request", 7, 0), 7);
  ASSERT_EQ(::send(pair.a.get(), "reply", 5, 0), 5);
  RefuseInput(pair.a);
  std::array<char, 8> buffer{};
  ASSERT_EQ(::recv(pair.a.get(), buffer.data(), buffer.size(), 0), 7);
  EXPECT_LT(::send(pair.b.get(), "more", 4, MSG_NOSIGNAL), 0);
  pair.a.Reset();
  EXPECT_EQ(::recv(pair.b.get(), buffer.data(), buffer.size(), 0), 5);
}

TEST(ReopenReadOnly, SharesNeitherOffsetNorTheRightToWrite) {
  const UniqueFd file(::memfd_create("file", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), "abcdef", 6), 6);
  const auto again = ReopenReadOnly(file);
  ASSERT_TRUE(again.ok()) << again.status();
  std::array<char, 8> buffer{};
  EXPECT_EQ(::read(again->get(), buffer.data(), 3), 3);
  EXPECT_EQ(::lseek(file.get(), 0, SEEK_CUR), 6);
  EXPECT_LT(::write(again->get(), "x", 1), 0);
  EXPECT_NE(::fcntl(again->get(), F_GETFD) & FD_CLOEXEC, 0);
}

}  // namespace
}  // namespace modelhost
