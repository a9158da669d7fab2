// Tickets of streams that hold leases on control.sock, redeemed here.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "daemon/publish/broker_fixture.h"
#include "proto/abi/version_index.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class RedeemTest : public BrokerFixture {
 protected:
  // A session as a stream has one, with a lease on planner:stable.
  void Hold(uint32_t uid = ::geteuid()) {
    Connect();  // Until the loop answers, this thread counts as its own.
    ASSERT_TRUE(Eventually([&] {
      const auto version = manager_->Version({"planner", 7});
      return version.ok() && version->phase == Phase::kReady;
    }));
    OnLoop([&] {
      Peer peer;
      peer.uid = uid;
      stream_ = manager_->BeginSession(peer, "grpc");
      const AcquireRef ref{"planner", "stable", 0, {}};
      const auto grants = manager_->Acquire(stream_, std::span(&ref, 1));
      ASSERT_TRUE(grants.ok()) << grants.status();
      lease_ = (*grants)[0].lease;
      const auto ticket = manager_->IssueTicket(stream_, (*grants)[0], false);
      ASSERT_TRUE(ticket.ok()) << ticket.status();
      ticket_ = *ticket;
    });
  }
  static Bytes RedeemBytes(const LeaseTicket& ticket) {
    abi::Redeem redeem{};
    std::ranges::copy(ticket, redeem.ticket);
    return MakeFrame(abi::FrameType::kRedeem, redeem, {}, 6);
  }

  SessionId stream_ = 0;
  LeaseId lease_ = 0;
  LeaseTicket ticket_{};
};

TEST_F(RedeemTest, ATicketIsAnsweredAsAnAcquireIs) {
  StartWithPlanner();
  Hold();
  TestClient client = Connect();
  client.Send(RedeemBytes(ticket_));
  const auto frame = client.Receive();
  ASSERT_TRUE(frame.has_value());
  ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
  const auto granted = frame->As<abi::Granted>();
  EXPECT_EQ(granted.header.request_id, 6U);
  EXPECT_EQ(granted.lease_id, lease_);
  EXPECT_EQ(granted.version, 7U);
  EXPECT_EQ(granted.generation, 12U);
  EXPECT_STREQ(granted.label, "stable");
  ASSERT_EQ(frame->fds.size(), 2U);
  const auto index = ReadOnlyMapping::MapSealed(frame->fds[0], granted.index_bytes);
  ASSERT_TRUE(index.ok()) << index.error().text;
  const abi::RegionRef region = frame->Refs<abi::Granted>().at(0);
  const auto bytes = ReadOnlyMapping::MapFile(frame->fds[1], region.bytes);
  ASSERT_TRUE(bytes.ok()) << bytes.error().text;
  EXPECT_THAT(
      std::string(reinterpret_cast<const char*>(bytes->bytes().data()), bytes->bytes().size()),
      HasSubstr("seven"));
  EXPECT_EQ(Leases(), 1U);
}

TEST_F(RedeemTest, TheLeaseStaysTheStreamsWhoeverRedeemedIt) {
  StartWithPlanner();
  Hold();
  {
    TestClient client = Connect();
    client.Send(RedeemBytes(ticket_));
    ASSERT_EQ(client.Receive()->type(), abi::FrameType::kGranted);
    abi::Release release{};
    release.lease_id = lease_;
    client.Send(MakeFrame(abi::FrameType::kRelease, release));
    abi::Fetch fetch{};  // Still good, so the release did nothing; and files are to be had.
    fetch.lease_id = lease_;
    client.Send(MakeFrame(abi::FrameType::kFetch, fetch));
    const auto fetched = client.Receive();
    ASSERT_TRUE(fetched.has_value());
    EXPECT_EQ(fetched->type(), abi::FrameType::kRegionFds) << fetched->ErrorText();
  }
  EXPECT_TRUE(Eventually([&] { return manager_->Sessions().size() == 1; }));
  EXPECT_EQ(Leases(), 1U);
  OnLoop([&] { manager_->EndSession(stream_, "closed"); });
  EXPECT_EQ(Leases(), 0U);
}

TEST_F(RedeemTest, ABadTicketIsRefusedAndTheConnectionGoesOn) {
  StartWithPlanner();
  Hold();
  TestClient client = Connect();
  LeaseTicket wrong = ticket_;
  wrong[0] ^= 1;
  client.Send(RedeemBytes(wrong));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("PERMISSION_DENIED: redeem"));
  client.Send(RedeemBytes(ticket_));
  EXPECT_EQ(client.Receive()->type(), abi::FrameType::kGranted);
  client.Send(RedeemBytes(ticket_));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("PERMISSION_DENIED: redeem"));
  EXPECT_EQ(Stats().violations, 0U);
}

TEST_F(RedeemTest, AClientOfAnOlderProtocolHasNoTickets) {
  StartWithPlanner();
  Hold();
  TestClient client = ConnectSilently();
  client.Send(HelloBytes(1, abi::kFrameAbiRedeem - 1));
  ASSERT_TRUE(client.Receive().has_value());
  client.Send(RedeemBytes(ticket_));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT: malformed session"));
  EXPECT_FALSE(client.Receive().has_value());
}

}  // namespace
}  // namespace modelhost
