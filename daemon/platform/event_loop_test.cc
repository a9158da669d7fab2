#include "daemon/platform/event_loop.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace modelhost {
namespace {

using ::testing::ElementsAre;

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
    read = UniqueFd(ends[0]);
    write = UniqueFd(ends[1]);
  }
  void Put() const { EXPECT_EQ(::write(write.get(), "x", 1), 1); }
  UniqueFd read;
  UniqueFd write;
};

class EventLoopTest : public testing::Test {
 protected:
  void SetUp() override {
    auto loop = EventLoop::Create(clock_);
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
  }
  SystemClock clock_;
  std::unique_ptr<EventLoop> loop_;
};

TEST_F(EventLoopTest, RunsTasksInTheOrderPosted) {
  std::vector<int> order;
  loop_->Post([&] {
    order.push_back(1);
    loop_->Post([&] { order.push_back(3); });
  });
  loop_->Post([&] { order.push_back(2); });
  loop_->Quit();
  loop_->Run();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST_F(EventLoopTest, TasksOfOtherThreadsWakeIt) {
  std::thread::id ran_on;
  std::thread other([&] {
    loop_->Post([&] {
      EXPECT_TRUE(loop_->InThread());
      ran_on = std::this_thread::get_id();
      loop_->Quit();
    });
    EXPECT_FALSE(loop_->InThread());
  });
  loop_->Run();
  other.join();
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST_F(EventLoopTest, NoTaskOfManyThreadsIsLost) {
  constexpr int kThreads = 4;
  constexpr int kTasks = 2000;
  int ran = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kTasks; ++i) {
        loop_->Post([&] {
          if (++ran == kThreads * kTasks) loop_->Quit();
        });
      }
    });
  }
  loop_->Run();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ran, kThreads * kTasks);
}

TEST_F(EventLoopTest, RunAndWaitBringsTheResultBack) {
  int answer = 0;
  std::thread other([&] {
    answer = RunAndWait(*loop_, [] { return 42; });
    RunAndWait(*loop_, [&] { loop_->Quit(); });
  });
  loop_->Run();
  other.join();
  EXPECT_EQ(answer, 42);
}

TEST_F(EventLoopTest, TimersFireInTheOrderDueAndCancelledOnesNot) {
  std::vector<int> order;
  loop_->PostDelayed(absl::Milliseconds(20), [&] {
    order.push_back(2);
    loop_->Quit();
  });
  loop_->PostDelayed(absl::Milliseconds(5), [&] { order.push_back(1); });
  const TimerId cancelled = loop_->PostDelayed(absl::Milliseconds(1), [&] { order.push_back(0); });
  loop_->CancelTimer(cancelled);
  const absl::Duration before = clock_.Monotonic();
  loop_->Run();
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_GE(clock_.Monotonic() - before, absl::Milliseconds(20));
}

TEST_F(EventLoopTest, ATimerMayCancelOneThatIsDueToo) {
  TimerId second = 0;
  bool fired = false;
  loop_->PostDelayed(absl::ZeroDuration(), [&] {
    loop_->CancelTimer(second);
    loop_->Quit();
  });
  second = loop_->PostDelayed(absl::ZeroDuration(), [&] { fired = true; });
  loop_->Run();
  EXPECT_FALSE(fired);
}

TEST_F(EventLoopTest, AWatchMayEndItselfWhileItRuns) {
  const Pipe pipe;
  auto alive = std::make_shared<int>(0);
  const std::weak_ptr<int> seen = alive;
  int calls = 0;
  WatchId watch = 0;
  watch = loop_->Watch(pipe.read.get(), EPOLLIN, [&, alive](uint32_t events) {
    EXPECT_TRUE((events & EPOLLIN) != 0);
    ++calls;
    loop_->Unwatch(watch);
    EXPECT_EQ(*alive, 0);  // What the callback owns is still there.
    loop_->PostDelayed(absl::Milliseconds(5), [&] { loop_->Quit(); });
  });
  alive.reset();
  pipe.Put();
  loop_->Run();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(seen.expired());
}

TEST_F(EventLoopTest, AWatchMayEndAnotherThatIsReadyToo) {
  const Pipe a;
  const Pipe b;
  int calls = 0;
  WatchId watch_a = 0;
  WatchId watch_b = 0;
  const auto once = [&](uint32_t) {
    ++calls;
    loop_->Unwatch(watch_a);
    loop_->Unwatch(watch_b);
    loop_->Quit();
  };
  watch_a = loop_->Watch(a.read.get(), EPOLLIN, once);
  watch_b = loop_->Watch(b.read.get(), EPOLLIN, once);
  a.Put();
  b.Put();
  loop_->Run();
  EXPECT_EQ(calls, 1);
}

TEST_F(EventLoopTest, ChangeWatchChangesWhatItWaitsFor) {
  const Pipe pipe;
  pipe.Put();
  int calls = 0;
  const WatchId watch = loop_->Watch(pipe.read.get(), 0, [&](uint32_t) {
    ++calls;
    char byte = 0;
    EXPECT_EQ(::read(pipe.read.get(), &byte, 1), 1);
    loop_->Quit();
  });
  loop_->PostDelayed(absl::Milliseconds(5), [&] {
    EXPECT_EQ(calls, 0);
    loop_->ChangeWatch(watch, EPOLLIN);
  });
  loop_->Run();
  EXPECT_EQ(calls, 1);
  loop_->Unwatch(watch);
}

}  // namespace
}  // namespace modelhost
