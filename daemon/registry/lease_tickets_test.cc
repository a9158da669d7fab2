#include "daemon/registry/lease_tickets.h"

#include <gmock/gmock.h>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr LeaseTicket kOne = {1};
constexpr LeaseTicket kTwo = {2};

TicketedGrant GrantOf(LeaseId lease) { return {lease, 5, "stable", 3, 4, false, lease + 100}; }

TEST(LeaseTickets, ATicketIsGoodOnceAndForItsUidAlone) {
  LeaseTickets tickets;
  EXPECT_FALSE(tickets.Put(1000, kOne, GrantOf(7)).has_value());
  EXPECT_FALSE(tickets.Take(1001, kOne).has_value());
  EXPECT_FALSE(tickets.Take(1000, kTwo).has_value());
  const auto taken = tickets.Take(1000, kOne);
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->lease, 7U);
  EXPECT_EQ(taken->generation, 3U);
  EXPECT_FALSE(tickets.Take(1000, kOne).has_value());
}

TEST(LeaseTickets, ALeaseHasOneTicketAtATime) {
  LeaseTickets tickets;
  (void)tickets.Put(1000, kOne, GrantOf(7));
  EXPECT_EQ(tickets.Put(1000, kTwo, GrantOf(7)), TimerId{107});
  EXPECT_EQ(tickets.size(), 1U);
  EXPECT_FALSE(tickets.Take(1000, kOne).has_value());
  EXPECT_TRUE(tickets.Drop(7).has_value());
  EXPECT_FALSE(tickets.Drop(7).has_value());
  EXPECT_FALSE(tickets.Take(1000, kTwo).has_value());
}

TEST(LeaseTickets, WhoHasRedeemedOneIsRememberedUntilTheLeaseEnds) {
  LeaseTickets tickets;
  tickets.NoteRedeemed(7, 9);
  EXPECT_TRUE(tickets.HasRedeemed(7, 9));
  EXPECT_FALSE(tickets.HasRedeemed(7, 8));
  EXPECT_FALSE(tickets.HasRedeemed(8, 9));
  tickets.ForgetRedeemed(7);
  EXPECT_FALSE(tickets.HasRedeemed(7, 9));
}

class TicketTest : public ManagerTest {
 protected:
  // A lease of `session` on planner:stable, and its ticket.
  LeaseTicket TicketOf(SessionId session, LeaseId* lease = nullptr) {
    const auto grants = Acquire(session, {"planner", "stable", 0, {}});
    EXPECT_TRUE(grants.ok()) << grants.status();
    if (!grants.ok()) return {};
    if (lease != nullptr) *lease = (*grants)[0].lease;
    const auto ticket = OnLoop([&] { return manager_->IssueTicket(session, (*grants)[0], false); });
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or(LeaseTicket{});
  }
  absl::StatusOr<ModelManager::RedeemedGrant> Redeem(SessionId session, const LeaseTicket& ticket) {
    return OnLoop([&] { return manager_->Redeem(session, ticket); });
  }
};

TEST_F(TicketTest, ATicketBringsTheLeaseOfItsHolderAndNoLeaseOfItsOwn) {
  Boot();
  Swap(1);
  const SessionId stream = NewSession();
  const SessionId connection = NewSession();
  LeaseId lease = 0;
  const LeaseTicket ticket = TicketOf(stream, &lease);
  EXPECT_FALSE(OnLoop([&] { return manager_->Leased(connection, lease); }).ok());
  const auto redeemed = Redeem(connection, ticket);
  ASSERT_TRUE(redeemed.ok()) << redeemed.status();
  EXPECT_EQ(redeemed->grant.lease, lease);
  EXPECT_EQ(redeemed->grant.key, (VersionKey{"planner", 1}));
  EXPECT_EQ(redeemed->grant.label, "stable");
  EXPECT_EQ(redeemed->grant.generation, 1U);
  EXPECT_NE(redeemed->grant.resident, nullptr);
  EXPECT_EQ(OnLoop([&] { return manager_->Status().leases; }), 1U);
  EXPECT_TRUE(OnLoop([&] { return manager_->Leased(connection, lease); }).ok());
  // It is not the redeemer's to end, and does not end with it.
  EXPECT_FALSE(OnLoop([&] { return manager_->Release(connection, lease); }).ok());
  OnLoop([&] { manager_->EndSession(connection, "closed"); });
  EXPECT_EQ(OnLoop([&] { return manager_->Status().leases; }), 1U);
}

