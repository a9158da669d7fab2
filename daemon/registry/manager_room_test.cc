// Room: who waits for it and who makes it, swaps whose old version leaves first, drains with
// deadlines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

class RoomObserver : public Observer {
 public:
  void OnEvicted(const VersionKey& victim, const VersionKey&) override {
    evicted.push_back(victim);
  }
  void OnDrainDeadline(const VersionKey& key, uint64_t leases, bool let_go) override {
    deadlines.push_back(absl::StrCat(key.ToString(), " ", leases, let_go ? " let go" : " waits"));
  }
  void OnRoomRefused(const std::string& pool, const std::string& reason) override {
    refused.push_back(absl::StrCat(pool, " ", reason));
  }
  std::vector<VersionKey> evicted;  // Control thread, as all of these.
  std::vector<std::string> deadlines;
  std::vector<std::string> refused;
};

class ManagerRoomTest : public ManagerTest {
 protected:
  // Publishes `bytes` bytes, within a header's size, of content that no other version has.
  uint64_t PublishSized(const std::string& model, uint64_t version, uint64_t bytes) {
    std::vector<float> values(bytes / 4, 0.0F);
    values[0] = static_cast<float>(++contents_);
    const std::string file = SafetensorsBytes({{"w", values}});
    WriteFile(base_ / "source/model.safetensors", file);
    const PublishRequest request{model, version, {{"model.safetensors", file.size()}}, "", {}};
    Peer owner;
    owner.uid = ::geteuid();
    const auto ticket = OnLoop([&] { return manager_->PublishFromDescriptors(request, owner); });
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    std::vector<UniqueFd> fds;
    fds.push_back(*real_os_.OpenFileAt(*real_os_.OpenDir(base_ / "source"), "model.safetensors"));
    EXPECT_TRUE(OnLoop([&] {
                  return manager_->OfferUpload(owner, ticket->ticket, 0, std::move(fds), true);
                }).ok());
    EXPECT_TRUE(Await(ticket->operation).status.ok());
    return file.size();
  }

  void BootWith(uint64_t budget, ManagerOptions options = {}) {
    Boot(std::move(options), budget);
    OnLoop([&] { manager_->AddObserver(&room_); });
  }

  static SwapRequest Request(uint64_t version, const std::string& strategy, bool allow = true,
                             const std::string& model = "m") {
    SwapRequest request;
    request.targets = {{model, version}};
    request.strategy = strategy;
    request.allow_downtime = allow;
    return request;
  }

  absl::StatusOr<OperationId> Begin(const SwapRequest& request) {
    return OnLoop([&] { return manager_->Swap(request, 0); });
  }

  OperationSnapshot Operation(OperationId id) {
    return OnLoop([&] { return *manager_->GetOperation(id); });
  }

  Phase PhaseOfModel(const std::string& model, uint64_t version) {
    return OnLoop([&] { return manager_->Version({model, version})->phase; });
  }

  // A lease; the grant's own reference to the bytes, which a client does not have, is let go.
  LeaseId Lease(SessionId session, const AcquireRef& ref) {
    const auto granted = Acquire(session, ref);
    EXPECT_TRUE(granted.ok()) << granted.status();
    return granted.ok() ? granted->front().lease : 0;
  }

  // m@1 is stable, m@2 is there, and both do not fit.
  void TwoThatDoNotFit(ManagerOptions options = {}) {
    BootWith(15000, std::move(options));
    PublishSized("m", 1, 10000);
    PublishSized("m", 2, 10000);
    EXPECT_TRUE(Await(Begin(Request(1, "availability"))).status.ok());
  }

  static ManagerOptions WithPolicy(absl::Duration drain_timeout, const std::string& deadline) {
    ManagerOptions options;
    options.model_policies["m"].drain_timeout = drain_timeout;
    options.model_policies["m"].on_drain_deadline = deadline;
    return options;
  }

  int contents_ = 0;
  RoomObserver room_;
};

