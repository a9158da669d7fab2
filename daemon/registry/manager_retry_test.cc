// What may pass is tried again: loads and verifications.
#include "daemon/registry/manager_operations_test_fixture.h"

namespace modelhost {
namespace {

using ManagerRetryTest = ManagerOperationsTest;

TEST_F(ManagerRetryTest, ATransientFailureIsTriedAgainAndSucceeds) {
  Start(Quick());
  os_->FailCall("Populate", 1, EIO);
  os_->FailCall("Populate", 2, EMFILE);
  const auto ended = Load(1);
  EXPECT_EQ(ended.state, OperationState::kSucceeded) << ended.status;
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  OnLoop([&] {
    EXPECT_THAT(told_.attempts, testing::ElementsAre(1, 2));
    EXPECT_LT(told_.delays[0], told_.delays[1]);
  });
}

TEST_F(ManagerRetryTest, ItGivesUpAfterAsManyTriesAsAllowedAndSaysWhy) {
  Start(Quick(2));
  os_->FailFrom("Populate", 1, EIO);
  const auto ended = Load(1);
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_THAT(std::string(ended.status.message()), HasSubstr("Populate"));
  EXPECT_EQ(PhaseOf(1), Phase::kFailed);
  OnLoop([&] { EXPECT_THAT(told_.attempts, testing::ElementsAre(1, 2)); });
  // Who asks again gets a series of tries of their own, and the truth again.
  EXPECT_EQ(Load(1).state, OperationState::kFailed);
  OnLoop([&] { EXPECT_THAT(told_.attempts, testing::ElementsAre(1, 2, 1, 2)); });
}

TEST_F(ManagerRetryTest, PermanentFailuresAreNotTriedAgain) {
  Start(Slow());
  os_->FailCall("Populate", 1, EACCES);
  EXPECT_EQ(Load(1).state, OperationState::kFailed);
  std::filesystem::permissions(File(2), std::filesystem::perms(0644));
  WriteFile(File(2), "this is no model at all");
  std::filesystem::permissions(File(2), std::filesystem::perms(0444));
  const auto bad = Load(2);
  EXPECT_EQ(bad.state, OperationState::kFailed);
  EXPECT_EQ(PhaseOf(2), Phase::kQuarantined);
  const auto again = Load(2);
  EXPECT_EQ(again.state, OperationState::kFailed);
  EXPECT_EQ(again.status, bad.status);
  EXPECT_EQ(Swap(2).status.message(), bad.status.message());
  OnLoop([&] { EXPECT_TRUE(told_.attempts.empty()); });
}

TEST_F(ManagerRetryTest, WhileItWaitsItSaysSoAndCanBeCancelled) {
  Start(Slow());
  os_->FailCall("Populate", 1, EIO);
  const OperationId id = StartLoad(1);
  AwaitPhase(id, "retry");
  const auto waiting = Now(id);
  EXPECT_EQ(waiting.state, OperationState::kRunning);
  EXPECT_EQ(waiting.attempts, 1U);
  EXPECT_GT(waiting.next_try, clock_.Wall() + absl::Minutes(50));
  EXPECT_THAT(waiting.message, HasSubstr("Populate"));
  EXPECT_EQ(PhaseOf(1), Phase::kFailed);
  ExpectCancelledAtOnce(id);
  EXPECT_EQ(PhaseOf(1), Phase::kFailed);
  EXPECT_EQ(Version(1).error.code(), absl::StatusCode::kDataLoss);
}

TEST_F(ManagerRetryTest, ALoadThatWaitsForItsNextTryEndsWhenItsBytesAreFoundToBeBad) {
  Start(Slow());
  ASSERT_TRUE(PublishOne(5, SafetensorsBytes({{"w", {8, 8}}})).status.ok());
  os_->FailCall("Populate", 1, EIO);
  const OperationId load = StartLoad(5);
  AwaitPhase(load, "retry");
  Flip(5);
  const auto verified = Await(OnLoop([&] { return manager_->Verify({"planner", 5}, 0); }));
  EXPECT_EQ(verified.state, OperationState::kFailed);
  EXPECT_EQ(PhaseOf(5), Phase::kQuarantined);
  const auto told = Now(load);
  EXPECT_EQ(told.state, OperationState::kFailed);
  EXPECT_EQ(told.status, verified.status);
}

TEST_F(ManagerRetryTest, AnExplicitRequestDoesNotWaitForTheNextTry) {
  Start(Slow());
  os_->FailCall("Populate", 1, EIO);
  const OperationId id = StartLoad(1);
  AwaitPhase(id, "retry");
  EXPECT_EQ(StartLoad(1), id);
  EXPECT_EQ(Await(id).state, OperationState::kSucceeded);

  os_->FailCall("Populate", 1, EIO);
  const OperationId swap = StartSwap(2);
  AwaitPhase(swap, "retry");
  EXPECT_EQ(StartSwap(2), swap);
  EXPECT_EQ(Await(swap).state, OperationState::kSucceeded);
}

TEST_F(ManagerRetryTest, AnUnloadEndsALoadThatWaitsForItsNextTry) {
  Start(Slow());
  os_->FailCall("Populate", 1, EIO);
  const OperationId load = StartLoad(1);
  AwaitPhase(load, "retry");
  const OperationId unload = StartUnload(1);
  EXPECT_EQ(Now(unload).state, OperationState::kSucceeded);
  EXPECT_EQ(Now(load).successor, unload);
}

TEST_F(ManagerRetryTest, WhatALabelNamesIsTriedForAsLongAsItTakes) {
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  Shutdown();
  const auto place = base_ / "store/models/planner/versions/1";
  std::filesystem::rename(place, base_ / "elsewhere");
  Boot(Quick(2));
  os_->FailFrom("Populate", 1, EIO);
  std::filesystem::rename(base_ / "elsewhere", place);
  ASSERT_TRUE(Rescan().ok());
  // Far more often than an operation would be.
  Eventually([&] { return os_->calls("Populate") > 8; });
  os_->Heal();
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kReady; });
}

