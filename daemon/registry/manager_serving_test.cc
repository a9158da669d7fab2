// What is READY, and may not be handed out any more.
#include <gmock/gmock.h>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ServingTest : public ManagerTest {
 protected:
  // READY as version 3, for linux-x86_64, and leased.
  void ServeBound() {
    Boot();
    SetPlatform("linux-x86_64");
    const std::string bytes = SafetensorsBytes({{"w", {7, 8, 9}}});
    ASSERT_TRUE(PublishOne(3, bytes, {{"platform", "linux-x86_64"}}).status.ok());
    ASSERT_TRUE(Swap(3).status.ok());
    session_ = NewSession();
    ASSERT_TRUE(Lease().ok());
  }

  absl::Status Lease() {
    const std::vector<AcquireRef> refs = {{"planner", kDefaultLabel, 0, Digest{}}};
    return OnLoop([&]() -> absl::Status {
      auto grants = manager_->Acquire(session_, refs);
      if (grants.ok()) leases_.push_back((*grants)[0].lease);
      return grants.status();
    });
  }

  absl::Status SetLabel(const std::string& label, uint64_t version) {
    auto told = std::make_shared<std::promise<absl::Status>>();
    auto future = told->get_future();
    OnLoop([&] {
      manager_->SetLabel("planner", label, version, std::nullopt,
                         [told](const auto& result) { told->set_value(result.status()); });
    });
    return future.get();
  }

  // As a reload of the configuration does.
  void Reload(const std::string& platform) {
    SetPlatform(platform);
    OnLoop([&] { manager_->ReviewServed(); });
  }

  void ExpectRefused(const absl::Status& status) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("planner@3"), HasSubstr("linux-x86_64"), HasSubstr("linux-aarch64")));
  }

  SessionId session_ = 0;
  std::vector<LeaseId> leases_;
};

TEST_F(ServingTest, AnotherMachineStopsGrantsLabelsAndLoadsButNoLease) {
  ServeBound();
  Reload("linux-aarch64");
  ExpectRefused(Lease());
  ExpectRefused(Load(3).status);
  ExpectRefused(SetLabel("canary", 3));
  ExpectRefused(Swap(3).status);
  ExpectRefused(Version(3).error);
  EXPECT_EQ(PhaseOf(3), Phase::kReady);
  EXPECT_TRUE(OnLoop([&] { return manager_->Leased(session_, leases_[0]).ok(); }));
  EXPECT_TRUE(Swap(1).status.ok());
  ExpectRefused(OnLoop([&] { return manager_->Rollback("planner", kDefaultLabel, 0, 0); }).ok()
                    ? Swap(3).status
                    : absl::UnknownError("no rollback"));

  Reload("linux-x86_64");
  EXPECT_TRUE(Swap(3).status.ok());
  EXPECT_TRUE(Lease().ok());
  EXPECT_TRUE(Version(3).error.ok());
}

TEST_F(ServingTest, WhatIsNotKnownAnyMoreTakesNothingAway) {
  ServeBound();
  OnLoop([&] { machine_.facts.platform = {{}, "", "gone"}; });
  OnLoop([&] { manager_->ReviewServed(); });
  EXPECT_TRUE(Lease().ok());
  EXPECT_TRUE(SetLabel("canary", 3).ok());
}

TEST_F(ServingTest, AStricterPolicyStopsGrantsToo) {
  ServeBound();
  ModelPolicy policy;
  policy.requires_files = std::vector<std::string>{"tokenizer.json"};
  OnLoop([&] { manager_->SetModelPolicies({{"planner", policy}}); });
  const absl::Status refused = Lease();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("tokenizer.json"));
  EXPECT_EQ(PhaseOf(3), Phase::kReady);
  OnLoop([&] { manager_->SetModelPolicies({}); });
  EXPECT_TRUE(Lease().ok());
}

TEST_F(ServingTest, AReloadDuringALoadHasTheLastWord) {
  Boot();
  SetPlatform("linux-x86_64");
  const std::string bytes = SafetensorsBytes({{"w", {7, 8, 9}}});
  ASSERT_TRUE(PublishOne(3, bytes, {{"platform", "linux-x86_64"}}).status.ok());
  // After its own comparison, before it is done.
  ModelPolicy policy;
  policy.requires_files = std::vector<std::string>{"tokenizer.json"};
  os_->Before("Stat", [&] {
    if (machine_.looks == 0) return;
    loop_->Post([&] { manager_->SetModelPolicies({{"planner", policy}}); });
  });
  const auto loaded = Load(3);
  os_->Heal();
  EXPECT_TRUE(absl::IsFailedPrecondition(loaded.status)) << loaded.status;
  EXPECT_THAT(std::string(loaded.status.message()), HasSubstr("tokenizer.json"));
  EXPECT_EQ(PhaseOf(3), Phase::kFailed);
}

TEST_F(ServingTest, WhatALabelNamesIsLoadedAgainAfterAReload) {
  ServeBound();
  Shutdown();
  machine_.facts.platform.values = {"linux-aarch64"};
  Boot();
  Eventually([&] { return manager_->Version({"planner", 3})->phase == Phase::kFailed; });
  OnLoop([&] { manager_->ReviewServed(); });  // Nothing has changed.
  Eventually([&] { return manager_->Version({"planner", 3})->phase == Phase::kFailed; });
  Reload("linux-x86_64");
  Eventually([&] { return manager_->Version({"planner", 3})->phase == Phase::kReady; });
}

TEST_F(ServingTest, WhoWaitsIsServedWhenTheMachineIsRightAgain) {
  ServeBound();
  Reload("linux-aarch64");
  auto told = std::make_shared<std::promise<absl::Status>>();
  auto future = told->get_future();
  OnLoop([&] {
    manager_->AcquireOrWait(session_, {{"planner", kDefaultLabel, 0, Digest{}}}, absl::Seconds(30),
                            [told](const auto& grants) { told->set_value(grants.status()); });
  });
  EXPECT_EQ(future.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  Reload("linux-x86_64");
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(future.get().ok());
}

TEST_F(ServingTest, ARequiredModelThatIsNotServedIsNotReady) {
  ServeBound();
  ModelPolicy policy;
  policy.required = true;
  OnLoop([&] { manager_->SetModelPolicies({{"planner", policy}}); });
  EXPECT_TRUE(OnLoop([&] { return manager_->Status().ready; }));
  Reload("linux-aarch64");
  const StatusSnapshot status = OnLoop([&] { return manager_->Status(); });
  EXPECT_FALSE(status.ready);
  ASSERT_EQ(status.not_ready.size(), 1u);
  EXPECT_THAT(status.not_ready[0], HasSubstr("not served: planner@3"));
}

}  // namespace
}  // namespace modelhost