TEST_F(ManagerRoomTest, WithoutDowntimeASwapThatDoesNotFitChangesNothing) {
  TwoThatDoNotFit();
  for (const std::string strategy : {"availability", "auto"}) {
    const auto refused = Begin(Request(2, strategy, false)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("m@1"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("--allow-downtime"));
  }
  EXPECT_EQ(Begin(Request(2, "resource", false)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PhaseOfModel("m", 1), Phase::kReady);
  EXPECT_EQ(PhaseOfModel("m", 2), Phase::kStaged);
  OnLoop([&] { EXPECT_THAT(room_.refused, ElementsAre("host swap", "host swap")); });
}

TEST_F(ManagerRoomTest, AResourceSwapLetsTheOldOneLeaveAndServesThoseWhoWaited) {
  TwoThatDoNotFit();
  const SessionId session = NewSession();
  const LeaseId lease = Lease(session, {"m", "stable", 0, {}});
  const auto swap = Begin(Request(2, "auto"));
  ASSERT_TRUE(swap.ok()) << swap.status();
  Eventually([&] { return manager_->GetOperation(*swap)->phase == "drain"; });
  // Out of the page, and still in the file: a crash comes back with it.
  OnLoop([&] {
    EXPECT_EQ(page_->published.back()[0].to, 0U);
    EXPECT_EQ(page_->published.back()[0].generation, 2U);
  });
  EXPECT_EQ(LoadLabels(*os_, state_dir_)->labels.at({"m", "stable"}).version, 1U);
  const auto now = Acquire(session, {"m", "stable", 0, {}});
  EXPECT_EQ(now.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(now.status().message()), HasSubstr(absl::StrCat("op-", *swap)));
  EXPECT_EQ(Acquire(session, {"m", "", 1, {}}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  auto waited = std::make_shared<std::promise<uint64_t>>();
  OnLoop([&] {
    manager_->AcquireOrWait(session, {{"m", "stable", 0, {}}}, absl::Seconds(20),
                            [waited](absl::StatusOr<std::vector<Grant>> grants) {
                              waited->set_value(grants.ok() ? grants->front().key.version : 0);
                            });
  });
  // Nobody else may move the label or have the old one back.
  EXPECT_EQ(Begin(Request(1, "availability")).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Load(1, "m").status.code(), absl::StatusCode::kFailedPrecondition);
  OnLoop([&] { return manager_->Release(session, lease); }).IgnoreError();
  const auto done = Await(swap);
  EXPECT_TRUE(done.status.ok()) << done.status;
  EXPECT_EQ(done.result.strategy, "resource");
  EXPECT_GT(done.result.gap, absl::ZeroDuration());
  auto version = waited->get_future();
  ASSERT_EQ(version.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(version.get(), 2U);
  EXPECT_EQ(PhaseOfModel("m", 1), Phase::kStaged);
  OnLoop([&] {
    EXPECT_EQ(page_->published.back()[0].to, 2U);
    EXPECT_EQ(page_->published.back()[0].generation, 3U);
    EXPECT_EQ(manager_->Model("m")->labels.at("stable").previous, 1U);
  });
}

TEST_F(ManagerRoomTest, AFailedLoadInTheGapBringsTheOldOneBackAndSaysSo) {
  TwoThatDoNotFit();
  const auto file = base_ / "store/models/m/versions/2/model.safetensors";
  std::filesystem::permissions(file, std::filesystem::perms(0644));
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekp(-1, std::ios::end);
    bytes.put('x');
  }
  std::filesystem::permissions(file, std::filesystem::perms(0444));
  const auto failed = Await(Begin(Request(2, "resource")));
  EXPECT_EQ(failed.status.code(), absl::StatusCode::kDataLoss) << failed.status;
  EXPECT_THAT(std::string(failed.status.message()), HasSubstr("m@1 serves again after a gap of"));
  EXPECT_EQ(PhaseOfModel("m", 1), Phase::kReady);
  OnLoop([&] {
    EXPECT_EQ(page_->published.back()[0].to, 1U);
    EXPECT_EQ(page_->published.back()[0].generation, 3U);
  });
  EXPECT_TRUE(Acquire(NewSession(), {"m", "stable", 0, {}}).ok());
}

TEST_F(ManagerRoomTest, ACancelledResourceSwapNeverLetTheOldBytesGo) {
  TwoThatDoNotFit();
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"m", "stable", 0, {}}).ok());
  const auto before = Version(1, "m").resident;
  const auto swap = Begin(Request(2, "resource"));
  Eventually([&] { return manager_->GetOperation(*swap)->phase == "drain"; });
  EXPECT_TRUE(OnLoop([&] { return manager_->CancelOperation(*swap); }).ok());
  EXPECT_EQ(Operation(*swap).state, OperationState::kCancelled);
  Eventually(
      [&] { return !page_->published.back().empty() && page_->published.back()[0].to == 1; });
  EXPECT_EQ(Version(1, "m").resident, before);
  EXPECT_EQ(PhaseOfModel("m", 1), Phase::kReady);
  EXPECT_TRUE(Acquire(session, {"m", "stable", 0, {}}).ok());
}

TEST_F(ManagerRoomTest, ALeaseThatDoesNotEndFailsAResourceSwapThatWaits) {
  TwoThatDoNotFit(WithPolicy(absl::Milliseconds(50), "wait"));
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"m", "stable", 0, {}}).ok());
  const auto failed = Await(Begin(Request(2, "resource")));
  EXPECT_EQ(failed.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(failed.status.message()), HasSubstr("1 lease"));
  EXPECT_THAT(std::string(failed.status.message()), HasSubstr("m@1 serves again"));
  EXPECT_EQ(PhaseOfModel("m", 1), Phase::kReady);
  OnLoop([&] { EXPECT_THAT(room_.deadlines, ElementsAre("m@1 1 waits")); });
}

