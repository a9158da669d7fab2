// Operations as such: who takes whose place, what can be cancelled while its worker hangs, and what
// a restart knows of them.
#include "daemon/registry/manager_operations_test_fixture.h"

namespace modelhost {
namespace {

// --- Who takes whose place

TEST_F(ManagerOperationsTest, ANewerSwapIsTheSuccessorOfTheOlderOne) {
  Start();
  Block("Populate");
  const OperationId older = StartSwap(1);
  const OperationId newer = StartSwap(2);
  const auto ended = Now(older);
  EXPECT_EQ(ended.state, OperationState::kAborted);
  EXPECT_EQ(ended.successor, newer);
  EXPECT_EQ(ended.status.message(), absl::StrCat("planner:stable: superseded by op-", newer));
  Unblock();
  EXPECT_EQ(Await(newer).state, OperationState::kSucceeded);
}

TEST_F(ManagerOperationsTest, AnUnloadIsTheSuccessorOfTheLoad) {
  Start();
  Block("Populate");
  const OperationId load = StartLoad(1);
  AwaitHanging();
  const OperationId unload = StartUnload(1);
  EXPECT_EQ(Now(load).state, OperationState::kAborted);
  EXPECT_EQ(Now(load).successor, unload);
  Unblock();
  EXPECT_EQ(Await(unload).state, OperationState::kSucceeded);
}

TEST_F(ManagerOperationsTest, ALoadIsTheSuccessorOfAnUnloadThatWaits) {
  Start();
  ASSERT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "", 1, {}}).ok());
  const OperationId unload = StartUnload(1);
  const OperationId load = StartLoad(1);
  EXPECT_EQ(Now(unload).state, OperationState::kAborted);
  EXPECT_EQ(Now(unload).successor, load);
  EXPECT_EQ(Now(load).state, OperationState::kSucceeded);
}

TEST_F(ManagerOperationsTest, IdenticalOnesUnderWayAreOne) {
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Swap(2).status.ok());
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Await(StartUnload(2)).status.ok());
  Block("Populate");
  const OperationId swap = StartSwap(2);
  EXPECT_EQ(StartSwap(2), swap);
  EXPECT_EQ(*OnLoop([&] { return manager_->Rollback("planner", "stable", 2, 0); }), swap);
  // With a condition it is another wish.
  SwapRequest compare;
  compare.targets = {{"planner", 2}};
  compare.if_current = 1;
  const OperationId other = *OnLoop([&] { return manager_->Swap(compare, 0); });
  EXPECT_NE(other, swap);
  EXPECT_EQ(Now(swap).successor, other);
  Unblock();
  EXPECT_EQ(Await(other).state, OperationState::kSucceeded);
}

// --- The same once more while it is under way

TEST_F(ManagerOperationsTest, TwoVerificationsOfAVersionAreOne) {
  Start();
  Block("ReadAt");
  const OperationId id = StartVerify(1);
  AwaitHanging();
  EXPECT_EQ(StartVerify(1), id);
  EXPECT_NE(StartVerify(2), id);
}

TEST_F(ManagerOperationsTest, TwoUnloadsOfAVersionAreOne) {
  Start();
  ASSERT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "", 1, {}}).ok());
  const OperationId id = StartUnload(1);
  EXPECT_EQ(StartUnload(1), id);
  EXPECT_EQ(Now(id).state, OperationState::kRunning);
  Block("Populate");  // And while it waits for a load to come to rest.
  StartLoad(2);
  AwaitHanging();
  const OperationId other = StartUnload(2);
  EXPECT_EQ(StartUnload(2), other);
}

TEST_F(ManagerOperationsTest, ASecondPublishOfAVersionWaitsForTheFirstAndFindsItThere) {
  Start();
  Block("WriteAt");
  const std::string bytes = SafetensorsBytes({{"w", {1, 2}}});
  const OperationId first = StartPublish(9, bytes);
  AwaitHanging();
  const OperationId second = StartPublish(9, bytes);
  const OperationId third = StartPublish(9, SafetensorsBytes({{"w", {3, 4}}}));
  const OperationId fourth = StartPublish(9, bytes);
  EXPECT_EQ(Now(second).phase, "wait");
  EXPECT_EQ(Now(second).message,
            absl::StrCat("waiting for op-", first, ", which publishes this version"));
  EXPECT_EQ(Now(third).phase, "wait");
  ExpectCancelledAtOnce(fourth);
  Unblock();
  EXPECT_EQ(Await(first).state, OperationState::kSucceeded);
  const auto same = Await(second);
  EXPECT_EQ(same.state, OperationState::kSucceeded) << same.status;
  EXPECT_TRUE(same.result.unchanged);
  const auto other = Await(third);
  EXPECT_EQ(other.state, OperationState::kFailed);
  EXPECT_EQ(other.status.code(), absl::StatusCode::kAlreadyExists) << other.status;
  EXPECT_THAT(std::string(other.status.message()), HasSubstr("exists with other bytes"));
}

