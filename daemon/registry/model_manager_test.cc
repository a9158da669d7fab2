// The verbs on real parts: a real store in a temporary directory, the real loader, a real control
// loop. What a test waits for is an event with a deadline, never a time.
#include "daemon/registry/model_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(ManagerTest, ALoadGoesThroughItsPhasesInOrder) {
  Boot();
  const auto done = Await(OnLoop([&] { return manager_->Load({"planner", 1}, 0); }));
  EXPECT_TRUE(done.status.ok()) << done.status;
  OnLoop([&] {
    std::vector<Phase> phases = observer_->phases[{"planner", 1}];
    phases.erase(std::unique(phases.begin(), phases.end()), phases.end());
    EXPECT_THAT(phases,
                ElementsAre(Phase::kStaged, Phase::kReserved, Phase::kLoading, Phase::kReady));
  });
}

TEST_F(ManagerTest, ASwapLoadsFlipsAndRecordsThePreviousVersion) {
  Boot();
  EXPECT_TRUE(Swap(1).status.ok());
  const auto second = Swap(2);
  ASSERT_TRUE(second.status.ok()) << second.status;
  ASSERT_EQ(second.result.changes.size(), 1U);
  EXPECT_EQ(second.result.changes[0].from, 1U);
  EXPECT_EQ(second.result.changes[0].to, 2U);
  EXPECT_EQ(second.result.changes[0].generation, 2U);
  EXPECT_EQ(PhaseOf(1), Phase::kReady);  // keep_previous
  const auto back = Await(OnLoop([&] { return manager_->Rollback("planner", "", 0, 0); }));
  EXPECT_TRUE(back.status.ok()) << back.status;
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
}

TEST_F(ManagerTest, TheVersionIsReadyBeforeThePageNamesIt) {
  Boot();
  Swap(1);
  OnLoop([&] {
    ASSERT_FALSE(page_->published.empty());
    EXPECT_EQ(page_->published.back()[0].to, 1U);
    EXPECT_EQ(observer_->phases[VersionKey({"planner", 1})].back(), Phase::kReady);
  });
}

TEST_F(ManagerTest, SwappingToWhatIsThereChangesNothing) {
  Boot();
  Swap(1);
  const auto again = Swap(1);
  EXPECT_TRUE(again.status.ok());
  EXPECT_TRUE(again.result.unchanged);
  EXPECT_EQ(OnLoop([&] { return manager_->Model("planner")->labels.at("stable").generation; }), 1U);
}

TEST_F(ManagerTest, AFailingTargetChangesNothing) {
  Boot();
  Swap(1);
  std::filesystem::permissions(File(2), std::filesystem::perms(0644));
  WriteFile(File(2), "this is no model at all");
  std::filesystem::permissions(File(2), std::filesystem::perms(0444));
  const auto failed = Swap(2);
  EXPECT_FALSE(failed.status.ok());
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  EXPECT_EQ(PhaseOf(2), Phase::kQuarantined);
  // The second request is told the same truth.
  EXPECT_FALSE(Swap(2).status.ok());
}

TEST_F(ManagerTest, LabelsThatCannotBeMadeDurableDoNotMove) {
  Boot();
  Swap(1);
  Await(OnLoop([&] { return manager_->Load({"planner", 2}, 0); }));
  os_->FailFrom("Sync", 1, ENOSPC);
  const auto failed = Swap(2);
  os_->Heal();
  EXPECT_FALSE(failed.status.ok());
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
  OnLoop([&] { EXPECT_EQ(page_->published.back()[0].to, 1U); });
  EXPECT_TRUE(Swap(2).status.ok());
  Reboot();
  Eventually([&] { return manager_->Version({"planner", 2})->phase == Phase::kReady; });
}

