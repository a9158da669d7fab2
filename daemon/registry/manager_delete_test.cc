// Versions leave the store: when they may, when they may not, and collections of what nobody needs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ManagerDeleteTest : public ManagerTest {
 protected:
  void TearDown() override {
    Unblock();
    ManagerTest::TearDown();
  }
  void Block(const std::string& call) {
    os_->Before(call, [this] {
      hanging_.store(true);
      release_.WaitForNotification();
    });
  }
  void AwaitHanging() {
    Eventually([this] { return hanging_.load(); });
  }
  void Unblock() {
    if (!release_.HasBeenNotified()) release_.Notify();
  }
  absl::StatusOr<OperationId> StartDelete(uint64_t version, const std::string& model = "planner") {
    return OnLoop([&] { return manager_->Delete({model, version}, 0); });
  }
  absl::Status Refused(uint64_t version) { return StartDelete(version).status(); }
  bool OnDisk(uint64_t version) { return std::filesystem::exists(File(version).parent_path()); }
  bool Known(uint64_t version) {
    return OnLoop([&] { return manager_->Version({"planner", version}).ok(); });
  }
  bool NothingStaged() { return std::filesystem::is_empty(base_ / "store/incoming"); }
  std::string hidden_;  // A model that the reader of plans may not see.
  OperationSnapshot Collect(const std::string& model = "") {
    return Await(OnLoop([&] { return manager_->CollectGarbage(model, 0); }));
  }
  template <typename Plan>
  absl::StatusOr<Plan> Planned(
      const std::function<void(std::function<void(absl::StatusOr<Plan>)>)>& ask) {
    auto answer = std::make_shared<std::promise<absl::StatusOr<Plan>>>();
    OnLoop(
        [&] { ask([answer](absl::StatusOr<Plan> plan) { answer->set_value(std::move(plan)); }); });
    return answer->get_future().get();
  }
  absl::StatusOr<GarbagePlan> PlanGarbage() {
    return Planned<GarbagePlan>([&](auto done) {
      manager_->PlanGarbage(
          "", [this](const std::string& model) { return model != hidden_; }, hidden_.empty(),
          std::move(done));
    });
  }
  absl::StatusOr<DeletePlan> PlanDelete(uint64_t version) {
    return Planned<DeletePlan>([&](auto done) {
      manager_->PlanDelete({"planner", version}, std::move(done));
    });
  }

  absl::Notification release_;
  std::atomic<bool> hanging_{false};
};

TEST_F(ManagerDeleteTest, AVersionThatNobodyNeedsGoes) {
  Boot();
  const auto ended = Await(StartDelete(1));
  EXPECT_TRUE(ended.status.ok()) << ended.status;
  EXPECT_EQ(ended.kind, OperationKind::kDelete);
  EXPECT_EQ(ended.result.removed, 1U);
  EXPECT_GT(ended.result.freed_bytes, 0U);
  EXPECT_FALSE(OnDisk(1));
  EXPECT_FALSE(Known(1));
  EXPECT_TRUE(NothingStaged());
  EXPECT_TRUE(Known(2));
  EXPECT_EQ(Refused(1).code(), absl::StatusCode::kNotFound);
  // The number is free again.
  EXPECT_TRUE(PublishOne(1, SafetensorsBytes({{"w", {7}}})).status.ok());
  EXPECT_TRUE(Load(1).status.ok());
}

TEST_F(ManagerDeleteTest, AnIdleReadyOneIsUnloadedFirst) {
  Boot();
  ASSERT_TRUE(Load(1).status.ok());
  const auto plan = PlanDelete(1);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->warnings, ElementsAre(HasSubstr("will be unloaded")));
  EXPECT_TRUE(OnDisk(1));
  EXPECT_TRUE(Await(StartDelete(1)).status.ok());
  EXPECT_FALSE(OnDisk(1));
  EXPECT_EQ(host_->reserved(), 0U);
}