TEST_F(ManagerRetryTest, AVerificationIsTriedAgainWithinItsOperation) {
  Start(Quick());
  os_->FailCall("ReadAt", 1, EIO);
  os_->FailCall("ReadAt", 2, EMFILE);
  const auto ended = Await(StartVerify(1));
  EXPECT_EQ(ended.state, OperationState::kSucceeded) << ended.status;
  EXPECT_EQ(ended.attempts, 2U);
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
  os_->FailFrom("ReadAt", 1, EIO);
  const auto failed = Await(StartVerify(1));
  EXPECT_EQ(failed.state, OperationState::kFailed);
  EXPECT_EQ(failed.attempts, 3U);
  EXPECT_THAT(std::string(failed.status.message()), HasSubstr("ReadAt"));
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);  // Nothing is known of its bytes.
}

TEST_F(ManagerRetryTest, AVerificationThatNeedsSomebodyIsNotTriedAgain) {
  Start(Slow());
  os_->FailFrom("ReadAt", 1, EACCES);
  const auto ended = Await(StartVerify(2));
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_EQ(ended.attempts, 0U);
}

TEST_F(ManagerRetryTest, AVerificationThatWaitsSaysSoAndIsJoinedCancelledAndStopped) {
  Start(Slow());
  os_->FailFrom("ReadAt", 1, EIO);
  const OperationId id = StartVerify(1);
  AwaitPhase(id, "retry");
  EXPECT_GT(Now(id).next_try, clock_.Wall() + absl::Minutes(50));
  EXPECT_THAT(Now(id).message, HasSubstr("ReadAt"));
  EXPECT_THAT(std::string(OnLoop([&] {
                            return manager_->Delete({"planner", 1}, 0).status();
                          }).message()),
              HasSubstr("is verifying it"));
  os_->Heal();
  EXPECT_EQ(StartVerify(1), id);  // Which does not wait for the next try.
  EXPECT_EQ(Await(id).state, OperationState::kSucceeded);

  os_->FailFrom("ReadAt", 1, EIO);
  const OperationId cancelled = StartVerify(1);
  AwaitPhase(cancelled, "retry");
  ExpectCancelledAtOnce(cancelled);

  os_->FailFrom("ReadAt", 1, EIO);
  const OperationId stopped = StartVerify(1);
  AwaitPhase(stopped, "retry");
  os_->Heal();
  Shutdown();
  Boot();
  EXPECT_EQ(Now(stopped).state, OperationState::kFailed);
  EXPECT_THAT(std::string(Now(stopped).status.message()), HasSubstr("stopping"));
}

}  // namespace
}  // namespace modelhost