TEST_F(TicketTest, ATicketIsRefusedUsedOrStolenOrWhenItsLeaseIsOver) {
  Boot();
  Swap(1);
  const SessionId stream = NewSession();
  const SessionId connection = NewSession();
  const LeaseTicket used = TicketOf(stream);
  const SessionId thief = NewSession(::geteuid() + 1);
  EXPECT_TRUE(absl::IsPermissionDenied(Redeem(thief, used).status()));
  EXPECT_TRUE(Redeem(connection, used).ok());
  EXPECT_THAT(std::string(Redeem(connection, used).status().message()),
              HasSubstr("the ticket is not known"));
  LeaseId lease = 0;
  const LeaseTicket released = TicketOf(stream, &lease);
  OnLoop([&] { return manager_->Release(stream, lease); }).IgnoreError();
  EXPECT_TRUE(absl::IsPermissionDenied(Redeem(connection, released).status()));
  const LeaseTicket ended = TicketOf(stream);
  OnLoop([&] { manager_->EndSession(stream, "closed"); });
  EXPECT_TRUE(absl::IsPermissionDenied(Redeem(connection, ended).status()));
}

TEST_F(TicketTest, ARedeemersWayToTheFilesEndsWithTheLease) {
  Boot();
  Swap(1);
  const SessionId stream = NewSession();
  const SessionId connection = NewSession();
  LeaseId lease = 0;
  ASSERT_TRUE(Redeem(connection, TicketOf(stream, &lease)).ok());
  OnLoop([&] { manager_->EndSession(stream, "closed"); });
  EXPECT_FALSE(OnLoop([&] { return manager_->Leased(connection, lease); }).ok());
}

TEST_F(TicketTest, ATicketOfALeaseThatTheDaemonLetGoOfBringsNothing) {
  Boot();
  Swap(1);
  Swap(2);
  const SessionId stream = NewSession();
  const auto grants = Acquire(stream, {"planner", "", 1, {}});
  ASSERT_TRUE(grants.ok());
  const auto ticket = OnLoop([&] { return manager_->IssueTicket(stream, (*grants)[0], false); });
  ASSERT_TRUE(ticket.ok());
  Await(OnLoop([&] {
    return manager_->Unload({"planner", 1}, absl::Milliseconds(10), /*release_on_deadline=*/true,
                            0);
  }));
  EXPECT_TRUE(absl::IsNotFound(Redeem(NewSession(), *ticket).status()));
}

TEST_F(TicketTest, AnOldTicketIsNotGoodAnyMore) {
  ManagerOptions options;
  options.ticket_life = absl::Milliseconds(1);
  Boot(options);
  Swap(1);
  const SessionId stream = NewSession();
  const LeaseTicket ticket = TicketOf(stream);
  // A timer that was posted later and is due later fires later.
  absl::Notification later;
  OnLoop([&] { loop_->PostDelayed(absl::Milliseconds(20), [&] { later.Notify(); }); });
  ASSERT_TRUE(later.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_TRUE(absl::IsPermissionDenied(Redeem(NewSession(), ticket).status()));
  EXPECT_EQ(OnLoop([&] { return manager_->Status().leases; }), 1U);
}

TEST_F(TicketTest, ATicketIsIssuedToTheHolderAlone) {
  Boot();
  Swap(1);
  const SessionId stream = NewSession();
  const auto grants = Acquire(stream, {"planner", "stable", 0, {}});
  ASSERT_TRUE(grants.ok());
  const SessionId other = NewSession();
  EXPECT_TRUE(absl::IsNotFound(
      OnLoop([&] { return manager_->IssueTicket(other, (*grants)[0], false); }).status()));
}

}  // namespace
}  // namespace modelhost