TEST_F(ManagerOperationsTest, AWaitingPublishTakesThePlaceOfOneThatIsCancelled) {
  Start();
  Block("WriteAt");
  const OperationId first = StartPublish(9, SafetensorsBytes({{"w", {1, 2}}}));
  AwaitHanging();
  const OperationId second = StartPublish(9, SafetensorsBytes({{"w", {3, 4}}}));
  EXPECT_EQ(Now(second).phase, "wait");
  ExpectCancelledAtOnce(first);
  EXPECT_EQ(Now(second).phase, "copy");
  Unblock();
  const auto ended = Await(second);
  EXPECT_EQ(ended.state, OperationState::kSucceeded) << ended.status;
  EXPECT_FALSE(ended.result.unchanged);
}

TEST_F(ManagerOperationsTest, AWaitingPublishEndsWhenTheDaemonStops) {
  Start();
  Block("WriteAt");
  const std::string bytes = SafetensorsBytes({{"w", {1, 2}}});
  StartPublish(9, bytes);
  AwaitHanging();
  const OperationId waiting = StartPublish(9, bytes);
  EXPECT_EQ(Now(waiting).phase, "wait");
  OnLoop([&] { manager_->CancelWork(); });
  EXPECT_EQ(Now(waiting).state, OperationState::kFailed);
  EXPECT_THAT(std::string(Now(waiting).status.message()), HasSubstr("stopping"));
  Unblock();
}

// --- Cancelling while the worker hangs

TEST_F(ManagerOperationsTest, ALoadIsCancelledAtOnce) {
  Start();
  Block("Populate");
  const OperationId id = StartLoad(1);
  AwaitHanging();
  ExpectCancelledAtOnce(id);
  Unblock();
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kStaged; });
}

TEST_F(ManagerOperationsTest, ASwapIsCancelledAtOnceAndChangesNothing) {
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  Block("Populate");
  const OperationId id = StartSwap(2);
  AwaitHanging();
  ExpectCancelledAtOnce(id);
  Unblock();
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
}

TEST_F(ManagerOperationsTest, ARollbackIsCancelledAtOnce) {
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Swap(2).status.ok());
  ASSERT_TRUE(Await(StartUnload(1)).status.ok());
  Block("Populate");
  const OperationId id = *OnLoop([&] { return manager_->Rollback("planner", "", 0, 0); });
  AwaitHanging();
  ExpectCancelledAtOnce(id);
}

TEST_F(ManagerOperationsTest, AVerificationIsCancelledAtOnce) {
  Start();
  Block("ReadAt");
  const OperationId id = *OnLoop([&] { return manager_->Verify({"planner", 1}, 0); });
  AwaitHanging();
  ExpectCancelledAtOnce(id);
  // The next one is not the one that was cancelled.
  const OperationId next = *OnLoop([&] { return manager_->Verify({"planner", 1}, 0); });
  EXPECT_NE(next, id);
  Unblock();
  EXPECT_EQ(Await(next).state, OperationState::kSucceeded);
}

TEST_F(ManagerOperationsTest, AnUnloadIsCancelledAtOnceWhereverItWaits) {
  Start();
  ASSERT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "", 1, {}}).ok());
  ExpectCancelledAtOnce(StartUnload(1));
  EXPECT_EQ(PhaseOf(1), Phase::kReady);

  Block("Populate");  // For a load to come to rest.
  StartLoad(2);
  AwaitHanging();
  ExpectCancelledAtOnce(StartUnload(2));
}

TEST_F(ManagerOperationsTest, APublishIsCancelledAtOnceAndPutsNothingInPlace) {
  Start();
  Block("WriteAt");
  const OperationId id = StartPublish(9, SafetensorsBytes({{"w", {1, 2}}}));
  AwaitHanging();
  ExpectCancelledAtOnce(id);
  Unblock();
  Eventually([&] {
    return std::filesystem::is_empty(base_ / "store/incoming") &&
           !std::filesystem::exists(base_ / "store/models/planner/versions/9");
  });
  EXPECT_TRUE(Rescan().ok());
  EXPECT_FALSE(OnLoop([&] { return manager_->Version({"planner", 9}).ok(); }));
}

TEST_F(ManagerOperationsTest, APublishThatIsBeingPutInPlaceCannotBeCancelledAndTellsTheTruth) {
  Start();
  Block("RenameNoReplace");
  const OperationId id = StartPublish(9, SafetensorsBytes({{"w", {1, 2}}}));
  AwaitHanging();
  const absl::Status refused = Cancel(id);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("being put in place"));
  EXPECT_EQ(Now(id).state, OperationState::kRunning);
  Unblock();
  EXPECT_EQ(Await(id).state, OperationState::kSucceeded);
  EXPECT_EQ(PhaseOf(9), Phase::kStaged);
}

// --- The journal