TEST_F(ManagerDeleteTest, WhatIsNeededIsRefusedWithTheReason) {
  Boot();
  ASSERT_TRUE(Swap(1).status.ok());
  EXPECT_THAT(std::string(Refused(1).message()), HasSubstr("label stable names it"));
  EXPECT_EQ(PlanDelete(1).status(), Refused(1));
  ASSERT_TRUE(Swap(2).status.ok());
  // A previous one may go, but the plan says what that means.
  EXPECT_THAT(PlanDelete(1)->warnings, Contains(HasSubstr("rollback")));

  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "", 1, {}}).ok());
  EXPECT_THAT(std::string(Refused(1).message()), HasSubstr("1 lease is on it"));
  OnLoop([&] { manager_->EndSession(session, "closed"); });

  Put(3, {1});
  ASSERT_TRUE(Rescan().ok());
  Block("Populate");
  const auto load = OnLoop([&] { return manager_->Load({"planner", 3}, 0); });
  AwaitHanging();
  EXPECT_THAT(std::string(Refused(3).message()), HasSubstr(absl::StrCat("op-", *load)));
  for (uint64_t version : {1, 2, 3}) EXPECT_TRUE(OnDisk(version));
  EXPECT_EQ(Refused(77).code(), absl::StatusCode::kNotFound);
}

TEST_F(ManagerDeleteTest, NothingBeginsOnWhatIsBeingDeletedAndTwoDeletesAreOne) {
  Boot();
  Block("RenameNoReplace");
  const auto id = StartDelete(1);
  ASSERT_TRUE(id.ok());
  AwaitHanging();
  EXPECT_EQ(*StartDelete(1), *id);
  EXPECT_EQ(OnLoop([&] {
              return manager_->Load({"planner", 1}, 0).status().code();
            }),
            absl::StatusCode::kFailedPrecondition);
  SwapRequest request;
  request.targets = {{"planner", 1}};
  EXPECT_EQ(OnLoop([&] { return manager_->Swap(request, 0).status().code(); }),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(OnLoop([&] {
              return manager_->Verify({"planner", 1}, 0).status().code();
            }),
            absl::StatusCode::kFailedPrecondition);
  // It may be gone by now: too late.
  EXPECT_EQ(OnLoop([&] { return manager_->CancelOperation(*id).code(); }),
            absl::StatusCode::kFailedPrecondition);
  Unblock();
  EXPECT_TRUE(Await(*id).status.ok());
}

TEST_F(ManagerDeleteTest, ADeleteIsCancelledAtOnceBeforeItsRename) {
  Boot();
  // All threads for short work hang, so the rename has not begun.
  for (int i = 0; i < 2; ++i) short_work_->Post([this] { release_.WaitForNotification(); });
  const auto id = StartDelete(1);
  const auto ended = OnLoop([&] {
    EXPECT_TRUE(manager_->CancelOperation(*id).ok());
    return *manager_->GetOperation(*id);
  });
  EXPECT_EQ(ended.state, OperationState::kCancelled);
  Unblock();
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_TRUE(OnDisk(1));
}

TEST_F(ManagerDeleteTest, AFailedRenameLeavesTheVersionUsable) {
  Boot();
  os_->FailCall("RenameNoReplace", 1, EIO);
  const auto ended = Await(StartDelete(1));
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_THAT(std::string(ended.status.message()), HasSubstr("planner@1"));
  EXPECT_TRUE(OnDisk(1));
  EXPECT_TRUE(Load(1).status.ok());
}

TEST_F(ManagerDeleteTest, BytesThatCannotBeRemovedAreToldOfAndCollectedLater) {
  Boot();
  os_->FailCall("RemoveTreeAt", 1, EIO);
  const auto ended = Await(StartDelete(1));
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_THAT(std::string(ended.status.message()), HasSubstr("not all of its bytes"));
  EXPECT_EQ(ended.result.freed_bytes, 0U);
  EXPECT_FALSE(Known(1));
  EXPECT_FALSE(NothingStaged());
  const auto plan = PlanGarbage();
  ASSERT_TRUE(plan.ok());
  ASSERT_EQ(plan->items.size(), 1U);
  EXPECT_EQ(plan->items[0].kind, "staging");
  hidden_ = "other";  // Names of what is left may be those of any model.
  EXPECT_TRUE(PlanGarbage()->items.empty());
  const auto collected = Collect();
  EXPECT_TRUE(collected.status.ok());
  EXPECT_GT(collected.result.freed_bytes, 0U);
  EXPECT_TRUE(NothingStaged());
}

TEST_F(ManagerDeleteTest, AnUnusableVersionCanBeDeleted) {
  Put(3, {1});
  std::filesystem::permissions(File(3), std::filesystem::perms(0666));
  Boot();
  EXPECT_FALSE(Known(3));
  EXPECT_TRUE(Await(StartDelete(3)).status.ok());
  EXPECT_FALSE(OnDisk(3));
  const auto model = OnLoop([&] { return manager_->Model("planner"); });
  for (const VersionSnapshot& version : model->versions) EXPECT_TRUE(version.invalid.empty());
}

TEST_F(ManagerDeleteTest, GcLeavesAsManyAsThePolicySaysAndAllThatAreNeeded) {
  for (uint64_t version = 3; version <= 6; ++version) Put(version, {1.0F * version});
  ManagerOptions options;
  options.model_policies["planner"].keep_on_disk = 2;
  Boot(options);
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Swap(2).status.ok());  // 2 is labelled, 1 the one to go back to.
  const auto plan = PlanGarbage();
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<uint64_t> planned;
  for (const GarbageItem& item : plan->items) planned.push_back(item.key.version);
  EXPECT_THAT(planned, ElementsAre(3U, 4U));
  const auto ended = Collect();
  EXPECT_TRUE(ended.status.ok()) << ended.status;
  EXPECT_EQ(ended.kind, OperationKind::kGc);
  EXPECT_EQ(ended.result.removed, 2U);
  EXPECT_EQ(ended.result.freed_bytes, plan->freed_bytes);
  for (const uint64_t version : planned) EXPECT_FALSE(OnDisk(version)) << version;
  for (const uint64_t version : {1, 2, 5, 6}) EXPECT_TRUE(OnDisk(version)) << version;
  EXPECT_TRUE(Collect().result.unchanged);
  EXPECT_TRUE(Await(OnLoop([&] { return manager_->Rollback("planner", "", 0, 0); })).status.ok());
}

