#include "daemon/registry/capacity_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "daemon/region/memory_budget.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

RegionBytes Region(uint8_t content, uint64_t host, uint64_t memlock = 0) {
  Digest digest;
  digest.bytes[0] = content;
  return {{digest, Residency::kPinned}, {host, memlock}};
}

ResidentPicture Resident(uint64_t version, Stay stay, int used, std::vector<RegionBytes> regions) {
  return {{"m", version},
          stay,
          absl::FromUnixSeconds(used),
          std::move(regions),
          absl::StrCat("m@", version)};
}

CapacityPicture Picture(uint64_t limit, std::vector<ResidentPicture> residents) {
  CapacityPicture picture;
  picture.residents = std::move(residents);
  std::map<RegionId, PoolBytes> booked;
  for (const auto& resident : picture.residents) {
    for (const auto& region : resident.regions) booked[region.id] = region.bytes;
  }
  PoolPicture host{"host", limit, 0, 0, true};
  PoolPicture memlock{"memlock", UINT64_MAX, 0, 0, false};
  for (const auto& [id, bytes] : booked) {
    host.reserved_bytes += bytes[0];
    memlock.reserved_bytes += bytes[1];
  }
  picture.pools = {host, memlock};
  return picture;
}

WantedVersion Want(uint64_t version, std::vector<RegionBytes> regions) {
  return {{"m", version}, std::move(regions), {}};
}

TEST(PlanRoom, WhatIsFreeCostsNobodyAPlace) {
  const auto picture = Picture(100, {Resident(1, Stay::kIdle, 1, {Region(1, 60)})});
  const std::vector<WantedVersion> wanted = {Want(2, {Region(2, 40)})};
  const RoomPlan plan = PlanRoom(picture, wanted);
  EXPECT_TRUE(plan.fits);
  EXPECT_THAT(plan.evict, IsEmpty());
  EXPECT_EQ(plan.pools[0].need_bytes, 40U);
  EXPECT_EQ(plan.pools[0].free_bytes, 40U);
  EXPECT_EQ(plan.pools[0].peak_bytes, 100U);
}

TEST(PlanRoom, ASharedRegionIsBookedOnceAndFreedWithItsLastVersion) {
  const auto picture = Picture(100, {Resident(1, Stay::kIdle, 1, {Region(1, 50), Region(2, 10)}),
                                     Resident(3, Stay::kKept, 2, {Region(1, 50), Region(3, 40)})});
  const std::vector<WantedVersion> shares = {Want(4, {Region(1, 50), Region(2, 10)})};
  EXPECT_EQ(PlanRoom(picture, shares).pools[0].need_bytes, 0U);
  const std::vector<WantedVersion> more = {Want(5, {Region(9, 11)})};
  EXPECT_FALSE(PlanRoom(picture, more).fits);  // Evicting 1 frees its 10, not the 50 of 3.
  const std::vector<WantedVersion> ten = {Want(5, {Region(9, 10)})};
  EXPECT_THAT(PlanRoom(picture, ten).evict, ElementsAre(VersionKey{"m", 1}));
}

// A GPU's pool joins the list while versions are resident whose numbers do not have it yet.
TEST(PlanRoom, APoolThatJoinsLaterCountsNothingForThoseBefore) {
  auto picture = Picture(100, {Resident(1, Stay::kIdle, 1, {Region(1, 50)})});
  picture.pools.push_back({"GPU-1", 30, 20, 0, true});
  RegionBytes copy = Region(7, 0);
  copy.bytes = {0, 0, 20};
  picture.residents[0].regions.push_back(copy);
  RegionBytes other = Region(8, 0);
  other.bytes = {0, 0, 15};
  const std::vector<WantedVersion> shares = {Want(2, {Region(2, 10), copy})};
  EXPECT_EQ(PlanRoom(picture, shares).pools[2].need_bytes, 0U);
  EXPECT_THAT(PlanRoom(picture, shares).evict, IsEmpty());
  const std::vector<WantedVersion> more = {Want(3, {Region(3, 10), other})};
  const RoomPlan plan = PlanRoom(picture, more);
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(plan.pools[2].need_bytes, 15U);
  EXPECT_THAT(plan.evict, ElementsAre(VersionKey{"m", 1})) << "the host has room, the GPU has not";
  // What was refused before the pool was known says nothing of it.
  EXPECT_EQ(PlanRoom(picture, more, PoolBytes{1, 1}).pools[2].need_bytes, 15U);
}

