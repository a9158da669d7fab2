// What the verbs do when something is wrong: files that change, scans that fail, loads that hang,
// memory that is full, and a stop in the middle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint32_t kStranger = 4001;
constexpr uint32_t kReaders = 4242;

class ManagerFaultsTest : public HangingManagerTest {
 protected:
  void SetMode(const std::filesystem::path& path, unsigned mode) {
    std::filesystem::permissions(path, std::filesystem::perms(mode));
  }

  absl::Status AcquireCode(SessionId session, const std::string& model = "planner") {
    return Acquire(session, {model, "stable", 0, {}}).status();
  }
};

// --- Scans

TEST_F(ManagerFaultsTest, AScanErrorDegradesWhatIsServedAndTheNextGoodScanClearsIt) {
  Boot();
  Swap(1);
  SetMode(File(1), 0464);
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1).health, Health::kDegraded);
  EXPECT_EQ(Version(1).health_reason, HealthReason::kSourceInvalid);
  EXPECT_TRUE(AcquireCode(NewSession()).ok());
  SetMode(File(1), 0444);
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1).health, Health::kOk);
}

TEST_F(ManagerFaultsTest, ASealedVersionDoesNotCareWhatAScanSaysOfItsFiles) {
  ManagerOptions options;
  options.model_policies["planner"].residency = Residency::kSealed;
  Boot(options);
  Swap(1);
  SetMode(File(1), 0464);
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1).health, Health::kOk);
  EXPECT_TRUE(AcquireCode(NewSession()).ok());
}

TEST_F(ManagerFaultsTest, ASuspectVersionStaysSuspectWhenItsDirectoryIsGone) {
  Boot();
  Swap(1);
  Flip(1);
  Eventually([&] { return manager_->Version({"planner", 1})->health == Health::kSuspect; });
  std::filesystem::rename(base_ / "store/models/planner/versions/1", base_ / "elsewhere");
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1).health, Health::kSuspect);
  std::filesystem::rename(base_ / "elsewhere", base_ / "store/models/planner/versions/1");
  ASSERT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1).health, Health::kSuspect);
}

// --- Who may read

TEST_F(ManagerFaultsTest, ReadGroupsOfAModelDecideAndAreKeptWhenTheirFileBreaks) {
  const std::filesystem::path policy = base_ / "store/models/planner/model.toml";
  WriteFile(policy, "read_groups = [\"4242\"]\n");
  Put(1, {9}, "open");
  Boot();
  Swap(1);
  const SessionId reader = NewSession(kStranger, kReaders);
  const SessionId other = NewSession(kStranger, kReaders + 1);
  const auto check = [&] {
    EXPECT_TRUE(AcquireCode(reader).ok());
    EXPECT_EQ(AcquireCode(other).code(), absl::StatusCode::kPermissionDenied);
    EXPECT_TRUE(AcquireCode(NewSession()).ok());
  };
  check();
  for (const char* broken : {"read_groups = [", "read_groups = 7\n"}) {
    WriteFile(policy, broken);
    ASSERT_TRUE(Rescan().ok());
    check();
  }
  SetMode(policy, 0666);  // Others could have written it.
  ASSERT_TRUE(Rescan().ok());
  check();

  Peer peer;
  peer.uid = kStranger;
  peer.gid = kReaders;
  EXPECT_TRUE(OnLoop([&] { return manager_->MayReadSome(peer); }));
  // Through the door by one model's groups, and to that model only.
  EXPECT_FALSE(OnLoop([&] { return manager_->MayReadModel(peer, "open"); }));
  peer.gid = kReaders + 1;
  EXPECT_FALSE(OnLoop([&] { return manager_->MayReadSome(peer); }));
}

