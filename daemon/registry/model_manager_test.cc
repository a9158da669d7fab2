// The verbs on real parts: a real store in a temporary directory, the real loader, a real control
// loop. What a test waits for is an event with a deadline, never a time.
#include "daemon/registry/model_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <future>
#include <thread>

#include "absl/synchronization/notification.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/thread_pool.h"
#include "proto/abi/catalogue_page.h"
#include "tests/fakes/fault_os.h"
#include "tests/fakes/model_files.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(20);

// Builds an index of nothing but a header's worth of bytes: the registry never looks inside.
class SmallIndex : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion&,
                                     const std::vector<ComponentIndex>&) override {
    auto region = WritableRegion::Create("index", 4096, HugePages::kOff);
    if (!region.ok()) return absl::ResourceExhaustedError(region.error().text);
    auto sealed = std::move(*region).Seal();
    if (!sealed.ok()) return absl::InternalError(sealed.error().text);
    return *std::move(sealed);
  }
};

class RecordingPage : public LabelPublisher {
 public:
  void Publish(std::span<const LabelChange> changes) override {
    published.emplace_back(changes.begin(), changes.end());
  }
  uint32_t SlotOf(const std::string&, const std::string&) override { return 3; }
  std::vector<std::vector<LabelChange>> published;  // Control thread.
};

class RecordingObserver : public Observer {
 public:
  void OnVersion(const VersionSnapshot& version) override {
    phases[version.key].push_back(version.phase);
  }
  void OnInvalidTransition(const VersionKey&, Phase, Phase) override { ++invalid; }
  std::map<VersionKey, std::vector<Phase>> phases;  // Control thread.
  int invalid = 0;
};

class ManagerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "manager_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    std::filesystem::create_directories(base_ / "state");
    Put(1, {1, 2, 3});
    Put(2, {4, 5, 6});
  }

  void TearDown() override {
    Shutdown();
    ASSERT_TRUE(
        LinuxOs().RemoveTreeAt(*LinuxOs().OpenDir(base_.parent_path()), base_.filename()).ok());
  }

  void Put(uint64_t version, const std::vector<float>& values,
           const std::string& model = "planner") {
    WriteVersion(base_ / "store", model, version,
                 {{"model.safetensors", SafetensorsBytes({{"w", values}})}});
  }

  std::filesystem::path File(uint64_t version) const {
    return base_ / "store/models/planner/versions" / std::to_string(version) / "model.safetensors";
  }

  void Boot(ManagerOptions options = {}, uint64_t host_budget = uint64_t{1} << 30) {
    os_ = std::make_unique<FaultOs>(real_os_);
    loop_ = *EventLoop::Create(clock_);
    store_ = *Store::Open(*os_, base_ / "store", base_ / "state", ::geteuid());
    state_dir_ = *os_->OpenDir(base_ / "state");
    LabelFile labels = *LoadLabels(*os_, state_dir_);
    labels.epoch += 1;
    ASSERT_TRUE(SaveLabels(*os_, state_dir_, labels).ok());
    verified_ = VerifiedFiles::Load(*os_, state_dir_);
    publisher_ = std::make_unique<Publisher>(*store_, verified_.get());
    host_ = std::make_unique<BudgetPool>("host", host_budget);
    memlock_ = std::make_unique<BudgetPool>("memlock", UINT64_MAX);
    chunks_ = std::make_unique<ThreadPool>("chunks", 2);
    LoaderOptions loader_options;
    loader_options.memlock = MemlockPolicy::kOff;
    loader_ = std::make_unique<Loader>(*os_, clock_, *store_, *verified_, *chunks_, regions_,
                                       *host_, *memlock_, index_, loader_options);
    pool_ = std::make_unique<ThreadPool>("work", 3);
    std::vector<std::string> unknown;
    access_ = AccessPolicy::Make({}, {}, ::geteuid(), &unknown);
    page_ = std::make_unique<RecordingPage>();
    observer_ = std::make_unique<RecordingObserver>();
    options.memlock = MemlockPolicy::kOff;
    options.health_interval = absl::Milliseconds(50);
    manager_ = std::make_unique<ModelManager>(
        ModelManager::Deps{*os_, clock_, *loop_, *pool_, *store_, *publisher_, *loader_, *verified_,
                           *host_, *memlock_, *page_, state_dir_, *access_},
        options, labels);
    manager_->AddObserver(observer_.get());
    absl::Notification running;  // Until the loop runs, this thread counts as it.
    loop_->Post([&] { running.Notify(); });
    thread_ = std::thread([this] { loop_->Run(); });
    running.WaitForNotification();
    manager_->Start();
    Eventually([this] {
      return manager_->Status().not_ready !=
             std::vector<std::string>{"the store has not been read yet"};
    });
  }

  void Shutdown() {
    if (!thread_.joinable()) return;
    loop_->Post([this] { manager_->Stop([this] { loop_->Quit(); }); });
    thread_.join();
    EXPECT_EQ(observer_->invalid, 0);
    manager_.reset();
    pool_.reset();
    loader_.reset();
    chunks_.reset();
  }

  void Reboot() {
    Shutdown();
    Boot();
  }

  template <typename Function>
  auto OnLoop(Function function) {
    return RunAndWait(*loop_, std::move(function));
  }

  // Waits until `condition` holds on the control thread.
  void Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!OnLoop(condition)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it never came to be";
      std::this_thread::yield();
    }
  }

  OperationSnapshot Await(absl::StatusOr<OperationId> id) {
    EXPECT_TRUE(id.ok()) << id.status();
    if (!id.ok()) return {};
    auto done = std::make_shared<std::promise<OperationSnapshot>>();
    auto told = std::make_shared<bool>(false);
    auto future = done->get_future();
    OnLoop([&] {
      return manager_
          ->SubscribeOperation(*id,
                               [done, told](const OperationSnapshot& operation) {
                                 if (!operation.finished_state() || *told) return;
                                 *told = true;
                                 done->set_value(operation);
                               })
          .status();
    }).IgnoreError();
    EXPECT_EQ(future.wait_for(kPatience), std::future_status::ready);
    return future.get();
  }

  OperationSnapshot Swap(uint64_t version, std::optional<uint64_t> if_current = std::nullopt) {
    SwapRequest request;
    request.targets = {{"planner", version}};
    request.if_current = if_current;
    return Await(OnLoop([&] { return manager_->Swap(request, 0); }));
  }

  Phase PhaseOf(uint64_t version) {
    return OnLoop([&] { return manager_->Version({"planner", version})->phase; });
  }

  SessionId NewSession() {
    Peer peer;
    peer.uid = ::geteuid();
    return OnLoop([&] { return manager_->BeginSession(peer, "native"); });
  }

  absl::StatusOr<std::vector<Grant>> Acquire(SessionId session, AcquireRef ref) {
    return OnLoop([&] { return manager_->Acquire(session, std::span(&ref, 1)); });
  }

  std::filesystem::path base_;
  LinuxOs real_os_;
  SystemClock clock_;
  std::unique_ptr<FaultOs> os_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Store> store_;
  UniqueFd state_dir_;
  std::unique_ptr<VerifiedFiles> verified_;
  std::unique_ptr<Publisher> publisher_;
  std::unique_ptr<BudgetPool> host_;
  std::unique_ptr<BudgetPool> memlock_;
  RegionCache regions_;
  SmallIndex index_;
  std::unique_ptr<ThreadPool> chunks_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<ThreadPool> pool_;
  std::optional<AccessPolicy> access_;
  std::unique_ptr<RecordingPage> page_;
  std::unique_ptr<RecordingObserver> observer_;
  std::unique_ptr<ModelManager> manager_;
  std::thread thread_;
};

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
  Await(OnLoop([&] { return manager_->Load({"planner", 1}, 0); }));
  Await(OnLoop([&] {
    return manager_->Unload({"planner", 1}, absl::InfiniteDuration(), false, 0);
  }));
  EXPECT_TRUE(Await(OnLoop([&] { return manager_->Verify({"planner", 1}, 0); })).status.ok());
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

}  // namespace
}  // namespace modelhost