TEST_F(ManagerRoomTest, WithReleaseTheSwapGoesOnAndTheLeaseStaysInTheBooks) {
  TwoThatDoNotFit(WithPolicy(absl::Milliseconds(50), "release"));
  const SessionId session = NewSession();
  const LeaseId lease = Lease(session, {"m", "stable", 0, {}});
  const auto done = Await(Begin(Request(2, "resource")));
  EXPECT_TRUE(done.status.ok()) << done.status;
  OnLoop([&] {
    EXPECT_THAT(room_.deadlines, ElementsAre("m@1 1 let go"));
    const auto leases = manager_->Leases();
    ASSERT_EQ(leases.size(), 1U);
    EXPECT_TRUE(leases[0].released);
    EXPECT_TRUE(leases[0].stale_for.has_value());
    EXPECT_FALSE(manager_->Leased(session, lease).ok());
    EXPECT_TRUE(manager_->Release(session, lease).ok());
  });
}

TEST_F(ManagerRoomTest, ASetOfStrategyResourceMovesTogether) {
  BootWith(25000);
  for (const std::string model : {"a", "b"}) {
    PublishSized(model, 1, 10000);
    PublishSized(model, 2, 10000);
    EXPECT_TRUE(Await(Begin(Request(1, "availability", false, model))).status.ok());
  }
  SwapRequest request = Request(2, "auto", true, "a");
  request.targets.push_back({"b", 2});
  const auto done = Await(Begin(request));
  ASSERT_TRUE(done.status.ok()) << done.status;
  EXPECT_EQ(done.result.strategy, "resource");
  EXPECT_EQ(done.result.changes.size(), 2U);
  OnLoop([&] { EXPECT_EQ(page_->published.back().size(), 2U); });
}

TEST_F(ManagerRoomTest, ABigLoadIsNotStarvedBySmallOnes) {
  BootWith(10000);
  PublishSized("old", 1, 6000);
  PublishSized("big", 1, 8000);
  PublishSized("small", 1, 1000);
  ASSERT_TRUE(Load(1, "old").status.ok());
  const SessionId session = NewSession();
  const LeaseId lease = Lease(session, {"old", "", 1, {}});
  const auto unload = OnLoop([&] {
    return manager_->Unload({"old", 1}, absl::InfiniteDuration(), false, 0);
  });
  const auto big = OnLoop([&] { return manager_->Load({"big", 1}, 0); });
  const auto small = OnLoop([&] { return manager_->Load({"small", 1}, 0); });
  // There is room for the small one, and it would keep the big one out for longer. By then the
  // manager has looked for room a few times.
  absl::Notification looked;
  OnLoop([&] { loop_->PostDelayed(absl::Milliseconds(200), [&] { looked.Notify(); }); });
  looked.WaitForNotification();
  EXPECT_EQ(PhaseOfModel("small", 1), Phase::kStaged);
  EXPECT_EQ(PhaseOfModel("big", 1), Phase::kStaged);
  OnLoop([&] { return manager_->Release(session, lease); }).IgnoreError();
  EXPECT_TRUE(Await(unload).status.ok());
  EXPECT_TRUE(Await(big).status.ok());
  EXPECT_TRUE(Await(small).status.ok());
}