TEST_F(ManagerFaultsTest, AModelWhoseRulesWereNeverReadIsTheDaemonsOwn) {
  WriteFile(base_ / "store/models/planner/model.toml", "read_groups = [");
  Boot();
  Swap(1);
  EXPECT_EQ(AcquireCode(NewSession(kStranger, kReaders)).code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(AcquireCode(NewSession()).ok());
}

// --- Bad bytes

TEST_F(ManagerFaultsTest, ASuspectVersionIsNoTargetUntilItIsRepaired) {
  Boot();
  const std::string bytes = SafetensorsBytes({{"w", {8, 8}}});
  ASSERT_TRUE(PublishOne(5, bytes).status.ok());
  ASSERT_TRUE(Swap(5).status.ok());
  ASSERT_TRUE(Swap(1).status.ok());
  Flip(5);
  Eventually([&] { return manager_->Version({"planner", 5})->health == Health::kSuspect; });

  SwapRequest request;
  request.targets = {{"planner", 5}};
  const auto swap = OnLoop([&] { return manager_->Swap(request, 0).status(); });
  EXPECT_EQ(swap.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(swap.message()), HasSubstr("SUSPECT"));
  EXPECT_EQ(OnLoop([&] { return manager_->Rollback("planner", "", 5, 0).status().code(); }),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(OnLoop([&] { return manager_->PlanSwap(request).status().code(); }),
            absl::StatusCode::kFailedPrecondition);
  auto labelled = std::make_shared<std::promise<absl::Status>>();
  OnLoop([&] {
    manager_->SetLabel("planner", "canary", 5, std::nullopt,
                       [labelled](const auto& change) { labelled->set_value(change.status()); });
  });
  EXPECT_EQ(labelled->get_future().get().code(), absl::StatusCode::kFailedPrecondition);

  const auto repaired = PublishOne(5, bytes);
  EXPECT_TRUE(repaired.status.ok()) << repaired.status;
  EXPECT_EQ(Version(5).health, Health::kOk);
  EXPECT_EQ(Version(5).phase, Phase::kReady);
  EXPECT_TRUE(Swap(5).status.ok());
  EXPECT_TRUE(AcquireCode(NewSession()).ok());
}

TEST_F(ManagerFaultsTest, ALoadOfASuspectVersionTakesItsFilesAsTheyAreNow) {
  Boot();
  Swap(1);
  const auto before = Version(1).resident;
  Flip(1);
  Flip(1);  // The same bytes, but somebody wrote to the file.
  Eventually([&] { return manager_->Version({"planner", 1})->health == Health::kSuspect; });
  EXPECT_FALSE(AcquireCode(NewSession()).ok());
  const auto loaded = Load(1);
  EXPECT_TRUE(loaded.status.ok()) << loaded.status;
  EXPECT_FALSE(loaded.result.unchanged);
  EXPECT_EQ(Version(1).health, Health::kOk);
  EXPECT_NE(Version(1).resident, before);
  EXPECT_TRUE(AcquireCode(NewSession()).ok());
  // Other bytes under the same number are not what the label was set on.
  Flip(1);
  Eventually([&] { return manager_->Version({"planner", 1})->health == Health::kSuspect; });
  EXPECT_EQ(Load(1).status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Version(1).health, Health::kSuspect);
  EXPECT_EQ(Version(1).phase, Phase::kReady);
}

TEST_F(ManagerFaultsTest, ALabelIsNotAnnouncedForOtherBytesThanItWasSetOn) {
  Boot();
  Swap(1);
  Shutdown();
  std::filesystem::permissions(File(1), std::filesystem::perms(0644));
  Put(1, {7, 7, 7});
  Boot();
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kFailed; });
  EXPECT_THAT(std::string(Version(1).error.message()), HasSubstr("label stable was set when"));
  OnLoop([&] { EXPECT_TRUE(page_->published.empty()); });
  EXPECT_EQ(AcquireCode(NewSession()).code(), absl::StatusCode::kFailedPrecondition);
  Eventually([&] { return host_->reserved() == 0; });  // It is freed on the pool.
}

