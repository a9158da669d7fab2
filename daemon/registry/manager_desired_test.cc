// The desired state file followed by a manager on real parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

class ManagerDesiredTest : public ManagerTest {
 protected:
  std::string path() const { return base_ / "conf/models"; }

  void Write(const std::string& text) {
    std::filesystem::create_directories(base_ / "conf");
    WriteFile(base_ / "conf/models.new", text);
    std::filesystem::rename(base_ / "conf/models.new", path());
  }

  // The poll is the test's own: LookAtDesired.
  void BootAndFollow() {
    ManagerOptions options;
    options.desired_poll = absl::Hours(1);
    Boot(options);
    OnLoop([&] { manager_->FollowDesired(path()); });
  }

  void WriteAndLook(const std::string& text) {
    Write(text);
    OnLoop([&] { manager_->LookAtDesired(); });
  }

  DesiredSnapshot Desired() {
    return OnLoop([&] { return manager_->Status().desired; });
  }
  uint64_t LabelNow(const std::string& label = "stable", const std::string& model = "planner") {
    return OnLoop([&]() -> uint64_t {
      const auto found = manager_->Resolve(model, label);
      return found.ok() ? found->version : 0;
    });
  }
  void EventuallyInSync(uint64_t labels) {
    Eventually([&] {
      const DesiredSnapshot now = manager_->Status().desired;
      return now.state == DesiredFileState::kOk && now.in_sync == labels &&
             now.rows.size() == labels;
    });
  }
  void EventuallyState(DesiredFileState state) {
    Eventually([&] { return manager_->Status().desired.state == state; });
  }
  std::vector<OperationSnapshot> DesiredSwaps() {
    std::vector<OperationSnapshot> list = OnLoop([&] { return manager_->ListOperations(); });
    std::erase_if(list, [](const auto& one) { return one.trigger != kTriggerDesired; });
    return list;
  }
};

TEST_F(ManagerDesiredTest, ConvergesFromNothingByOrdinarySwaps) {
  Write("planner.stable = 2\nplanner.canary = 1\n");
  BootAndFollow();
  EventuallyInSync(2);
  EXPECT_EQ(LabelNow(), 2u);
  EXPECT_EQ(LabelNow("canary"), 1u);
  const auto swaps = DesiredSwaps();
  ASSERT_EQ(swaps.size(), 2u);
  EXPECT_EQ(swaps[0].kind, OperationKind::kSwap);
  EXPECT_EQ(swaps[0].requested_by_uid, ::geteuid());
  const DesiredSnapshot now = Desired();
  EXPECT_NE(now.last_converged, absl::InfinitePast());
  EXPECT_EQ(now.pending + now.failed + now.drifting, 0u);
}

TEST_F(ManagerDesiredTest, AVersionThatIsNotThereIsWaitedFor) {
  Write("planner.stable = 7\n");
  BootAndFollow();
  Eventually([&] { return manager_->Status().desired.rows.size() == 1; });
  EXPECT_EQ(Desired().rows[0].state, DesiredLabelState::kPending);
  EXPECT_EQ(Desired().rows[0].reason, "planner@7 is not in the store yet");
  EXPECT_TRUE(DesiredSwaps().empty());
  Put(7, {7});
  ASSERT_TRUE(Rescan().ok());
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 7u);
}

TEST_F(ManagerDesiredTest, ALabelThatTheFileLacksIsLeftAlone) {
  Write("planner.stable = 1\nplanner.canary = 2\n");
  BootAndFollow();
  EventuallyInSync(2);
  WriteAndLook("# nothing\n");
  Eventually([&] { return manager_->Status().desired.rows.empty(); });
  EXPECT_EQ(LabelNow(), 1u);
  EXPECT_EQ(LabelNow("canary"), 2u);
  EXPECT_TRUE(Swap(2).status.ok());
  EXPECT_EQ(LabelNow(), 2u);  // Nobody brings it back.
}

TEST_F(ManagerDesiredTest, ABrokenFileChangesNothingUntilItIsGood) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  WriteAndLook("planner.stable = 2\nplanner.canary = zwei\n");
  EventuallyState(DesiredFileState::kBroken);
  EXPECT_THAT(Desired().error, HasSubstr("models:2: planner.canary: 'zwei'"));
  // Also what it wanted before is not acted on: somebody moves a label in peace.
  EXPECT_TRUE(Swap(2).status.ok());
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(LabelNow(), 2u);
  EXPECT_EQ(Desired().rows[0].reason, "nothing is done while the file is broken");
  WriteAndLook("planner.stable = 1\n");
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 1u);
}

TEST_F(ManagerDesiredTest, AMissingFileIsNoInstruction) {
  BootAndFollow();
  EventuallyState(DesiredFileState::kMissing);
  Write("planner.stable = 1\n");
  OnLoop([&] { manager_->LookAtDesired(); });
  EventuallyInSync(1);
  std::filesystem::remove(path());
  OnLoop([&] { manager_->LookAtDesired(); });
  EventuallyState(DesiredFileState::kMissing);
  EXPECT_TRUE(Swap(2).status.ok());
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(LabelNow(), 2u);
}

TEST_F(ManagerDesiredTest, AManualMoveIsDriftAndIsBroughtBack) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  const size_t before = DesiredSwaps().size();
  EXPECT_TRUE(Swap(2).status.ok());
  Eventually([&] { return manager_->Resolve("planner", "stable")->version == 1; });
  EventuallyInSync(1);
  EXPECT_EQ(DesiredSwaps().size(), before + 1);
  const auto events = OnLoop([&] { return manager_->Events("planner"); });
  EXPECT_TRUE(std::ranges::any_of(events, [](const EventRecord& event) {
    return event.what == "drift" && event.version == 2;
  }));
}

