// What must not stand between a client and its grant, and how much of it one user may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "absl/strings/str_cat.h"
#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RefusalObserver : public Observer {
 public:
  void OnRefused(const Peer& peer, const std::string& what, RefusedFor why) override {
    seen.push_back(absl::StrCat(RefusedForName(why), " ", peer.uid, " ", what));
  }
  std::vector<std::string> seen;  // Control thread.
};

class ManagerIsolationTest : public ManagerTest {
 protected:
  void TearDown() override {
    Resume();
    ManagerTest::TearDown();
  }

  // Calls of this name hang until Resume.
  void Hang(const std::string& call) {
    os_->Before(call, [this] {
      std::call_once(once_, [this] { hanging_.Notify(); });
      resumed_.WaitForNotification();
    });
  }
  void Resume() {
    if (!resumed_.HasBeenNotified()) resumed_.Notify();
  }

  // Each goes to the control thread and back, and none waits for anything else.
  void ExpectGrants() {
    const SessionId session = NewSession();
    for (int i = 0; i < 100; ++i) {
      const auto grants = Acquire(session, {"planner", "stable", 0, {}});
      ASSERT_TRUE(grants.ok()) << grants.status();
      ASSERT_TRUE(OnLoop([&] { return manager_->Release(session, grants->front().lease); }).ok());
    }
  }

  std::once_flag once_;
  absl::Notification hanging_;
  absl::Notification resumed_;
  RefusalObserver refusals_;
};

TEST_F(ManagerIsolationTest, GrantsGoOnWhileTheLabelsAreSyncedToADiskThatHangs) {
  Boot();
  Swap(1);
  ASSERT_TRUE(Load(2).status.ok());
  Hang("Sync");
  SwapRequest request;
  request.targets = {{"planner", 2}};
  const auto swap = OnLoop([&] { return manager_->Swap(request, 0); });
  hanging_.WaitForNotification();
  ExpectGrants();
  Resume();
  EXPECT_TRUE(Await(swap).status.ok());
}

TEST_F(ManagerIsolationTest, GrantsGoOnWhileAScanHangs) {
  Boot();
  Swap(1);
  Hang("ListDir");
  OnLoop([&] { manager_->Rescan([](const auto&) {}); });
  hanging_.WaitForNotification();
  ExpectGrants();
}

TEST_F(ManagerIsolationTest, GrantsGoOnWhileMemoryIsBeingFreed) {
  Boot();
  Swap(1);
  ASSERT_TRUE(Load(2).status.ok());
  // Freeing is work like this, and here nobody gets to it.
  for (int i = 0; i < 2; ++i) {
    short_work_->Post([this] { resumed_.WaitForNotification(); });
  }
  const auto unload = OnLoop([&] { return manager_->Unload({"planner", 2}, {}, false, 0); });
  EXPECT_EQ(PhaseOf(2), Phase::kUnloading);
  ExpectGrants();
  EXPECT_EQ(PhaseOf(2), Phase::kUnloading);
  Resume();
  EXPECT_TRUE(Await(unload).status.ok());
}

TEST_F(ManagerIsolationTest, GrantsGoOnWhileALoadHangs) {
  Boot();
  Swap(1);
  Hang("Populate");
  const auto load = OnLoop([&] { return manager_->Load({"planner", 2}, 0); });
  hanging_.WaitForNotification();
  ExpectGrants();
  Resume();
  EXPECT_TRUE(Await(load).status.ok());
}

TEST_F(ManagerIsolationTest, AUserMayHoldSoManyLeasesAndNoMore) {
  ManagerOptions options;
  options.max_leases_per_uid = 3;
  Boot(options);
  Swap(1);
  OnLoop([&] { manager_->AddObserver(&refusals_); });
  // The daemon's own uid and root have no more than others.
  for (const uint32_t uid : {::geteuid(), uint32_t{0}}) {
    const SessionId first = NewSession(uid);
    const SessionId second = NewSession(uid);
    const AcquireRef ref{"planner", "stable", 0, {}};
    const auto kept = Acquire(first, ref);
    ASSERT_TRUE(kept.ok());
    ASSERT_TRUE(Acquire(second, ref).ok());
    // A set is refused as a whole.
    const std::vector<AcquireRef> two = {ref, ref};
    EXPECT_EQ(OnLoop([&] { return manager_->Acquire(first, two).status().code(); }),
              absl::StatusCode::kResourceExhausted);
    ASSERT_TRUE(Acquire(second, ref).ok());
    const auto refused = Acquire(first, ref).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("max_leases_per_uid"));
    EXPECT_EQ(OnLoop([&] { return manager_->Leases().size(); }), 3U);
    // Another user has a share of its own: it is refused for its rights, not for their leases.
    EXPECT_EQ(Acquire(NewSession(4711), ref).status().code(), absl::StatusCode::kPermissionDenied);
    ASSERT_TRUE(OnLoop([&] { return manager_->Release(first, kept->front().lease); }).ok());
    EXPECT_TRUE(Acquire(first, ref).ok());
    OnLoop([&] {
      manager_->EndSession(first, "closed");
      manager_->EndSession(second, "closed");
      EXPECT_THAT(refusals_.seen, ElementsAre(absl::StrCat("leases ", uid, " acquire planner"),
                                              absl::StrCat("leases ", uid, " acquire planner"),
                                              "no_right 4711 acquire planner"));
      refusals_.seen.clear();
    });
  }
}

TEST_F(ManagerIsolationTest, ALeaseIsStaleFromTheMomentItsLabelMoves) {
  Boot();
  Swap(1);
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "stable", 0, {}}).ok());
  const auto age = [&] { return OnLoop([&] { return manager_->Leases().front().stale_for; }); };
  EXPECT_EQ(age(), std::nullopt);
  const absl::Duration before = clock_.Monotonic();
  ASSERT_TRUE(Swap(2).status.ok());
  const auto stale = age();
  ASSERT_TRUE(stale.has_value());
  EXPECT_LE(*stale, clock_.Monotonic() - before);
  // Its label comes back to it.
  ASSERT_TRUE(Swap(1).status.ok());
  EXPECT_EQ(age(), std::nullopt);
}

TEST_F(ManagerIsolationTest, ADrainByThePolicyHasADeadlineToo) {
  ManagerOptions options;
  options.model_policies["planner"].keep_previous = absl::ZeroDuration();
  options.model_policies["planner"].drain_timeout = absl::Milliseconds(20);
  options.model_policies["planner"].on_drain_deadline = "release";
  Boot(options);
  Swap(1);
  const SessionId session = NewSession();
  const auto lease = Acquire(session, {"planner", "stable", 0, {}});
  ASSERT_TRUE(lease.ok());
  const std::span<const std::byte> mapped = lease->front().resident->regions[0]->data();
  const std::vector<std::byte> bytes(mapped.begin(), mapped.end());
  ASSERT_TRUE(Swap(2).status.ok());
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kStaged; });
  OnLoop([&] {
    ASSERT_EQ(manager_->Leases().size(), 1U);
    EXPECT_TRUE(manager_->Leases()[0].released);
  });
  EXPECT_TRUE(std::ranges::equal(mapped, bytes));  // Held by this test, as by a client's mapping.
  // The released lease holds nothing: a new load of the version drains without it.
  ASSERT_TRUE(Load(1).status.ok());
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kStaged; });
  OnLoop([&] { manager_->EndSession(session, "closed"); });
}

}  // namespace
}  // namespace modelhost
