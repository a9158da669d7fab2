// What the count of descriptors in flight promises: never too low, and exact when all is read.
#include "daemon/publish/in_flight.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <vector>

#include "daemon/platform/peer.h"
#include "proto/handle/fd_channel.h"

namespace modelhost {
namespace {

TEST(InFlight, IsZeroOnceEverythingIsRead) {
  InFlight flight;
  flight.Sent(300, 5, absl::Seconds(1));
  flight.Sent(300, 7, absl::Seconds(2));
  EXPECT_EQ(flight.fds(), 12U);
  EXPECT_EQ(flight.oldest(), absl::Seconds(1));
  flight.Settle(0);
  EXPECT_EQ(flight.fds(), 0U);
  EXPECT_EQ(flight.oldest(), absl::InfiniteDuration());
}

TEST(InFlight, FramesBeforeTheUnreadOnesHaveBeenRead) {
  InFlight flight;
  flight.Sent(300, 5, absl::Seconds(1));
  flight.Sent(300, 7, absl::Seconds(2));
  flight.Settle(1500);  // Room for one frame with its overhead, not for two.
  EXPECT_EQ(flight.fds(), 7U);
  EXPECT_EQ(flight.oldest(), absl::Seconds(2));
}

TEST(InFlight, UnreadEventsDoNotHoldOldDescriptorsForEver) {
  InFlight flight;
  flight.Sent(300, 5, absl::Seconds(1));
  for (int i = 0; i < 100; ++i) flight.Sent(48, 0, absl::Seconds(2));
  flight.Settle(100 * 560);  // The events alone.
  EXPECT_EQ(flight.fds(), 0U);
}

TEST(InFlight, AgreesWithTheKernel) {
  std::array<int, 2> raw{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, raw.data()), 0);
  const UniqueFd daemon(raw[0]);
  const UniqueFd client(raw[1]);
  InFlight flight;
  constexpr size_t kFrames = 40;
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  for (size_t i = 0; i < kFrames; ++i) {
    abi::Ack ack{};
    ack.header = MakeHeader(abi::FrameType::kAck, sizeof(ack), 1, 1);
    const std::array<const UniqueFd*, 1> fds = {&client};
    ASSERT_TRUE(SendFrame(daemon, AsBytes(ack), {}, fds).ok());
    flight.Sent(sizeof(ack), 1, absl::ZeroDuration());
  }
  flight.Settle(UnreadByPeer(daemon));
  EXPECT_EQ(flight.fds(), kFrames);
  for (size_t read = 1; read <= kFrames; ++read) {
    ASSERT_TRUE(ReceiveFrame(client, buffer, ReceiveWait::kNo, {}).ok());
    flight.Settle(UnreadByPeer(daemon));
    EXPECT_GE(flight.fds(), kFrames - read);
  }
  EXPECT_EQ(flight.fds(), 0U);
}

}  // namespace
}  // namespace modelhost