TEST_F(ManagerDesiredTest, ARemovedLabelIsBroughtBack) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  std::atomic<bool> removed = false;
  OnLoop([&] {
    manager_->RemoveLabel("planner", "stable", std::nullopt,
                          [&](const auto& change) { removed = change.ok(); });
  });
  Eventually([&] { return removed.load(); });
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 1u);
}

TEST_F(ManagerDesiredTest, BadBytesKeepTheOldVersionServingUntilARepair) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  std::filesystem::permissions(File(2), std::filesystem::perms(0644));
  WriteFile(File(2), "this is no model at all");
  std::filesystem::permissions(File(2), std::filesystem::perms(0444));
  WriteAndLook("planner.stable = 2\n");
  Eventually([&] { return manager_->Status().desired.failed == 1; });
  Eventually([&] { return manager_->Version({"planner", 2})->phase == Phase::kQuarantined; });
  EXPECT_EQ(LabelNow(), 1u);
  EXPECT_THAT(Desired().rows[0].reason, HasSubstr("planner@2: QUARANTINED"));
  const size_t tries = DesiredSwaps().size();
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(DesiredSwaps().size(), tries);  // Nothing helps but a repair.
  WriteAndLook("planner.stable = 1\n");
  EventuallyInSync(1);
}

TEST_F(ManagerDesiredTest, AFailureIsTriedAgainAndASuccessForgetsIt) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  os_->FailFrom("Sync", 1, ENOSPC);  // labels.json cannot be made durable.
  WriteAndLook("planner.stable = 2\n");
  Eventually([&] { return manager_->Status().desired.failed == 1; });
  EXPECT_THAT(Desired().rows[0].reason, HasSubstr("tried again"));
  EXPECT_EQ(LabelNow(), 1u);
  os_->Heal();
  EventuallyInSync(1);  // By its own timer.
  EXPECT_EQ(LabelNow(), 2u);
  EXPECT_LE(DesiredSwaps().size(), 5u);  // Not retried hot.
}

TEST_F(ManagerDesiredTest, ANewTextReplacesTheSwapOfTheOldOne) {
  ManagerOptions options;
  options.desired_poll = absl::Hours(1);
  load_threads_ = 1;
  Boot(options);
  // The load of 1 is held up until the file has changed its mind.
  absl::Notification go;
  os_->Before("Populate", [&] { go.WaitForNotificationWithTimeout(absl::Seconds(20)); });
  Write("planner.stable = 1\n");
  OnLoop([&] { manager_->FollowDesired(path()); });
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kLoading; });
  WriteAndLook("planner.stable = 2\n");
  Eventually([&] {
    const auto swaps = manager_->ListOperations();
    return swaps.size() == 2 && absl::IsAborted(swaps[1].status);
  });
  go.Notify();
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 2u);
  os_->Heal();
}

TEST_F(ManagerDesiredTest, AHalfWrittenLastLineIsTakenOnlyWhenItStays) {
  Put(12, {12});
  Write("planner.stable = 2\n");
  BootAndFollow();
  EventuallyInSync(1);
  // "12" is being written.
  WriteAndLook("planner.stable = 1");
  Eventually([&] { return os_->calls("ReadAt") > 0; });
  WriteAndLook("planner.stable = 12");
  EventuallyInSync(1);
  Eventually([&] { return manager_->Resolve("planner", "stable")->version == 12; });
  for (const auto& swap : DesiredSwaps()) EXPECT_NE(swap.version, 1u);
}

TEST_F(ManagerDesiredTest, AReadThatHangsIsSaidAndNoOtherIsStarted) {
  ManagerOptions options;
  options.desired_poll = absl::Hours(1);
  options.desired_read_limit = absl::Milliseconds(20);
  Boot(options);
  absl::Notification go;
  std::atomic<int> opened = 0;
  Write("planner.stable = 1\n");
  os_->Before("OpenDir", [&] {
    ++opened;
    go.WaitForNotificationWithTimeout(absl::Seconds(20));
  });
  OnLoop([&] { manager_->FollowDesired(path()); });
  EventuallyState(DesiredFileState::kBroken);
  EXPECT_THAT(Desired().error, HasSubstr("not read within"));
  OnLoop([&] { manager_->LookAtDesired(); });
  EXPECT_EQ(opened, 1);
  go.Notify();
  EventuallyInSync(1);
  os_->Heal();
}

TEST_F(ManagerDesiredTest, ARestartFollowsTheFileAgain) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  Shutdown();
  Write("planner.stable = 2\n");
  BootAndFollow();
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 2u);
}

TEST_F(ManagerDesiredTest, AnotherFileOrNoneIsFollowedAtOnce) {
  Write("planner.stable = 1\n");
  BootAndFollow();
  EventuallyInSync(1);
  WriteFile(base_ / "other", "planner.stable = 2\n");
  OnLoop([&] { manager_->FollowDesired(base_ / "other"); });
  EventuallyInSync(1);
  EXPECT_EQ(LabelNow(), 2u);
  OnLoop([&] { manager_->FollowDesired(""); });
  EXPECT_EQ(Desired().state, DesiredFileState::kOff);
  EXPECT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(LabelNow(), 1u);
}

TEST_F(ManagerDesiredTest, ManyLabelsConvergeEachByItself) {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    const std::string model = absl::StrCat("m", i);
    Put(1, {static_cast<float>(i)}, model);
    absl::StrAppend(&text, model, " = ", i == 7 ? 99 : 1, "\n");
  }
  Write(text);
  BootAndFollow();
  Eventually([&] { return manager_->Status().desired.in_sync == 39; });
  EXPECT_EQ(Desired().pending, 1u);
  EXPECT_EQ(LabelNow("stable", "m39"), 1u);
}

}  // namespace
}  // namespace modelhost
