// The stream of events over a real socket, to a reader who does not read.
#include <gtest/gtest.h>

#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

class EventsStreamTest : public ControlServerTest {
 protected:
  // Loads of what is READY: each is over at once, and is two events.
  void MakeEvents(int loads) {
    RunAndWait(*loop_, [&] {
      for (int i = 0; i < loads; ++i) ASSERT_TRUE(manager_->Load({"planner", 1}, 0).ok());
    });
  }
  uint64_t LastSequence() {
    return RunAndWait(*loop_, [&] { return manager_->SequenceAt(absl::InfiniteFuture()); });
  }
};

TEST_F(EventsStreamTest, AReaderWhoDoesNotReadHoldsNothingAndLearnsHowManyAreLost) {
  ASSERT_TRUE(Load(1).status.ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(240));
  v1::WatchEventsRequest request;
  request.set_follow(true);
  const auto stream = stub_->WatchEvents(&context, request);
  v1::Event event;
  ASSERT_TRUE(stream->Read(&event));
  EXPECT_EQ(event.sequence(), 1U);
  // It stops here. The sockets and gRPC take what they can hold; the rest runs through the ring.
  for (int i = 0; i < 100; ++i) MakeEvents(1000);
  const uint64_t last = LastSequence();
  ASSERT_GT(last, 200'000U);
  // The daemon goes on serving others, on this same connection too.
  v1::GetStatusResponse status;
  EXPECT_TRUE(GetStatus(*stub_, &status).ok());

  // Every number is either an event that comes, in order, or counted as lost, once.
  uint64_t next = 2;
  uint64_t lost = 0;
  while (next <= last) {
    ASSERT_TRUE(stream->Read(&event)) << next;
    EXPECT_EQ(event.sequence(), next + event.lost());
    lost += event.lost();
    next = event.sequence() + 1;
  }
  EXPECT_GT(lost, 0U);
  EXPECT_EQ(next, last + 1);
  context.TryCancel();
  while (stream->Read(&event)) {
  }
}

}  // namespace
}  // namespace modelhost
