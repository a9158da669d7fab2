// What is tried again, what is garbage, and the ring of events: each alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "daemon/platform/errno_status.h"
#include "daemon/registry/commit_gate.h"
#include "daemon/registry/event_ring.h"
#include "daemon/registry/gc_policy.h"
#include "daemon/registry/operation_log.h"
#include "daemon/registry/retry_policy.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(RetryPolicy, WhatMayPassIsTransientAndWhatNeedsSomebodyIsNot) {
  for (const int error : {EIO, EAGAIN, ENOMEM, EMFILE, ENFILE, ESTALE, ETIMEDOUT}) {
    EXPECT_TRUE(IsTransient(ErrnoStatus(error, "read"), error)) << error;
  }
  EXPECT_TRUE(IsTransient(absl::UnavailableError("away"), 0));
  for (const int error : {ENOENT, EACCES, EPERM, ENOSPC, ENAMETOOLONG, ELOOP}) {
    EXPECT_FALSE(IsTransient(ErrnoStatus(error, "read"), error)) << error;
  }
  EXPECT_FALSE(IsTransient(absl::DataLossError("digest"), 0));
  EXPECT_FALSE(IsTransient(absl::NotFoundError("gone"), 0));
  EXPECT_FALSE(IsTransient(absl::ResourceExhaustedError("budget"), 0));
  EXPECT_FALSE(IsTransient(absl::CancelledError(""), 0));
}

TEST(RetryPolicy, DelaysDoubleUpToALimitWithJitter) {
  const RetryPolicy policy;
  for (const auto& [attempt, seconds] :
       {std::pair(1, 1), {2, 2}, {3, 4}, {6, 32}, {7, 60}, {1000, 60}}) {
    EXPECT_EQ(RetryDelay(policy, attempt, 0.5), absl::Seconds(seconds)) << attempt;
  }
  EXPECT_EQ(RetryDelay(policy, 3, 0), absl::Seconds(3.2));
  EXPECT_LT(RetryDelay(policy, 3, 0.999), absl::Seconds(4.8));
  EXPECT_GT(RetryDelay(policy, 3, 0.999), absl::Seconds(4.7));
}

GarbageCandidate At(uint64_t version, int created, bool needed = false,
                    const std::string& model = "m") {
  return {{model, version}, absl::FromUnixSeconds(created), needed};
}

TEST(Garbage, IsWhatIsBeyondTheNewestOldestFirst) {
  const std::vector<GarbageCandidate> versions = {At(1, 10), At(2, 20), At(3, 30), At(4, 40)};
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 2}}),
              ElementsAre(VersionKey{"m", 1}, VersionKey{"m", 2}));
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 4}}), IsEmpty());
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 0}}), SizeIs(4));
  // No rule, no garbage.
  EXPECT_THAT(ChooseGarbage(versions, {{"other", 0}}), IsEmpty());
}

TEST(Garbage, WhatIsNeededStaysAndTakesNoPlaceOfANewerOne) {
  const std::vector<GarbageCandidate> versions = {At(1, 10, true), At(2, 20, true), At(3, 30),
                                                  At(4, 40)};
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 2}}), IsEmpty());
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 1}}), ElementsAre(VersionKey{"m", 3}));
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 0}}),
              ElementsAre(VersionKey{"m", 3}, VersionKey{"m", 4}));
}

TEST(Garbage, NewIsByTimeAndThenByNumberAndEachModelHasItsOwn) {
  const std::vector<GarbageCandidate> versions = {At(9, 10), At(1, 20), At(2, 20),
                                                  At(1, 5, false, "n")};
  EXPECT_THAT(ChooseGarbage(versions, {{"m", 1}, {"n", 1}}),
              ElementsAre(VersionKey{"m", 9}, VersionKey{"m", 1}));
}

TEST(FreedBytes, AFileIsFreedWithItsLastNameOnly) {
  const DiskUse one{{{1, 10, 100, 2}, {1, 11, 5, 1}}};
  const DiskUse two{{{1, 10, 100, 2}, {2, 10, 7, 1}}};
  EXPECT_EQ(FreedBytes(std::span(&one, 1)), 5U);
  EXPECT_EQ(FreedBytes(std::vector{one, two}), 112U);
}

TEST(EventRing, AReaderGoesOnWhereItWasAndLearnsWhatItLost) {
  EventRing ring;
  EXPECT_THAT(ring.After(0, 10).events, IsEmpty());
  for (int i = 0; i < 10; ++i) ring.Add({absl::FromUnixSeconds(i), "e", "m", 1, "", 0});
  EventRing::Page page = ring.After(0, 4);
  EXPECT_THAT(page.events, SizeIs(4));
  EXPECT_EQ(page.next, 4U);
  EXPECT_EQ(page.lost, 0U);
  page = ring.After(page.next, 100);
  EXPECT_EQ(page.events.front().sequence, 5U);
  EXPECT_EQ(page.next, 10U);
  EXPECT_THAT(ring.After(10, 100).events, IsEmpty());
  EXPECT_EQ(ring.After(10, 100).next, 10U);
  // A number of another epoch: it gets what comes.
  EXPECT_EQ(ring.After(5000, 100).next, 10U);

  for (size_t i = 0; i < EventRing::kMostEvents; ++i) {
    ring.Add({absl::FromUnixSeconds(100), "e", "m", 1, "", 0});
  }
  page = ring.After(4, 1);
  EXPECT_EQ(page.lost, 6U);
  EXPECT_EQ(page.events.front().sequence, 11U);
  EXPECT_EQ(ring.Before(absl::FromUnixSeconds(50)), 10U);
  EXPECT_EQ(ring.Before(absl::FromUnixSeconds(200)), 10 + EventRing::kMostEvents);
}

TEST(EventRing, ALongDetailIsCut) {
  EventRing ring;
  const std::string text(100'000, 'x');
  EXPECT_LT(ring.Add({absl::UnixEpoch(), "e", "m", 1, text, 0}).detail.size(), 600U);
}

TEST(CommitGate, TheFirstDecides) {
  CommitGate passed;
  EXPECT_TRUE(passed.Pass());
  EXPECT_TRUE(passed.Pass());
  EXPECT_FALSE(passed.Close());
  CommitGate closed;
  EXPECT_TRUE(closed.Close());
  EXPECT_FALSE(closed.Pass());
}

TEST(Superseded, NamesItsSuccessorToPeopleAndToPrograms) {
  const absl::Status status = SupersededBy("planner@8", 12);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(status.message(), "planner@8: superseded by op-12");
  EXPECT_EQ(SuccessorOf(status), 12U);
  EXPECT_EQ(SuccessorOf(SupersededBy("planner@8", 0)), 0U);
  EXPECT_EQ(SuccessorOf(absl::AbortedError("op-3")), 0U);
}

TEST(OperationNames, ComeBackFromTheirText) {
  EXPECT_EQ(OperationKindOf("gc"), OperationKind::kGc);
  EXPECT_EQ(OperationStateOf("ABORTED"), OperationState::kAborted);
  EXPECT_EQ(OperationKindOf("dance"), std::nullopt);
  EXPECT_EQ(OperationStateOf("running"), std::nullopt);
}

}  // namespace
}  // namespace modelhost