TEST_F(ManagerTest, ALabelIsAnnouncedAgainAfterARestartWithTheSameGeneration) {
  Boot();
  Swap(1);
  Swap(2);
  Reboot();
  Eventually([&] { return manager_->Version({"planner", 2})->phase == Phase::kReady; });
  OnLoop([&] {
    ASSERT_EQ(page_->published.size(), 1U);
    EXPECT_EQ(page_->published[0][0].to, 2U);
    EXPECT_EQ(page_->published[0][0].generation, 2U);
    EXPECT_EQ(manager_->Model("planner")->labels.at("stable").previous, 1U);
  });
}

TEST_F(ManagerTest, ACompareAndSwapThatDoesNotHoldIsRefused) {
  Boot();
  EXPECT_TRUE(Swap(1, 0).status.ok());
  SwapRequest request;
  request.targets = {{"planner", 2}};
  request.if_current = 7;
  const auto refused = OnLoop([&] { return manager_->Swap(request, 0); });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Swap(2, 1).status.ok());
}

TEST_F(ManagerTest, TwoLoadsOfOneVersionAreOneLoad) {
  Boot();
  const auto ids = OnLoop([&] {
    return std::make_pair(manager_->Load({"planner", 1}, 0), manager_->Load({"planner", 1}, 0));
  });
  EXPECT_EQ(*ids.first, *ids.second);
  EXPECT_TRUE(Await(ids.first).status.ok());
}

TEST_F(ManagerTest, ANewerSwapOfTheLabelEndsTheOlderOneAndSaysSo) {
  Boot();
  const auto ids = OnLoop([&] {
    SwapRequest to_one;
    to_one.targets = {{"planner", 1}};
    SwapRequest to_two;
    to_two.targets = {{"planner", 2}};
    auto older = manager_->Swap(to_one, 0);
    auto newer = manager_->Swap(to_two, 0);
    return std::make_pair(older, newer);
  });
  const auto older = Await(ids.first);
  EXPECT_EQ(older.status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(older.status.message()), HasSubstr(absl::StrCat("op-", *ids.second)));
  EXPECT_TRUE(Await(ids.second).status.ok());
}