TEST_F(ManagerDeleteTest, GcGoesOnAfterAFailureAndTellsIt) {
  Put(3, {3});
  ManagerOptions options;
  options.model_policies["planner"].keep_on_disk = 1;
  Boot(options);
  os_->FailCall("RenameNoReplace", 1, EIO);
  const auto ended = Collect();
  EXPECT_EQ(ended.state, OperationState::kFailed);
  EXPECT_EQ(ended.result.removed, 1U);
  EXPECT_EQ(Collect().result.removed, 1U);
}

TEST_F(ManagerDeleteTest, GcIsOneAtATimeAndCancelledAtOnce) {
  Put(3, {3});
  ManagerOptions options;
  options.model_policies["planner"].keep_on_disk = 1;
  Boot(options);
  Block("RenameNoReplace");
  const auto id = OnLoop([&] { return manager_->CollectGarbage("", 0); });
  AwaitHanging();
  EXPECT_EQ(*OnLoop([&] { return manager_->CollectGarbage("", 0); }), *id);
  const auto ended = OnLoop([&] {
    EXPECT_TRUE(manager_->CancelOperation(*id).ok());
    return *manager_->GetOperation(*id);
  });
  EXPECT_EQ(ended.state, OperationState::kCancelled);
  Unblock();
  // The one that had begun has gone, the next has not.
  Eventually([&] { return manager_->Model("planner")->versions.size() == 2; });
  // The older of the two, as soon as the collection has let go of it.
  Eventually([&] { return manager_->Delete({"planner", 2}, 0).ok(); });
}

TEST_F(ManagerDeleteTest, GcOfOneModelLeavesTheOthersAlone) {
  Put(1, {9}, "other");
  Put(2, {8}, "other");
  ManagerOptions options;
  options.model_policies["planner"].keep_on_disk = 1;
  options.model_policies["other"].keep_on_disk = 1;
  Boot(options);
  hidden_ = "other";  // Who may not read a model learns nothing of its garbage.
  const auto plan = PlanGarbage();
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->items.size(), 1U);
  EXPECT_EQ(plan->items[0].key.model, "planner");
  EXPECT_EQ(plan->bytes, plan->items[0].bytes);
  EXPECT_EQ(Collect("planner").result.removed, 1U);
  EXPECT_EQ(OnLoop([&] { return manager_->Model("other")->versions.size(); }), 2U);
  EXPECT_EQ(OnLoop([&] { return manager_->CollectGarbage("nobody", 0).status().code(); }),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace modelhost
