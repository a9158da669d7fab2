#include "daemon/service/connection_table.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

constexpr int kFirst = 700;
constexpr auto kStranger = ConnectionTable::Standing::kStranger;
constexpr auto kReader = ConnectionTable::Standing::kReader;
constexpr auto kCommander = ConnectionTable::Standing::kCommander;

Peer Uid(uint32_t uid) {
  Peer peer;
  peer.uid = uid;
  return peer;
}

UniqueFd Socket() { return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

class ConnectionTableTest : public ::testing::Test {
 protected:
  ConnectionTable Make(int numbers, size_t most = 100, size_t most_of_uid = 100) {
    return ConnectionTable(clock_, {.first_number = kFirst,
                                    .last_number = kFirst + numbers - 1,
                                    .most_connections = most,
                                    .most_of_uid = most_of_uid,
                                    .quarantine = absl::Seconds(30)});
  }
  // How many connections, each closed at once, are taken of `uid` before one is refused.
  int ConnectAndClose(ConnectionTable& table, uint32_t uid, ConnectionTable::Standing standing) {
    int taken = 0;
    while (taken < 10'000 && table.Admit(Socket(), Uid(uid), standing).ok()) {
      ++taken;
      clock_.Advance(ConnectionTable::kRefusalSweep);
    }
    return taken;
  }
  ManualClock clock_;
};

TEST_F(ConnectionTableTest, GivesEachConnectionANumberOfItsOwn) {
  ConnectionTable table = Make(10);
  UniqueFd one = *table.Admit(Socket(), Uid(1), kCommander);
  UniqueFd two = *table.Admit(Socket(), Uid(2), kCommander);
  EXPECT_EQ(one.get(), kFirst);
  EXPECT_EQ(two.get(), kFirst + 1);
  EXPECT_EQ(table.Find("fd:700")->uid, 1U);
  EXPECT_EQ(table.Find("fd:701")->uid, 2U);
  EXPECT_NE(::fcntl(one.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(ConnectionTableTest, TheOriginalNumberIsClosed) {
  ConnectionTable table = Make(10);
  UniqueFd socket = Socket();
  const int before = socket.get();
  const UniqueFd moved = *table.Admit(std::move(socket), Uid(1), kCommander);
  EXPECT_EQ(::fcntl(before, F_GETFD), -1);
}

TEST_F(ConnectionTableTest, KnowsNothingOfOtherNames) {
  ConnectionTable table = Make(10);
  const UniqueFd one = *table.Admit(Socket(), Uid(1), kCommander);
  for (const char* name : {"", "fd:", "fd:7", "fd:702", "fd:0700x", "fd:-1", "fd: 700",
                           "unix:", "ipv4:127.0.0.1:700", "fd:99999999999999"}) {
    EXPECT_FALSE(table.Find(name).has_value()) << name;
  }
}

TEST_F(ConnectionTableTest, AClosedConnectionsNumberDoesNotComeAgainSoon) {
  ConnectionTable table = Make(4);
  std::set<int> numbers;
  for (int i = 0; i < 4; ++i) {
    const auto one = table.Admit(Socket(), Uid(1), kCommander);
    ASSERT_TRUE(one.ok());
    numbers.insert(one->get());  // Closes at once.
    clock_.Advance(absl::Seconds(2));
  }
  EXPECT_EQ(numbers.size(), 4U);
  EXPECT_TRUE(absl::IsResourceExhausted(table.Admit(Socket(), Uid(2), kCommander).status()));

  clock_.Advance(absl::Seconds(40));
  const auto again = table.Admit(Socket(), Uid(2), kCommander);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(table.Find(absl::StrCat("fd:", again->get()))->uid, 2U);
}

TEST_F(ConnectionTableTest, ALateCallOfAClosedConnectionStillHasItsOwnPeer) {
  ConnectionTable table = Make(4);
  { const UniqueFd closed = *table.Admit(Socket(), Uid(1), kCommander); }
  clock_.Advance(absl::Seconds(5));
  const UniqueFd newer = *table.Admit(Socket(), Uid(0), kCommander);
  EXPECT_NE(newer.get(), kFirst);
  EXPECT_EQ(table.Find("fd:700")->uid, 1U);
  // Later it has none, rather than another's.
  clock_.Advance(absl::Seconds(31));
  const UniqueFd sweeps = *table.Admit(Socket(), Uid(0), kCommander);
  EXPECT_FALSE(table.Find("fd:700").has_value());
}

TEST_F(ConnectionTableTest, ARestingNumberIsCountedFromWhenItWasSeenClosed) {
  ConnectionTable table = Make(2);
  { const UniqueFd closed = *table.Admit(Socket(), Uid(1), kCommander); }
  clock_.Advance(absl::Seconds(100));  // Nobody looked: it may have closed just now.
  const UniqueFd other = *table.Admit(Socket(), Uid(2), kCommander);
  EXPECT_TRUE(absl::IsResourceExhausted(table.Admit(Socket(), Uid(3), kCommander).status()));
  clock_.Advance(absl::Seconds(31));
  EXPECT_TRUE(table.Admit(Socket(), Uid(3), kCommander).ok());
}

TEST_F(ConnectionTableTest, AnOpenConnectionKeepsItsNumberForever) {
  ConnectionTable table = Make(2);
  const UniqueFd open = *table.Admit(Socket(), Uid(1), kCommander);
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(absl::Seconds(70));
    const auto brief = table.Admit(Socket(), Uid(2), kCommander);
    if (brief.ok()) {
      EXPECT_EQ(brief->get(), kFirst + 1);
    }
    EXPECT_EQ(table.Find("fd:700")->uid, 1U);
  }
}

TEST_F(ConnectionTableTest, NumbersThatOthersHaveAreSteppedOver) {
  const UniqueFd other(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, kFirst));
  ASSERT_EQ(other.get(), kFirst);
  ConnectionTable table = Make(3);
  const UniqueFd one = *table.Admit(Socket(), Uid(1), kCommander);
  EXPECT_EQ(one.get(), kFirst + 1);
  EXPECT_FALSE(table.Find("fd:700").has_value());
}

TEST_F(ConnectionTableTest, ThousandsOfNumbersThatOthersHaveAreNoObstacle) {
  // As the regions of a version with many files have them.
  std::vector<UniqueFd> others;
  for (int i = 0; i < 200; ++i) {
    others.emplace_back(::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, kFirst));
    ASSERT_TRUE(others.back().valid());
  }
  ConnectionTable table = Make(203);
  std::set<int> numbers;
  for (int i = 0; i < 3; ++i) {
    auto socket = table.Admit(Socket(), Uid(1), kCommander);
    ASSERT_TRUE(socket.ok()) << i << ": " << socket.status();
    numbers.insert(socket->get());
    others.push_back(*std::move(socket));
  }
  EXPECT_EQ(numbers, (std::set<int>{kFirst + 200, kFirst + 201, kFirst + 202}));
}

TEST_F(ConnectionTableTest, CountsConnectionsOfAUid) {
  ConnectionTable table = Make(20, /*most=*/100, /*most_of_uid=*/3);
  std::vector<UniqueFd> open;
  for (int i = 0; i < 3; ++i) open.push_back(*table.Admit(Socket(), Uid(1), kReader));
  const auto refused = table.Admit(Socket(), Uid(1), kReader).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("uid 1: it has 3 open"));
  EXPECT_TRUE(table.Admit(Socket(), Uid(2), kReader).ok());
  open.pop_back();  // Room again, with no time passed.
  EXPECT_TRUE(table.Admit(Socket(), Uid(1), kReader).ok());
}