TEST_F(ManagerTest, AnUnloadWaitsForTheLastLease) {
  Boot();
  Await(OnLoop([&] { return manager_->Load({"planner", 1}, 0); }));
  const SessionId session = NewSession();
  auto grants = Acquire(session, {"planner", "", 1, {}});
  ASSERT_TRUE(grants.ok()) << grants.status();
  const auto id = OnLoop([&] {
    return manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
  });
  EXPECT_EQ(PhaseOf(1), Phase::kDraining);
  EXPECT_EQ(Acquire(session, {"planner", "", 1, {}}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  grants->clear();  // A transport that has sent the descriptors keeps nothing.
  OnLoop([&] { manager_->EndSession(session, "closed"); });
  EXPECT_TRUE(Await(id).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
  EXPECT_EQ(host_->reserved(), 0U);
}

TEST_F(ManagerTest, AnUnloadWithADeadlineLetsGoWithoutTheLeases) {
  Boot();
  Await(OnLoop([&] { return manager_->Load({"planner", 1}, 0); }));
  const SessionId session = NewSession();
  const auto grants = Acquire(session, {"planner", "", 1, {}});
  ASSERT_TRUE(grants.ok());
  EXPECT_TRUE(Await(OnLoop([&] {
                return manager_->Unload({"planner", 1}, absl::Milliseconds(20), true, 0);
              })).status.ok());
  EXPECT_EQ(OnLoop([&] { return manager_->Leased(session, (*grants)[0].lease).status().code(); }),
            absl::StatusCode::kNotFound);
}

TEST_F(ManagerTest, AnUnloadDuringALoadStopsTheLoad) {
  Boot();
  const auto ids = OnLoop([&] {
    auto load = manager_->Load({"planner", 1}, 0);
    auto unload = manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
    return std::make_pair(load, unload);
  });
  EXPECT_EQ(Await(ids.first).status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(Await(ids.second).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
  EXPECT_EQ(host_->reserved(), 0U);
}

TEST_F(ManagerTest, ALoadAskedForAfterACancelledOneIsNotCancelled) {
  Boot();
  const auto second = OnLoop([&] {
    const auto first = manager_->Load({"planner", 1}, 0);
    EXPECT_TRUE(manager_->CancelOperation(*first).ok());
    return manager_->Load({"planner", 1}, 0);
  });
  EXPECT_TRUE(Await(second).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
}

TEST_F(ManagerTest, ALabelledVersionIsNotUnloaded) {
  Boot();
  Swap(1);
  const auto refused = OnLoop([&] {
    return manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
  });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("stable"));
}

TEST_F(ManagerTest, KeepPreviousOverFreesTheOldVersion) {
  ManagerOptions options;
  options.model_policies["planner"].keep_previous = absl::Milliseconds(10);
  Boot(options);
  Swap(1);
  Swap(2);
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kStaged; });
  EXPECT_EQ(PhaseOf(2), Phase::kReady);
}

TEST_F(ManagerTest, ASetIsGrantedWholeOrNotAtAll) {
  Put(1, {9}, "detector");
  Boot();
  Swap(1);
  const SessionId session = NewSession();
  const std::vector<AcquireRef> refs = {{"planner", "stable", 0, {}},
                                        {"detector", "stable", 0, {}}};
  EXPECT_FALSE(OnLoop([&] { return manager_->Acquire(session, refs); }).ok());
  EXPECT_EQ(OnLoop([&] { return manager_->Status().leases; }), 0U);
}

TEST_F(ManagerTest, AWaitingAcquireIsAnsweredWhenItsVersionIsReady) {
  Boot();
  const SessionId session = NewSession();
  std::promise<absl::StatusOr<std::vector<Grant>>> answer;
  OnLoop([&] {
    manager_->AcquireOrWait(session, {{"planner", "stable", 0, {}}}, absl::Seconds(20),
                            [&](auto grants) { answer.set_value(std::move(grants)); });
  });
  Swap(1);
  auto future = answer.get_future();
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  const auto grants = future.get();
  ASSERT_TRUE(grants.ok()) << grants.status();
  EXPECT_EQ((*grants)[0].key.version, 1U);
  EXPECT_EQ((*grants)[0].generation, 1U);
}

TEST_F(ManagerTest, AWaitingAcquireEndsAtItsDeadlineWithTheReason) {
  Boot();
  const SessionId session = NewSession();
  std::promise<absl::StatusOr<std::vector<Grant>>> answer;
  OnLoop([&] {
    manager_->AcquireOrWait(session, {{"planner", "stable", 0, {}}}, absl::Milliseconds(10),
                            [&](auto grants) { answer.set_value(std::move(grants)); });
  });
  auto future = answer.get_future();
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  const auto grants = future.get();
  EXPECT_EQ(grants.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(grants.status().message()), HasSubstr("no such label"));
}

TEST_F(ManagerTest, AWrongNameGetsTheNearestOne) {
  Boot();
  const auto refused = Acquire(NewSession(), {"planer", "stable", 0, {}});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("did you mean planner?"));
}

TEST_F(ManagerTest, WhatDoesNotFitIsRefusedWithTheNumbersAndTheHolders) {
  Put(3, std::vector<float>(400000, 1.0F));
  Boot({}, uint64_t{1} << 20);
  Swap(1);
  const auto refused = Swap(3);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("held by: planner@1"));
  EXPECT_EQ(PhaseOf(3), Phase::kStaged);
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
}

TEST_F(ManagerTest, AnUnusedVersionMakesRoom) {
  Put(3, std::vector<float>(150000, 1.0F));
  Put(4, std::vector<float>(150000, 2.0F));
  Boot({}, uint64_t{1} << 20);
  EXPECT_TRUE(Await(OnLoop([&] { return manager_->Load({"planner", 3}, 0); })).status.ok());
  EXPECT_TRUE(Await(OnLoop([&] { return manager_->Load({"planner", 4}, 0); })).status.ok());
  EXPECT_EQ(PhaseOf(3), Phase::kStaged);
  EXPECT_EQ(PhaseOf(4), Phase::kReady);
}

TEST_F(ManagerTest, AFileTruncatedInPlaceMakesTheVersionSuspect) {
  Boot();
  Swap(1);
  std::filesystem::permissions(File(1), std::filesystem::perms(0644));
  std::filesystem::resize_file(File(1), 10);
  Eventually([&] { return manager_->Version({"planner", 1})->health == Health::kSuspect; });
  const auto refused = Acquire(NewSession(), {"planner", "stable", 0, {}});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("SUSPECT"));
}

