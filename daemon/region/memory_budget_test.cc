#include "daemon/region/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(MemoryBudgetTest, WhatIsReservedIsGoneUntilTheReservationDies) {
  BudgetPool pool("host", 100);
  {
    auto a = pool.Reserve(60, "a");
    ASSERT_TRUE(a.ok());
    EXPECT_EQ(pool.reserved(), 60U);
    EXPECT_FALSE(pool.Reserve(41, "b").ok());
    EXPECT_TRUE(pool.Reserve(40, "c").ok());
    EXPECT_EQ(pool.reserved(), 60U);
  }
  EXPECT_EQ(pool.reserved(), 0U);
}

TEST(MemoryBudgetTest, ARefusalSaysNeedHaveAndLimit) {
  BudgetPool pool("host", uint64_t{4} << 30);
  auto held = pool.Reserve(uint64_t{3} << 30, "a");
  const absl::Status refused = pool.Reserve(uint64_t{2} << 30, "load of b@1").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(),
            "load of b@1: needs 2.0 GiB of the host budget, which has 1.0 GiB of 4.0 GiB left");
}

TEST(MemoryBudgetTest, NeitherALimitlessNorAnAlmostFullPoolOverflows) {
  BudgetPool pool("host", kMax);
  auto a = pool.Reserve(kMax - 1, "a");
  ASSERT_TRUE(a.ok());
  EXPECT_FALSE(pool.Reserve(2, "b").ok());
  EXPECT_FALSE(pool.Reserve(kMax, "c").ok());
  EXPECT_TRUE(pool.Reserve(1, "d").ok());
}

TEST(MemoryBudgetTest, MoveSplitAndShrinkKeepTheSum) {
  BudgetPool pool("host", 100);
  Reservation a = *pool.Reserve(80, "a");
  Reservation b = a.Split(30);
  EXPECT_EQ(a.bytes(), 50U);
  EXPECT_EQ(b.bytes(), 30U);
  EXPECT_EQ(pool.reserved(), 80U);
  Reservation c = std::move(a);
  EXPECT_EQ(a.bytes(), 0U);  // NOLINT(bugprone-use-after-move): that is what is tested.
  b = std::move(c);
  EXPECT_EQ(pool.reserved(), 50U);
  b.Shrink(20);
  b.Shrink(70);
  EXPECT_EQ(pool.reserved(), 20U);
  EXPECT_EQ(b.Split(1000).bytes(), 20U);  // All there is; given back at the end of the line.
  EXPECT_EQ(pool.reserved(), 0U);
}

TEST(MemoryBudgetTest, ThreadsNeverGetMoreThanThereIs) {
  BudgetPool pool("host", 3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        auto held = pool.Reserve(1, "x");
        EXPECT_LE(pool.reserved(), 3U);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.reserved(), 0U);
}

TEST(MemoryBudgetTest, ARefusalTellsItsPoolFromOtherShortages) {
  BudgetPool pool("memlock", 100);
  const absl::Status refused = pool.Reserve(130, "load of m@1").status();
  const auto refusal = BudgetRefusalOf(refused);
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->pool, "memlock");
  EXPECT_EQ(refusal->need_bytes, 130U);
  const absl::Status other = absl::ResourceExhaustedError("too many open files");
  EXPECT_FALSE(BudgetRefusalOf(other).has_value());
  EXPECT_TRUE(BudgetRefusalOf(WithBudgetRefusal(other, refused)).has_value());
  EXPECT_FALSE(BudgetRefusalOf(WithBudgetRefusal(other, other)).has_value());
}

TEST(MemoryBudgetTest, IecBytesRoundsToOneDigit) {
  EXPECT_EQ(IecBytes(0), "0 B");
  EXPECT_EQ(IecBytes(1023), "1023 B");
  EXPECT_EQ(IecBytes(1536), "1.5 KiB");
  EXPECT_EQ(IecBytes((uint64_t{1} << 20) - 1), "1.0 MiB");
  EXPECT_EQ(IecBytes(uint64_t{8} << 20), "8.0 MiB");
  EXPECT_EQ(IecBytes(kMax), "no limit");
}

}  // namespace
}  // namespace modelhost