TEST_F(ManagerOperationsTest, ARestartKnowsWhatWasDoneAndNumbersGoOn) {
  Start();
  const auto done = Swap(1);
  const auto failed = OnLoop([&] { return manager_->Load({"planner", 1}, 7); });
  Await(failed);
  Shutdown();
  Boot();
  const auto list = OnLoop([&] { return manager_->ListOperations(); });
  const auto old = Now(done.id);
  EXPECT_EQ(old.state, OperationState::kSucceeded);
  EXPECT_EQ(old.kind, OperationKind::kSwap);
  EXPECT_EQ(old.label, "stable");
  ASSERT_EQ(old.result.changes.size(), 1U);
  EXPECT_EQ(old.result.changes[0].to, 1U);
  EXPECT_EQ(Now(*failed).requested_by_uid, 7U);
  EXPECT_GT(StartLoad(2), list.front().id);
}

TEST_F(ManagerOperationsTest, WhatRanWhenTheDaemonDiedIsAborted) {
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  Block("Populate");
  const OperationId load = StartLoad(2);
  AwaitHanging();
  // As it stands on the disk at this moment.
  const auto copy = base_ / "copy.jsonl";
  const auto journal = base_ / "state/operations.jsonl";
  Eventually([&] {
    std::filesystem::copy_file(journal, copy, std::filesystem::copy_options::overwrite_existing);
    std::ifstream in(copy);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    return text.find(absl::StrCat("\"id\": ", load, ",")) != std::string::npos;
  });
  Unblock();
  Shutdown();
  // A swap that had moved its label, but had not said so yet.
  std::ofstream(copy, std::ios::app)
      << "{\"id\": 90,\"kind\": \"swap\",\"state\": \"RUNNING\",\"model\": "
         "\"planner\",\"version\": 1,"
         "\"label\": \"stable\",\"uid\": 0,\"started\": \"2026-01-01T00:00:00Z\"}\n"
      << "{\"id\": 91,\"kin";
  std::filesystem::copy_file(copy, journal, std::filesystem::copy_options::overwrite_existing);
  Boot();
  const auto aborted = Now(load);
  EXPECT_EQ(aborted.state, OperationState::kAborted);
  EXPECT_EQ(aborted.successor, 0U);
  EXPECT_THAT(std::string(aborted.status.message()), HasSubstr("the daemon ended before it did"));
  EXPECT_THAT(std::string(aborted.status.message()), HasSubstr("modelctl load planner@2"));
  EXPECT_THAT(std::string(Now(90).status.message()), HasSubstr("planner:stable is at 1"));
  EXPECT_EQ(StartLoad(2), 91U);
  Shutdown();
  Boot();  // That they were aborted stands in the journal by now.
  EXPECT_EQ(Now(load).status, aborted.status);
}

TEST_F(ManagerOperationsTest, ABrokenJournalStopsNothingAndIsTold) {
  WriteFile(base_ / "state/operations.jsonl", "nonsense\n");
  Boot();
  EXPECT_NE(OnLoop([&] { return manager_->Status().journal_error; }), "");
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_TRUE(std::filesystem::exists(base_ / "state/operations.jsonl.broken"));
  Eventually([&] { return manager_->Status().journal_error.empty(); });
}

TEST_F(ManagerOperationsTest, AJournalThatCannotBeWrittenStopsNoOperation) {
  Start();
  ASSERT_TRUE(Load(1).status.ok());
  Eventually([&] { return std::filesystem::exists(base_ / "state/operations.jsonl"); });
  os_->FailFrom("WriteAt", 1, ENOSPC);
  const OperationSnapshot id = Load(2);
  EXPECT_TRUE(id.status.ok());
  Eventually([&] { return !told_.errors.empty(); });
  EXPECT_THAT(OnLoop([&] { return manager_->Status().journal_error; }),
              HasSubstr("operations.jsonl"));
  os_->Heal();
  Shutdown();  // Writes it once more.
  Boot();
  EXPECT_EQ(Now(id.id).state, OperationState::kSucceeded);
}

// --- Events

TEST_F(ManagerOperationsTest, EventsOfAllModelsStandInOneOrder) {
  Put(1, {9}, "other");
  Start();
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Load(1, "other").status.ok());
  const EventPage page = OnLoop([&] { return manager_->EventsAfter(0, 1000); });
  std::vector<std::string> seen;
  for (size_t i = 0; i < page.events.size(); ++i) {
    EXPECT_EQ(page.events[i].sequence, i + 1);
    seen.push_back(absl::StrCat(page.events[i].model, " ", page.events[i].what));
  }
  for (const char* expected : {"planner swap started", "planner ready", "planner label",
                               "planner swap succeeded", "other load succeeded"}) {
    EXPECT_THAT(seen, Contains(expected));
  }
  EXPECT_EQ(OnLoop([&] { return manager_->EventsAfter(page.next, 10).events.size(); }), 0U);
}

}  // namespace
}  // namespace modelhost
