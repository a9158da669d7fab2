// Leases, policies and the operation log, each alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "daemon/registry/lease_table.h"
#include "daemon/registry/operation_log.h"
#include "daemon/registry/swap_policy.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NoReleaser final : public DeviceReleaser {
 public:
  void ReleaseLater(std::vector<DeviceSegment> /*segments*/, Reservation /*booked*/) override {}
};

// One region for each number.
DeviceImage ImageOf(const std::vector<uint8_t>& numbers) {
  static NoReleaser releaser;
  DeviceImage image;
  image.gpu = "GPU-1";
  for (const uint8_t number : numbers) {
    DeviceRegion::Parts parts;
    parts.key.content.bytes[0] = number;
    image.regions.push_back(std::make_shared<const DeviceRegion>(releaser, std::move(parts)));
  }
  return image;
}

TEST(LeaseTable, ALeaseEndsOnceAndOnlyForItsHolder) {
  LeaseTable table;
  const SessionId mine = table.BeginSession({}, "native", absl::UnixEpoch());
  const SessionId other = table.BeginSession({}, "native", absl::UnixEpoch());
  const VersionKey key{"planner", 7};
  const LeaseId lease = table.Grant(mine, key, "stable", "host_file", absl::UnixEpoch());
  EXPECT_EQ(table.CountOf(key), 1U);
  EXPECT_EQ(table.Release(other, lease).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table.CountOf(key), 1U);
  EXPECT_TRUE(table.Release(mine, lease).ok());
  EXPECT_EQ(table.CountOf(key), 0U);
  EXPECT_FALSE(table.Release(mine, lease).ok());
}

TEST(LeaseTable, ASessionTakesAllItsLeasesAlong) {
  LeaseTable table;
  const SessionId session = table.BeginSession({}, "native", absl::UnixEpoch());
  const SessionId stays = table.BeginSession({}, "native", absl::UnixEpoch());
  const VersionKey key{"planner", 7};
  for (int i = 0; i < 3; ++i) table.Grant(session, key, "", "host_file", absl::UnixEpoch());
  table.Grant(stays, key, "", "host_file", absl::UnixEpoch());
  EXPECT_EQ(table.EndSession(session).size(), 3U);
  EXPECT_EQ(table.CountOf(key), 1U);
  EXPECT_TRUE(table.EndSession(session).empty());
  EXPECT_EQ(table.leases().size(), 1U);
}

TEST(LeaseTable, AReleasedLeaseKeepsItsDeviceMemoryUntilItEnds) {
  LeaseTable table;
  const SessionId session = table.BeginSession({}, "native", absl::UnixEpoch());
  const VersionKey key{"planner", 7};
  const LeaseId on_gpu = table.Grant(session, key, "", "device_vmm_fd", absl::UnixEpoch(), "GPU-1");
  const LeaseId on_host = table.Grant(session, key, "", "host_file", absl::UnixEpoch());
  const DeviceImage image = ImageOf({5});
  table.Hand(on_gpu, image);
  table.Hand(on_gpu, image);  // The same again.
  table.Hand(on_host, ImageOf({}));
  EXPECT_EQ(image.regions[0].use_count(), 2);
  table.LetGo(key);
  EXPECT_EQ(table.CountOf(key), 0U);
  EXPECT_TRUE(table.Find(session, on_host)->device_memory.empty());
  EXPECT_EQ(image.regions[0].use_count(), 2);
  auto ended = table.Release(session, on_gpu);
  ASSERT_TRUE(ended.ok());
  ASSERT_EQ(ended->device_memory.size(), 1U);
  ended->device_memory.clear();
  EXPECT_EQ(image.regions[0].use_count(), 1);
  EXPECT_TRUE(table.TakeKept(session).empty());
}

// Its process has it mapped whatever the table says.
TEST(LeaseTable, TheDeviceMemoryOfAnEvictedLeaseIsItsSessionsUntilThatEnds) {
  LeaseTable table;
  const SessionId session = table.BeginSession({}, "native", absl::UnixEpoch());
  const DeviceImage image = ImageOf({5});
  for (int i = 0; i < 2; ++i) {
    const LeaseId lease =
        table.Grant(session, {"planner", 7}, "", "device_vmm_fd", absl::UnixEpoch(), "GPU-1");
    table.Hand(lease, image);
    const auto evicted = table.Evict(lease);
    ASSERT_TRUE(evicted.ok());
    EXPECT_TRUE(evicted->device_memory.empty());
  }
  EXPECT_EQ(table.sessions().at(session).kept.size(), 1U);  // It has it mapped once.
  EXPECT_EQ(table.TakeKept(session).size(), 1U);
  EXPECT_EQ(image.regions[0].use_count(), 1);
}

TEST(LeaseTable, TheDeviceMemoryOfEvictedLeasesGoesWhenTheLastIsGivenBack) {
  LeaseTable table;
  const SessionId session = table.BeginSession({}, "native", absl::UnixEpoch());
  const DeviceImage image = ImageOf({5});
  std::vector<LeaseId> evicted;
  for (int i = 0; i < 2; ++i) {
    evicted.push_back(
        table.Grant(session, {"planner", 7}, "", "device_vmm_fd", absl::UnixEpoch(), "GPU-1"));
    table.Hand(evicted.back(), image);
    ASSERT_TRUE(table.Evict(evicted.back()).ok());
  }
  EXPECT_TRUE(table.TakeKept(session, evicted[0]).empty());
  EXPECT_TRUE(table.TakeKept(session + 1, evicted[1]).empty());
  EXPECT_TRUE(table.TakeKept(session, evicted[0]).empty());
  EXPECT_EQ(table.TakeKept(session, evicted[1]).size(), 1U);
  EXPECT_EQ(image.regions[0].use_count(), 1);
}