TEST(PlanRoom, WhatLeavesByItselfIsWaitedForBeforeAnybodyIsEvicted) {
  const auto picture = Picture(100, {Resident(1, Stay::kLeaving, 1, {Region(1, 50)}),
                                     Resident(2, Stay::kIdle, 1, {Region(2, 50)})});
  const std::vector<WantedVersion> wanted = {Want(3, {Region(3, 50)})};
  const RoomPlan plan = PlanRoom(picture, wanted);
  EXPECT_TRUE(plan.fits);
  EXPECT_TRUE(plan.waits);
  EXPECT_THAT(plan.evict, IsEmpty());
}

TEST(PlanRoom, AnOlderVersionThatDoesNotHelpStays) {
  const auto picture = Picture(100, {Resident(1, Stay::kIdle, 1, {Region(1, 1)}),
                                     Resident(2, Stay::kIdle, 2, {Region(2, 90)})});
  const std::vector<WantedVersion> wanted = {Want(3, {Region(3, 50)})};
  EXPECT_THAT(PlanRoom(picture, wanted).evict, ElementsAre(VersionKey{"m", 2}));
}

TEST(PlanRoom, ABudgetThatOnlyDecidesWhatIsLockedRefusesNothing) {
  auto picture = Picture(1000, {});
  picture.pools[1].limit_bytes = 10;
  const std::vector<WantedVersion> wanted = {Want(1, {Region(1, 50, 50)})};
  const RoomPlan plan = PlanRoom(picture, wanted);
  EXPECT_TRUE(plan.fits);
  EXPECT_FALSE(plan.pools[1].fits);
  picture.pools[1].decides = true;
  EXPECT_FALSE(PlanRoom(picture, wanted).fits);
}

// Against a model that knows only sets and sums.
TEST(PlanRoom, NeverTakesWhatIsNeededNorMoreThanIsNeededNorOutOfTurn) {
  std::mt19937 random(11);
  const auto below = [&](uint64_t most) { return random() % most; };
  int evictions = 0;
  for (int round = 0; round < 20000; ++round) {
    const uint64_t contents = 1 + below(8);
    std::vector<uint64_t> sizes;
    for (uint64_t i = 0; i < contents; ++i) sizes.push_back(1 + below(40));
    const auto some_regions = [&] {
      std::vector<RegionBytes> regions;
      for (uint64_t i = 0; i < contents; ++i) {
        if (below(3) == 0) regions.push_back(Region(static_cast<uint8_t>(i), sizes[i]));
      }
      return regions;
    };
    std::vector<ResidentPicture> residents;
    for (uint64_t i = 0; i < below(7); ++i) {
      residents.push_back(
          Resident(i + 1, static_cast<Stay>(below(3)), static_cast<int>(below(5)), some_regions()));
    }
    const auto picture = Picture(40 + below(120), residents);
    const std::vector<WantedVersion> wanted = {Want(100, some_regions()),
                                               Want(101, some_regions())};
    const auto fits_without = [&](const std::function<bool(const ResidentPicture&)>& gone) {
      std::set<RegionId> booked;
      uint64_t sum = 0;
      const auto book = [&](const std::vector<RegionBytes>& regions) {
        for (const auto& region : regions) {
          if (booked.insert(region.id).second) sum += region.bytes[0];
        }
      };
      for (const auto& resident : picture.residents) {
        if (!gone(resident)) book(resident.regions);
      }
      const uint64_t stay = sum;
      for (const auto& version : wanted) book(version.regions);
      return sum <= picture.pools[0].limit_bytes || sum == stay;
    };
    const RoomPlan plan = PlanRoom(picture, wanted);
    const auto leaving = [](const ResidentPicture& one) { return one.stay == Stay::kLeaving; };
    const auto evicted = [&](const ResidentPicture& one) {
      return std::ranges::find(plan.evict, one.key) != plan.evict.end();
    };
    // What is all resident already needs no room, whatever could be evicted.
    EXPECT_EQ(plan.fits, fits_without([](const auto&) { return false; }) ||
                             fits_without([](const auto& one) { return one.stay != Stay::kKept; }))
        << round;
    if (!plan.fits) continue;
    EXPECT_TRUE(fits_without([&](const auto& one) {
      return evicted(one) || (plan.waits && leaving(one));
    })) << round;
    absl::Time latest = absl::InfinitePast();
    VersionKey last;
    for (const auto& one : picture.residents) {
      if (!evicted(one)) continue;
      ++evictions;
      EXPECT_EQ(one.stay, Stay::kIdle);
      if (std::tie(latest, last) < std::tie(one.last_used, one.key)) {
        latest = one.last_used;
        last = one.key;
      }
      EXPECT_FALSE(fits_without([&](const auto& other) {
        return leaving(other) || (evicted(other) && other.key != one.key);
      })) << "round "
          << round << ": could have spared " << one.key.ToString();
    }
    if (plan.evict.empty()) continue;
    EXPECT_FALSE(fits_without([&](const auto& one) {
      return leaving(one) ||
             (one.stay == Stay::kIdle && std::tie(one.last_used, one.key) < std::tie(latest, last));
    })) << "round "
        << round << ": older ones would have been enough";
  }
  EXPECT_GT(evictions, 300);
}