TEST_F(ManagerFaultsTest, WhatVerifyFindsBadIsKnownAfterARestart) {
  Boot();
  ASSERT_TRUE(PublishOne(5, SafetensorsBytes({{"w", {8, 8}}})).status.ok());
  const Digest good = store_->OpenVersion("planner", 5, nullptr)->manifest->files[0].sha256;
  Flip(5);
  // As when the disk gives back other bytes than were written: nothing about the file has changed.
  const FileInfo info = store_->OpenVersion("planner", 5, nullptr)->infos[0];
  verified_->Record(info, good);
  ASSERT_TRUE(verified_->Save(state_dir_).ok());
  EXPECT_FALSE(Await(OnLoop([&] { return manager_->Verify({"planner", 5}, 0); })).status.ok());
  EXPECT_EQ(VerifiedFiles::Load(*os_, state_dir_)->Find(info), std::nullopt);
}

// --- Swaps and loads that meet

TEST_F(ManagerFaultsTest, ASwapBetweenLoadedVersionsDoesNotWaitForLoads) {
  load_threads_ = 1;
  Put(1, {9}, "slow");
  Put(2, {8}, "slow");
  Boot();
  Swap(1);
  Swap(2);
  Block("Populate");
  const auto first = OnLoop([&] { return manager_->Load({"slow", 1}, 0); });
  const auto second = OnLoop([&] { return manager_->Load({"slow", 2}, 0); });
  AwaitHanging();
  const auto back = Await(OnLoop([&] { return manager_->Rollback("planner", "", 0, 0); }));
  EXPECT_TRUE(back.status.ok()) << back.status;
  EXPECT_TRUE(Rescan().ok());
  EXPECT_EQ(Version(1, "slow").phase, Phase::kLoading);
  EXPECT_EQ(Version(2, "slow").phase, Phase::kReserved);
  Unblock();
  EXPECT_TRUE(Await(first).status.ok());
  EXPECT_TRUE(Await(second).status.ok());
}

TEST_F(ManagerFaultsTest, AStopEndsLoadsAndTellsWhoWaits) {
  load_threads_ = 1;
  Boot();
  Block("Populate");
  const SessionId session = NewSession();
  auto answer = std::make_shared<std::promise<absl::Status>>();
  const auto ids = OnLoop([&] {
    manager_->AcquireOrWait(session, {{"planner", "stable", 0, {}}}, absl::Hours(1),
                            [answer](const auto& grants) { answer->set_value(grants.status()); });
    auto running = manager_->Load({"planner", 1}, 0);
    auto queued = manager_->Load({"planner", 2}, 0);
    return std::make_pair(running, queued);
  });
  AwaitHanging();
  OnLoop([&] { manager_->CancelWork(); });
  EXPECT_EQ(answer->get_future().get().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(OnLoop([&] {
              return manager_->Load({"planner", 1}, 0).status().code();
            }),
            absl::StatusCode::kUnavailable);
  Unblock();
  EXPECT_EQ(Await(ids.first).status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Await(ids.second).status.code(), absl::StatusCode::kCancelled);
  Shutdown();
  EXPECT_THAT(observer_->phases[VersionKey({"planner", 1})], Not(Contains(Phase::kReady)));
  EXPECT_THAT(observer_->phases[VersionKey({"planner", 2})], Not(Contains(Phase::kReady)));
}

TEST_F(ManagerFaultsTest, ATargetOfASetIsKeptWhileTheOthersLoad) {
  Put(1, {9}, "detector");
  ManagerOptions options;
  options.model_policies["planner"].keep_previous = absl::Milliseconds(300);
  Boot(options);
  ASSERT_TRUE(Load(1).status.ok());
  Block("Populate");
  SwapRequest request;
  request.targets = {{"planner", 1}, {"detector", 1}};
  const auto swap = OnLoop([&] { return manager_->Swap(request, 0); });
  AwaitHanging();
  EXPECT_EQ(
      OnLoop([&] {
        return manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0).status().code();
      }),
      absl::StatusCode::kFailedPrecondition);
  auto later = std::make_shared<bool>(false);
  OnLoop([&] { loop_->PostDelayed(absl::Milliseconds(500), [later] { *later = true; }); });
  Eventually([&] { return *later; });
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  Unblock();
  EXPECT_TRUE(Await(swap).status.ok());
  EXPECT_THAT(observer_->phases[VersionKey({"planner", 1})], Not(Contains(Phase::kDraining)));
}