TEST_F(ManagerRoomTest, AWaitForRoomEndsWithTheNumbersAndTheHolders) {
  ManagerOptions options;
  options.admission_timeout = absl::Milliseconds(100);
  BootWith(10000, options);
  PublishSized("old", 1, 6000);
  const uint64_t need = PublishSized("big", 1, 8000);
  ASSERT_TRUE(Load(1, "old").status.ok());
  ASSERT_TRUE(Acquire(NewSession(), {"old", "", 1, {}}).ok());
  ASSERT_TRUE(OnLoop([&] { return manager_->Unload({"old", 1}, std::nullopt, false, 0); }).ok());
  const auto late = Load(1, "big");
  EXPECT_EQ(late.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(late.status.message()), HasSubstr("admission_timeout"));
  const auto refusal = BudgetRefusalOf(late.status);
  ASSERT_TRUE(refusal.has_value()) << late.status;
  EXPECT_EQ(refusal->need_bytes, need);
  EXPECT_EQ(refusal->limit_bytes, 10000U);
  EXPECT_EQ(PhaseOfModel("big", 1), Phase::kStaged);
  OnLoop([&] { EXPECT_THAT(room_.refused, ElementsAre("host timeout")); });
}

// What the dry run says is what the swap then does.
TEST_F(ManagerRoomTest, ThePlanIsWhatHappens) {
  std::mt19937 random(5);
  const auto below = [&](uint64_t most) { return random() % most; };
  int fitted = 0;
  int evicted = 0;
  int down = 0;
  for (int round = 0; round < 40; ++round) {
    // By hand, as each round has another budget: everything in one process.
    for (const std::string name : {"store", "state"}) {
      ASSERT_TRUE(real_os_.RemoveTreeAt(*real_os_.OpenDir(base_), name).ok());
      std::filesystem::create_directories(base_ / name);
    }
    BootWith(11000 + below(16000));
    room_ = {};
    const SessionId session = NewSession();
    for (const std::string model : {"a", "b"}) {
      for (uint64_t version = 1; version <= 3; ++version) {
        PublishSized(model, version, 1000 + below(9000));
        if (version == 3 || below(3) == 0) continue;
        if (!Load(version, model).status.ok()) continue;
        switch (below(4)) {
          case 0:
          case 1:
            Await(Begin(Request(version, "availability", false, model)));
            break;
          case 2:
            Acquire(session, {model, "", version, {}}).IgnoreError();
            break;
          default:
            break;
        }
      }
    }
    SwapRequest request = Request(3, below(2) == 0 ? "auto" : "availability", below(2) == 0, "a");
    if (below(2) == 0) request.targets.push_back({"b", 3});
    // Sessions that would keep the old ones from leaving are another test's.
    if (request.allow_downtime) OnLoop([&] { manager_->EndSession(session, "closed"); });
    OnLoop([&] { room_.evicted.clear(); });
    const auto plan = OnLoop([&] { return manager_->PlanSwap(request); });
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto swap = Begin(request);
    EXPECT_EQ(swap.ok(), plan->fits) << "round " << round << " " << swap.status();
    if (!swap.ok()) {
      EXPECT_EQ(swap.status(), plan->refused);
    } else {
      const auto done = Await(swap);
      EXPECT_TRUE(done.status.ok()) << "round " << round << " " << done.status;
      EXPECT_EQ(done.result.strategy, plan->strategy);
      OnLoop([&] {
        EXPECT_THAT(room_.evicted, UnorderedElementsAreArray(plan->evict)) << "round " << round;
      });
      EXPECT_LE(host_->reserved(), plan->pools[0].peak_bytes);
      ++fitted;
      evicted += static_cast<int>(plan->evict.size());
      if (plan->strategy == "resource") ++down;
    }
    Shutdown();
  }
  EXPECT_GT(fitted, 10);
  EXPECT_GT(evicted, 3);
  EXPECT_GT(down, 0);
}

}  // namespace
}  // namespace modelhost