class StrategyTest : public ::testing::Test {
 protected:
  StrategyChoice Choose(uint64_t limit, SwapStrategy asked, bool allow) {
    const auto picture = Picture(limit, {Resident(7, Stay::kKept, 1, {Region(1, 60)})});
    const std::vector<WantedVersion> wanted = {Want(8, {Region(2, 60)})};
    const std::vector<VersionKey> old = {{"m", 7}};
    return ChooseStrategy(picture, wanted, old, asked, allow, "swap to m@8");
  }
};

TEST_F(StrategyTest, WhereBothFitNothingIsEverDown) {
  for (const bool allow : {false, true}) {
    const auto choice = Choose(120, SwapStrategy::kAuto, allow);
    EXPECT_TRUE(choice.refused.ok());
    EXPECT_EQ(choice.strategy, SwapStrategy::kAvailability);
    EXPECT_EQ(choice.room.pools[0].peak_bytes, 120U);
  }
}

TEST_F(StrategyTest, AutoTakesDowntimeOnlyWhenItMay) {
  const auto refused = Choose(100, SwapStrategy::kAuto, false);
  EXPECT_EQ(refused.refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.refused.message()), HasSubstr("--allow-downtime"));
  EXPECT_THAT(std::string(refused.refused.message()), HasSubstr("held by: m@7"));
  const auto numbers = BudgetRefusalOf(refused.refused);
  ASSERT_TRUE(numbers.has_value());
  EXPECT_EQ(numbers->need_bytes, 60U);
  EXPECT_EQ(numbers->have_bytes, 40U);
  EXPECT_EQ(numbers->limit_bytes, 100U);
  const auto choice = Choose(100, SwapStrategy::kAuto, true);
  EXPECT_TRUE(choice.refused.ok());
  EXPECT_EQ(choice.strategy, SwapStrategy::kResource);
  EXPECT_EQ(choice.room.pools[0].peak_bytes, 60U);
}

TEST_F(StrategyTest, AvailabilityIsNeverTurnedIntoDowntime) {
  EXPECT_EQ(Choose(100, SwapStrategy::kAvailability, true).refused.code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(StrategyTest, ResourceNeedsToBeAllowedAndToHelp) {
  EXPECT_EQ(Choose(100, SwapStrategy::kResource, false).refused.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Choose(100, SwapStrategy::kResource, true).refused.ok());
  EXPECT_EQ(Choose(59, SwapStrategy::kResource, true).refused.code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(SwapStrategyNames, AreReadBack) {
  for (const SwapStrategy strategy :
       {SwapStrategy::kAvailability, SwapStrategy::kResource, SwapStrategy::kAuto}) {
    EXPECT_EQ(*ParseSwapStrategy(SwapStrategyName(strategy)), strategy);
  }
  EXPECT_FALSE(ParseSwapStrategy("fast").ok());
}

}  // namespace
}  // namespace modelhost
