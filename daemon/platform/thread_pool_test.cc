#include "daemon/platform/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/notification.h"

namespace modelhost {
namespace {

TEST(ThreadPoolTest, DestructionRunsEverythingThatWasPosted) {
  std::atomic<int> ran{0};
  {
    ThreadPool pool("test", 2);
    for (int i = 0; i < 100; ++i) {
      pool.Post([&] {
        ++ran;
        pool.Post([&] { ++ran; });
      });
    }
  }
  EXPECT_EQ(ran, 200);
}

TEST(ThreadPoolTest, TasksRunAtOnceOnItsThreads) {
  ThreadPool pool("test", 3);
  // Ends only when three tasks are in it at one time.
  auto* barrier = new absl::Barrier(4);
  for (int i = 0; i < 3; ++i) {
    pool.Post([barrier] {
      if (barrier->Block()) delete barrier;
    });
  }
  if (barrier->Block()) delete barrier;
}

TEST(ThreadPoolTest, EveryThreadBeginsBeforeItsFirstTask) {
  static thread_local bool begun = false;
  std::atomic<int> begins = 0;
  {
    ThreadPool pool("test", 3, [&begins] {
      begun = true;
      ++begins;
    });
    for (int i = 0; i < 20; ++i) pool.Post([] { EXPECT_TRUE(begun); });
  }
  EXPECT_EQ(begins, 3);
}

TEST(ThreadPoolTest, WhatATaskOwnsGoesWithIt) {
  absl::Notification gone;
  ThreadPool pool("test", 1);
  struct Owned {
    absl::Notification& gone;
    ~Owned() { gone.Notify(); }
  };
  pool.Post([owned = std::make_unique<Owned>(gone)] {});
  gone.WaitForNotification();
}

}  // namespace
}  // namespace modelhost