TEST(LeaseTable, WhatIsLostIsTakenFromEverybody) {
  LeaseTable table;
  const SessionId session = table.BeginSession({}, "native", absl::UnixEpoch());
  const VersionKey key{"planner", 7};
  const LeaseId held = table.Grant(session, key, "", "device_vmm_fd", absl::UnixEpoch(), "GPU-1");
  const LeaseId evicted =
      table.Grant(session, key, "", "device_vmm_fd", absl::UnixEpoch(), "GPU-1");
  const DeviceImage good = ImageOf({1});
  const DeviceImage bad = ImageOf({2});
  const DeviceImage kept = ImageOf({3});
  table.Hand(held, good);
  table.Hand(held, bad);
  table.Hand(evicted, kept);
  ASSERT_TRUE(table.Evict(evicted).ok());
  EXPECT_TRUE(table.TakeLost().empty());
  bad.regions[0]->MarkLost();
  kept.regions[0]->MarkLost();
  EXPECT_EQ(table.TakeLost().size(), 2U);
  EXPECT_EQ(good.regions[0].use_count(), 2);
  EXPECT_EQ(bad.regions[0].use_count(), 1);
  EXPECT_EQ(kept.regions[0].use_count(), 1);
}

TEST(LoadFailure, OnlyTheBytesFaultQuarantines) {
  EXPECT_EQ(ClassifyLoadFailure(absl::DataLossError("digest"), 0), LoadFailure::kBadBytes);
  EXPECT_EQ(ClassifyLoadFailure(absl::DataLossError("read"), EIO), LoadFailure::kTransient);
  EXPECT_EQ(ClassifyLoadFailure(absl::InvalidArgumentError("header"), 0), LoadFailure::kBadBytes);
  EXPECT_EQ(ClassifyLoadFailure(absl::ResourceExhaustedError(""), 0), LoadFailure::kNoRoom);
  EXPECT_EQ(ClassifyLoadFailure(absl::CancelledError(""), 0), LoadFailure::kCancelled);
  EXPECT_EQ(ClassifyLoadFailure(absl::NotFoundError(""), ENOENT), LoadFailure::kTransient);
}

TEST(IfCurrent, ComparesWithWhatIsThereAndNamesIt) {
  EXPECT_TRUE(CheckIfCurrent("m", "stable", std::nullopt, 3).ok());
  EXPECT_TRUE(CheckIfCurrent("m", "stable", 3, 3).ok());
  EXPECT_TRUE(CheckIfCurrent("m", "stable", 0, 0).ok());
  const absl::Status status = CheckIfCurrent("m", "stable", 2, 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("m:stable is at 3"));
}

TEST(NearestName, SuggestsAMisspellingAndNothingFarFetched) {
  const std::vector<std::string> names = {"planner", "detector"};
  EXPECT_EQ(NearestName("planer", names), "planner");
  EXPECT_EQ(NearestName("detektor", names), "detector");
  EXPECT_EQ(NearestName("speech", names), std::nullopt);
  EXPECT_EQ(NearestName("x", names), std::nullopt);
}

TEST(OperationLog, AFinishedOperationIsNotRevivedByLateProgress) {
  ManualClock clock;
  std::vector<OperationState> states;
  OperationLog log(clock,
                   [&](const OperationSnapshot& operation) { states.push_back(operation.state); });
  const OperationId id = log.Begin(OperationKind::kLoad, "planner", 7, "", 1000);
  log.Update(id, [](OperationSnapshot& operation) { operation.bytes_done = 5; });
  log.Finish(id, absl::DataLossError("bad"));
  log.Update(id, [](OperationSnapshot& operation) { operation.bytes_done = 6; });
  log.Finish(id, absl::OkStatus());
  EXPECT_EQ(log.Find(id)->bytes_done, 5U);
  EXPECT_EQ(log.Find(id)->status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(states, ElementsAre(OperationState::kRunning, OperationState::kRunning,
                                  OperationState::kFailed));
}

TEST(OperationLog, AWatcherSeesThePresentAndEveryChangeUntilItLeaves) {
  ManualClock clock;
  OperationLog log(clock, [](const OperationSnapshot&) {});
  const OperationId id = log.Begin(OperationKind::kSwap, "planner", 7, "stable", 0);
  std::vector<uint64_t> seen;
  const uint64_t watch = log.Watch(
      id, [&](const OperationSnapshot& operation) { seen.push_back(operation.sequence); });
  log.Update(id, [](OperationSnapshot&) {});
  log.Unwatch(watch);
  log.Finish(id, absl::OkStatus());
  EXPECT_THAT(seen, ElementsAre(1, 2));
}

TEST(OperationLog, ForgetsWhatIsOldButNeverWhatRuns) {
  ManualClock clock;
  OperationLog log(clock, [](const OperationSnapshot&) {});
  const OperationId running = log.Begin(OperationKind::kLoad, "planner", 1, "", 0);
  const OperationId done = log.Begin(OperationKind::kLoad, "planner", 2, "", 0);
  log.Finish(done, absl::OkStatus());
  clock.Advance(absl::Hours(25));
  log.Begin(OperationKind::kLoad, "planner", 3, "", 0);
  EXPECT_NE(log.Find(running), nullptr);
  EXPECT_EQ(log.Find(done), nullptr);
}

}  // namespace
}  // namespace modelhost