TEST_F(ManagerFaultsTest, ASetThatFailsAtItsFirstTargetLoadsNoOther) {
  Put(1, {9}, "detector");
  Boot();
  SetMode(File(2), 0644);
  WriteFile(File(2), "this is no model at all");
  SetMode(File(2), 0444);
  ASSERT_FALSE(Load(2).status.ok());
  SwapRequest request;
  request.targets = {{"planner", 2}, {"detector", 1}};
  EXPECT_FALSE(Await(OnLoop([&] { return manager_->Swap(request, 0); })).status.ok());
  OnLoop([&] {
    EXPECT_THAT(observer_->phases[VersionKey({"detector", 1})], Not(Contains(Phase::kReserved)));
  });
}

TEST_F(ManagerFaultsTest, ALoadThatCanNeverFitEvictsNobody) {
  Put(3, std::vector<float>(400000, 1.0F));
  Boot({}, uint64_t{1} << 20);
  ASSERT_TRUE(Load(1).status.ok());
  EXPECT_EQ(Load(3).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  OnLoop([&] {
    EXPECT_THAT(observer_->phases[VersionKey({"planner", 1})], Not(Contains(Phase::kDraining)));
  });
}

TEST_F(ManagerFaultsTest, AShortageThatIsNotTheBudgetsEvictsNobody) {
  ManagerOptions options;
  options.retry.most = 0;
  Boot(options);
  ASSERT_TRUE(Load(1).status.ok());
  os_->FailFrom("ListDir", 1, EMFILE);
  EXPECT_FALSE(Load(2).status.ok());
  os_->Heal();
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
}

TEST_F(ManagerFaultsTest, ASecondUnloadJoinsTheFirst) {
  load_threads_ = 1;
  Boot();
  Block("Populate");
  OnLoop([&] { return manager_->Load({"planner", 1}, 0).status(); }).IgnoreError();
  AwaitHanging();
  const auto while_loading = OnLoop([&] {
    auto first = manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
    auto second = manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
    return std::make_pair(first, second);
  });
  EXPECT_EQ(*while_loading.first, *while_loading.second);
  EXPECT_FALSE(
      OnLoop([&] { return manager_->GetOperation(*while_loading.first)->finished_state(); }));
  Unblock();
  EXPECT_TRUE(Await(while_loading.first).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);

  os_->Heal();
  ASSERT_TRUE(Load(1).status.ok());
  const auto while_freeing = OnLoop([&] {
    auto first = manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
    EXPECT_EQ(manager_->Version({"planner", 1})->phase, Phase::kUnloading);
    auto second = manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
    return std::make_pair(first, second);
  });
  EXPECT_EQ(*while_freeing.first, *while_freeing.second);
  EXPECT_TRUE(Await(while_freeing.first).status.ok());
}

// --- Requests

TEST_F(ManagerFaultsTest, ADryRunRefusesWhatTheSwapWould) {
  Boot();
  Swap(1);
  const auto plan = [&](const SwapRequest& request) {
    return OnLoop([&] { return manager_->PlanSwap(request).status().code(); });
  };
  SwapRequest request;
  request.targets = {{"planner", 2}};
  EXPECT_EQ(plan(request), absl::StatusCode::kOk);
  request.strategy = "resource";
  EXPECT_EQ(OnLoop([&] { return manager_->PlanSwap(request)->refused.code(); }),
            absl::StatusCode::kFailedPrecondition);  // Without allow_downtime.
  request.strategy = "fastest";
  EXPECT_EQ(plan(request), absl::StatusCode::kInvalidArgument);
  request.strategy = "auto";
  request.if_current = 2;
  EXPECT_EQ(plan(request), absl::StatusCode::kFailedPrecondition);
  request.if_current.reset();
  request.label = "No label";
  EXPECT_EQ(plan(request), absl::StatusCode::kInvalidArgument);
}

TEST_F(ManagerFaultsTest, ADryRunCountsNoByteThatIsResidentAlready) {
  Boot();
  const std::string bytes = SafetensorsBytes({{"w", {8, 8}}});
  ASSERT_TRUE(PublishOne(5, bytes).status.ok());
  ASSERT_TRUE(PublishOne(6, bytes).status.ok());
  SwapRequest request;
  request.targets = {{"planner", 6}};
  const auto need = [&] { return OnLoop([&] { return manager_->PlanSwap(request)->need_bytes; }); };
  EXPECT_EQ(need(), bytes.size());
  ASSERT_TRUE(Load(5).status.ok());
  EXPECT_EQ(need(), 0U);
}

TEST_F(ManagerFaultsTest, AnUploadWithOtherCountsThanAnnouncedIsRefused) {
  Boot();
  Peer owner;
  owner.uid = ::geteuid();
  const PublishRequest request{"planner", 5, {{"a.safetensors", 10}, {"b.safetensors", 10}}, ""};
  const auto fds = [&](int count) {
    std::vector<UniqueFd> some;
    for (int i = 0; i < count; ++i) some.push_back(*real_os_.OpenDir("/"));
    return some;
  };
  const auto ticket = OnLoop([&] { return manager_->PublishFromDescriptors(request, owner); });
  ASSERT_TRUE(ticket.ok());
  const auto offer = [&](uint32_t first, int count, bool last) {
    return OnLoop([&] {
      return manager_->OfferUpload(owner, ticket->ticket, first, fds(count), last).code();
    });
  };
  EXPECT_EQ(offer(1, 1, false), absl::StatusCode::kInvalidArgument);  // Not the next one.
  EXPECT_EQ(offer(0, 0, false), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(offer(0, 3, true), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(offer(0, 1, true), absl::StatusCode::kInvalidArgument);  // One is missing: it is over.
  EXPECT_EQ(Await(ticket->operation).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(offer(0, 2, true), absl::StatusCode::kPermissionDenied);
}

TEST_F(ManagerFaultsTest, AConnectionCannotWaitForEverything) {
  Boot();
  const SessionId session = NewSession();
  int waiting = 0;
  absl::Status refused;
  OnLoop([&] {
    while (refused.ok()) {
      ++waiting;
      manager_->AcquireOrWait(session, {{"none", "stable", 0, {}}}, absl::Hours(1),
                              [&](const auto& grants) { refused = grants.status(); });
    }
  });
  EXPECT_EQ(waiting, 65);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  OnLoop([&] { manager_->EndSession(session, "closed"); });
  // Nothing of it is left that would count against others.
  const SessionId next = NewSession();
  OnLoop([&] {
    refused = absl::OkStatus();
    manager_->AcquireOrWait(next, {{"none", "stable", 0, {}}}, absl::Hours(1),
                            [&](const auto& grants) { refused = grants.status(); });
    EXPECT_TRUE(refused.ok());
    manager_->EndSession(next, "closed");
  });
}

TEST_F(ManagerFaultsTest, LoadsKnowHowManyClientsTheyCouldDisturb) {
  Boot();
  const auto clients = [&] { return OnLoop([&] { return loader_->clients(); }); };
  EXPECT_EQ(clients(), 0U);
  const SessionId first = NewSession();
  const SessionId second = NewSession();
  EXPECT_EQ(clients(), 2U);
  OnLoop([&] { manager_->EndSession(first, "closed"); });
  EXPECT_EQ(clients(), 1U);
  OnLoop([&] { manager_->EndSession(second, "closed"); });
  EXPECT_EQ(clients(), 0U);
}

}  // namespace
}  // namespace modelhost
