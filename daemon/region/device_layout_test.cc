#include "daemon/region/device_layout.h"

#include <algorithm>
#include <map>
#include <random>

#include "gmock/gmock.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;

constexpr uint64_t kMebibyte = uint64_t{1} << 20;

TEST(DeviceLayout, NothingTakesNothing) {
  const auto layout = PackForDevice({}, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->TotalBytes(), 0);
}

TEST(DeviceLayout, TensorsKeepTheOrderOfTheFile) {
  const HostRange ranges[] = {{1000, 100}, {8, 513}, {600, 0}};
  const auto layout = PackForDevice(ranges, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->places[1].offset, 0);
  EXPECT_EQ(layout->places[0].offset, 1024);
  EXPECT_THAT(layout->segment_bytes, ElementsAre(2 * kMebibyte));
}

TEST(DeviceLayout, TiedWeightsShareTheirPlace) {
  const HostRange ranges[] = {{0, kMebibyte}, {kMebibyte, kMebibyte}, {0, kMebibyte}};
  const auto layout = PackForDevice(ranges, {});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->places[0].offset, layout->places[2].offset);
  EXPECT_EQ(layout->TotalBytes(), 2 * kMebibyte);
}

TEST(DeviceLayout, ATensorThatIsLargerThanASegmentHasOneOfItsOwn) {
  const HostRange ranges[] = {{0, kMebibyte},
                              {kMebibyte, 9 * kMebibyte},
                              {10 * kMebibyte, kMebibyte},
                              {11 * kMebibyte, kMebibyte}};
  const auto layout = PackForDevice(ranges, {.max_segment_bytes = 4 * kMebibyte});
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_THAT(layout->segment_bytes, ElementsAre(2 * kMebibyte, 10 * kMebibyte, 2 * kMebibyte));
  EXPECT_EQ(layout->places[3].segment, 2);
  EXPECT_EQ(layout->places[3].offset, kMebibyte);
}

TEST(DeviceLayout, WhatCannotBeIsRefused) {
  const HostRange huge[] = {{0, UINT64_MAX}};
  EXPECT_TRUE(absl::IsInvalidArgument(PackForDevice(huge, {}).status()));
  const std::vector<HostRange> many(8, HostRange{1, UINT64_MAX / 4});
  EXPECT_TRUE(absl::IsInvalidArgument(PackForDevice(many, {}).status()));
}

TEST(DeviceLayout, NoTwoTensorsOverlapWhateverTheyAre) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<HostRange> ranges;
    for (size_t i = 0; i < 1 + random() % 40; ++i) {
      ranges.push_back({random() % 5000, random() % (3 * kMebibyte)});
    }
    const DeviceLayoutLimits limits{.granularity = kMebibyte, .max_segment_bytes = 8 * kMebibyte};
    const auto layout = PackForDevice(ranges, limits);
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::vector<std::map<uint64_t, uint64_t>> taken(layout->segment_bytes.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (ranges[i].bytes == 0) continue;
      const DevicePlace& place = layout->places[i];
      EXPECT_EQ(place.offset % kDeviceAlignment, 0);
      EXPECT_LE(place.offset + ranges[i].bytes, layout->segment_bytes[place.segment]);
      auto [it, fresh] = taken[place.segment].emplace(place.offset, ranges[i].bytes);
      EXPECT_TRUE(fresh || it->second == ranges[i].bytes);
    }
    for (const auto& segment : taken) {
      uint64_t end = 0;
      for (const auto& [at, bytes] : segment) {
        EXPECT_GE(at, end);
        end = at + bytes;
      }
    }
  }
}

}  // namespace
}  // namespace modelhost