TEST_F(ManagerTest, AStoreThatCannotBeReadTakesNothingAway) {
  Boot();
  Swap(1);
  std::filesystem::rename(base_ / "store/models", base_ / "store/hidden");
  const auto scanned = OnLoop([&] {
    auto done = std::make_shared<std::promise<bool>>();
    manager_->Rescan([done](const auto& result) { done->set_value(result.ok()); });
    return done;
  });
  ASSERT_EQ(scanned->get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  EXPECT_TRUE(Acquire(NewSession(), {"planner", "stable", 0, {}}).ok());
  std::filesystem::rename(base_ / "store/hidden", base_ / "store/models");
}

TEST_F(ManagerTest, AVersionRenamedIntoPlaceIsFoundByARescan) {
  Boot();
  Put(9, {7, 7});
  auto done = std::make_shared<std::promise<uint64_t>>();
  OnLoop([&] {
    manager_->Rescan(
        [done](const auto& result) { done->set_value(result.ok() ? result->added : 0); });
  });
  EXPECT_EQ(done->get_future().get(), 1U);
  EXPECT_TRUE(Swap(9).status.ok());
}

TEST_F(ManagerTest, ARequiredModelGatesReadiness) {
  ManagerOptions options;
  options.model_policies["planner"].required = true;
  Boot(options);
  EXPECT_FALSE(OnLoop([&] { return manager_->Status().ready; }));
  Swap(1);
  EXPECT_TRUE(OnLoop([&] { return manager_->Status().ready; }));
}

TEST_F(ManagerTest, AnUploadTicketIsBoundToItsUser) {
  Boot();
  PublishRequest request{"planner", 5, {{"model.safetensors", 10}}, ""};
  Peer owner;
  owner.uid = 1000;
  const auto ticket = OnLoop([&] { return manager_->PublishFromDescriptors(request, owner); });
  ASSERT_TRUE(ticket.ok());
  Peer thief;
  thief.uid = 1001;
  std::vector<UniqueFd> fds;
  fds.push_back(*real_os_.OpenDir("/"));
  const auto stolen =
      OnLoop([&] { return manager_->OfferUpload(thief, ticket->ticket, 0, std::move(fds), true); });
  EXPECT_EQ(stolen.code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(ManagerTest, PublishFromDescriptorsEndsWithAUsableVersion) {
  Boot();
  const std::string bytes = SafetensorsBytes({{"w", {8, 8}}});
  WriteFile(base_ / "source/model.safetensors", bytes);
  PublishRequest request{"planner", 5, {{"model.safetensors", bytes.size()}}, "sealed"};
  Peer owner;
  owner.uid = ::geteuid();
  const auto ticket = OnLoop([&] { return manager_->PublishFromDescriptors(request, owner); });
  ASSERT_TRUE(ticket.ok());
  std::vector<UniqueFd> fds;
  fds.push_back(*real_os_.OpenFileAt(*real_os_.OpenDir(base_ / "source"), "model.safetensors"));
  EXPECT_TRUE(OnLoop([&] {
                return manager_->OfferUpload(owner, ticket->ticket, 0, std::move(fds), true);
              }).ok());
  const auto done = Await(ticket->operation);
  EXPECT_TRUE(done.status.ok()) << done.status;
  EXPECT_TRUE(Swap(5).status.ok());
  OnLoop([&] {
    EXPECT_EQ(manager_->Version({"planner", 5})->resident->regions[0]->kind(),
              abi::RegionKind::kSealed);
  });
}

TEST_F(ManagerTest, VerifyFindsAFlippedByteAndSaysWhere) {
  Boot();
  ASSERT_TRUE(PublishOne(5, SafetensorsBytes({{"w", {8, 8}}})).status.ok());
  const auto verify = [&] {
    return Await(OnLoop([&] { return manager_->Verify({"planner", 5}, 0); })).status;
  };
  EXPECT_TRUE(verify().ok());
  Flip(5);
  const absl::Status bad = verify();
  EXPECT_EQ(bad.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(bad.message()), HasSubstr("5/model.safetensors: chunk 0"));
  EXPECT_EQ(PhaseOf(5), Phase::kQuarantined);
}

TEST_F(ManagerTest, ALeaseOfAnotherSessionCannotBeReleased) {
  Boot();
  Swap(1);
  const SessionId mine = NewSession();
  const auto grants = Acquire(mine, {"planner", "stable", 0, {}});
  ASSERT_TRUE(grants.ok());
  const SessionId other = NewSession();
  EXPECT_EQ(OnLoop([&] { return manager_->Release(other, (*grants)[0].lease).code(); }),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(OnLoop([&] { return manager_->Status().leases; }), 1U);
}

TEST_F(ManagerTest, AVersionWithoutARequiredFileIsNeverReadyBySwapLoadOrStart) {
  ModelPolicy policy;
  policy.requires_files = std::vector<std::string>{"tokenizer.json"};
  Boot();
  ASSERT_TRUE(Swap(1).status.ok());
  OnLoop([&] { manager_->SetModelPolicies({{"planner", policy}}); });
  const auto swapped = Swap(2);
  EXPECT_TRUE(absl::IsFailedPrecondition(swapped.status)) << swapped.status;
  EXPECT_THAT(std::string(swapped.status.message()), HasSubstr("tokenizer.json"));
  EXPECT_EQ(PhaseOf(2), Phase::kFailed);
  EXPECT_THAT(std::string(Version(2).error.message()), HasSubstr("requires_files"));
  EXPECT_FALSE(Load(2).status.ok());
  // What serves goes on serving.
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
}

TEST_F(ManagerTest, AVersionThatWasReadyBeforeThePolicyGrewIsNotMadeTheServedOne) {
  ModelPolicy policy;
  policy.requires_files = std::vector<std::string>{"tokenizer.json"};
  Boot();
  ASSERT_TRUE(Swap(1).status.ok());
  ASSERT_TRUE(Load(2).status.ok());
  OnLoop([&] { manager_->SetModelPolicies({{"planner", policy}}); });
  EXPECT_TRUE(absl::IsFailedPrecondition(Swap(2).status));
  absl::StatusOr<LabelChange> label = absl::UnknownError("not told");
  OnLoop([&] {
    manager_->SetLabel("planner", "canary", 2, std::nullopt,
                       [&](absl::StatusOr<LabelChange> result) { label = std::move(result); });
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(label.status())) << label.status();
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
}

TEST_F(ManagerTest, WhatIsForAnotherMachineFailsAndIsNotQuarantined) {
  Boot();
  ASSERT_TRUE(Swap(1).status.ok());
  SetPlatform("linux-aarch64");
  const std::string bytes = SafetensorsBytes({{"w", {7, 8, 9}}});
  ASSERT_TRUE(PublishOne(3, bytes, {{"platform", "linux-x86_64"}}).status.ok());
  EXPECT_THAT(Version(3).requirements, ElementsAre(::testing::Pair("platform", "linux-x86_64")));
  const auto swapped = Swap(3);
  EXPECT_TRUE(absl::IsFailedPrecondition(swapped.status)) << swapped.status;
  EXPECT_EQ(PhaseOf(3), Phase::kFailed);
  EXPECT_EQ(OnLoop([&] { return manager_->Resolve("planner", "stable")->version; }), 1U);
  SetPlatform("linux-x86_64");
  EXPECT_TRUE(Swap(3).status.ok());
  EXPECT_EQ(PhaseOf(3), Phase::kReady);
}

}  // namespace
}  // namespace modelhost