TEST_F(ConnectionTableTest, CountsAllConnections) {
  ConnectionTable table = Make(20, /*most=*/2);
  const UniqueFd one = *table.Admit(Socket(), Uid(1), kCommander);
  UniqueFd two = *table.Admit(Socket(), Uid(2), kCommander);
  EXPECT_TRUE(absl::IsResourceExhausted(table.Admit(Socket(), Uid(3), kCommander).status()));
  two.Reset();
  clock_.Advance(ConnectionTable::kRefusalSweep);
  EXPECT_TRUE(table.Admit(Socket(), Uid(3), kCommander).ok());
}

TEST_F(ConnectionTableTest, WhoConnectsAndClosesUsesUpHisOwnShareOfNumbers) {
  ConnectionTable table = Make(256);
  EXPECT_EQ(ConnectAndClose(table, 1, kStranger), 256 / 64);
  EXPECT_EQ(ConnectAndClose(table, 2, kStranger), 256 / 64);
  EXPECT_EQ(ConnectAndClose(table, 3, kReader), 256 / 4);
  EXPECT_EQ(ConnectAndClose(table, 4, kReader), 256 / 4);
  // Rested: all of it may come again.
  clock_.Advance(absl::Seconds(31));
  EXPECT_TRUE(table.Admit(Socket(), Uid(1), kStranger).ok());
}

TEST_F(ConnectionTableTest, ManyUsersTogetherLeaveAQuarterToThoseWhoCommand) {
  ConnectionTable table = Make(256);
  int strangers = 0;
  for (uint32_t uid = 1000; uid < 1020; ++uid) {
    strangers += ConnectAndClose(table, uid, kStranger);
  }
  EXPECT_EQ(strangers, 256 / 8);
  int readers = 0;
  for (uint32_t uid = 2000; uid < 2010; ++uid) readers += ConnectAndClose(table, uid, kReader);
  EXPECT_EQ(strangers + readers, 256 * 3 / 4);
  EXPECT_EQ(ConnectAndClose(table, 0, kCommander), 256 / 4);
}

TEST_F(ConnectionTableTest, OpenConnectionsOfReadersLeavePlacesToThoseWhoCommand) {
  ConnectionTable table = Make(256, /*most=*/8);
  std::vector<UniqueFd> open;
  for (uint32_t uid = 1; uid <= 6; ++uid) {
    open.push_back(*table.Admit(Socket(), Uid(uid), kReader));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(table.Admit(Socket(), Uid(7), kReader).status()));
  EXPECT_TRUE(table.Admit(Socket(), Uid(0), kCommander).ok());
}

TEST_F(ConnectionTableTest, RefusedOnesCostNoLookAtAllNumbers) {
  ConnectionTable table = Make(256, /*most=*/1);
  UniqueFd open = *table.Admit(Socket(), Uid(1), kReader);
  EXPECT_FALSE(table.Admit(Socket(), Uid(2), kReader).ok());
  open.Reset();
  // Within kRefusalSweep of the last look nobody looks again.
  EXPECT_FALSE(table.Admit(Socket(), Uid(2), kReader).ok());
  clock_.Advance(ConnectionTable::kRefusalSweep);
  EXPECT_TRUE(table.Admit(Socket(), Uid(2), kReader).ok());
}

TEST(ConnectionLimitsTest, TheRangeFitsTheDescriptorLimit) {
  for (const int64_t most : {int64_t{256}, int64_t{1024}, int64_t{4096}, int64_t{1} << 20}) {
    const auto limits = ConnectionTable::LimitsFor(most);
    EXPECT_GT(limits.first_number, 32);
    EXPECT_GT(limits.last_number, limits.first_number + 100);
    EXPECT_LT(limits.last_number, most);
    EXPECT_LE(limits.most_connections, static_cast<size_t>(most / 4));
  }
}

}  // namespace
}  // namespace modelhost
