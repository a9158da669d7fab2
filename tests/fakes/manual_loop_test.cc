#include "tests/fakes/manual_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <vector>

namespace modelhost {
namespace {

using ::testing::ElementsAre;

TEST(ManualLoopTest, NothingRunsUntilItIsTold) {
  ManualClock clock;
  ManualLoop loop(clock);
  std::vector<int> order;
  loop.Post([&] {
    order.push_back(1);
    loop.Post([&] { order.push_back(2); });
  });
  EXPECT_EQ(loop.waiting(), 1);
  EXPECT_TRUE(order.empty());
  EXPECT_EQ(loop.RunTasks(), 2);
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(ManualLoopTest, AdvancingTimeStopsAtEachTimer) {
  ManualClock clock;
  ManualLoop loop(clock);
  const absl::Duration start = clock.Monotonic();
  std::vector<absl::Duration> fired;
  const auto note = [&] { fired.push_back(clock.Monotonic() - start); };
  loop.PostDelayed(absl::Seconds(3), note);
  loop.PostDelayed(absl::Seconds(1), [&] {
    note();
    loop.PostDelayed(absl::Seconds(1), note);
  });
  loop.CancelTimer(loop.PostDelayed(absl::Seconds(1), note));
  loop.AdvanceTime(absl::Seconds(10));
  EXPECT_THAT(fired, ElementsAre(absl::Seconds(1), absl::Seconds(2), absl::Seconds(3)));
  EXPECT_EQ(clock.Monotonic() - start, absl::Seconds(10));
  EXPECT_EQ(loop.timers(), 0);
}

TEST(ManualLoopTest, AWatchFiresForItsEventsAndErrorsUntilItEnds) {
  ManualClock clock;
  ManualLoop loop(clock);
  uint32_t seen = 0;
  const WatchId watch = loop.Watch(7, EPOLLIN, [&](uint32_t events) { seen = events; });
  EXPECT_FALSE(loop.Fire(7, EPOLLOUT));
  EXPECT_FALSE(loop.Fire(8, EPOLLIN));
  EXPECT_TRUE(loop.Fire(7, EPOLLIN | EPOLLOUT));
  EXPECT_EQ(seen, static_cast<uint32_t>(EPOLLIN));
  EXPECT_TRUE(loop.Fire(7, EPOLLHUP));
  loop.ChangeWatch(watch, EPOLLOUT);
  EXPECT_EQ(loop.WatchedEvents(7), static_cast<uint32_t>(EPOLLOUT));
  loop.Unwatch(watch);
  EXPECT_FALSE(loop.Fire(7, EPOLLOUT));
}

TEST(ManualLoopTest, TheManualExecutorRunsOneAtATime) {
  ManualExecutor executor;
  int ran = 0;
  executor.Post([&] { ++ran; });
  executor.Post([&] { ++ran; });
  EXPECT_TRUE(executor.RunOne());
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(executor.RunAll(), 1);
  EXPECT_FALSE(executor.RunOne());
}

}  // namespace
}  // namespace modelhost
