// The verbs over a restart of the daemon: what was resident, and who comes back for it.
#include <gmock/gmock.h>

#include "daemon/registry/model_manager_test_fixture.h"
#include "tests/fakes/memory_fd_store.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

class ManagerRestoreTest : public ManagerTest {
 protected:
  ManagerRestoreTest() {
    // Nothing keeps an unlabelled version but what the restart says.
    ModelPolicy policy;
    policy.residency = Residency::kSealed;
    policy.keep_previous = absl::ZeroDuration();
    options_.model_policies["planner"] = policy;
  }

  void UseFdStore(uint64_t epoch) override {
    if (!with_store_) return;
    Parking::Options options;
    options.epoch = epoch;
    options.builder = "test";
    options.most = 100;
    parking_ = std::make_unique<Parking>(real_os_, fd_store_, state_dir_, options);
    restored_ = std::make_unique<RestoredMemory>();
    loader_->UseFdStore(*parking_, *restored_);
    restored_->Take(real_os_, fd_store_, state_dir_, fd_store_.GiveAll());
  }

  // With `held` leased by a client when the daemon ends.
  void Restart() {
    if (parking_ != nullptr) parking_->Leave();
    Shutdown();
    Boot(options_);
  }

  // As a client that comes back does. The status once it is known.
  absl::StatusOr<std::vector<Grant>> Declare(uint64_t version, absl::Duration patience) {
    auto told = std::make_shared<std::promise<absl::StatusOr<std::vector<Grant>>>>();
    auto future = told->get_future();
    OnLoop([&] {
      Peer peer;
      peer.uid = ::geteuid();
      const SessionId session = manager_->BeginSession(peer, "native");
      manager_->AcquireOrWait(
          session, {{"planner", "stable", version, Digest{}}}, patience,
          [told](absl::StatusOr<std::vector<Grant>> grants) { told->set_value(std::move(grants)); },
          ModelManager::WaitFor::kKnownVersions);
    });
    if (future.wait_for(kPatience) != std::future_status::ready) {
      return absl::InternalError("no answer");
    }
    return future.get();
  }

  RestartSnapshot RestartOf() {
    return OnLoop([&] { return manager_->Status().restart; });
  }

  ManagerOptions options_;
  bool with_store_ = true;
  MemoryFdStore fd_store_;
};

TEST_F(ManagerRestoreTest, WhatWasResidentIsResidentAgainLabelledOrNot) {
  Boot(options_);
  ASSERT_TRUE(Swap(1).status.ok());
  // Held, so that it does not leave with its label.
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "stable", 0, Digest{}}).ok());
  ASSERT_TRUE(Swap(2).status.ok());
  Restart();
  Eventually([&] { return manager_->Version({"planner", 2})->phase == Phase::kReady; });
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kReady; });
  for (const uint64_t version : {1, 2}) {
    EXPECT_EQ(Version(version).resident->report.source, "restore") << version;
  }
  const RestartSnapshot restart = RestartOf();
  EXPECT_TRUE(restart.fd_store);
  EXPECT_EQ(restart.received, 4U);
  EXPECT_EQ(restart.restored_versions, 2U);
  EXPECT_EQ(restart.reread_versions + restart.failed_versions, 0U);
  EXPECT_EQ(restart.parked, 4U);
  EXPECT_EQ(restart.restored_bytes,
            Version(1).resident->host_bytes() + Version(2).resident->host_bytes());
}

TEST_F(ManagerRestoreTest, WithoutClientsAnUnlabelledVersionLeavesAfterTheGrace) {
  Boot(options_);
  ASSERT_TRUE(Swap(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "stable", 0, Digest{}}).ok());
  ASSERT_TRUE(Swap(2).status.ok());
  options_.restart_grace = absl::Milliseconds(300);
  Restart();
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return version->phase == Phase::kStaged && manager_->Status().restart.parked == 2;
  });
  EXPECT_EQ(PhaseOf(2), Phase::kReady);
}

TEST_F(ManagerRestoreTest, ADeclaredVersionIsKeptAndItsLeaseHasTheLabel) {
  Boot(options_);
  ASSERT_TRUE(Swap(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, {"planner", "stable", 0, Digest{}}).ok());
  ASSERT_TRUE(Swap(2).status.ok());
  Restart();
  const auto grants = Declare(1, absl::Seconds(20));
  ASSERT_TRUE(grants.ok()) << grants.status();
  EXPECT_EQ((*grants)[0].key.version, 1U);
  EXPECT_EQ((*grants)[0].generation, 0U);
  const auto leases = OnLoop([&] { return manager_->Leases(); });
  ASSERT_EQ(leases.size(), 1U);
  EXPECT_EQ(leases[0].label, "stable");
}

// Without a store the bytes are on disk, and the client has not gone.
TEST_F(ManagerRestoreTest, WithoutAStoreADeclaredVersionIsLoadedThoughNoLabelNamesIt) {
  with_store_ = false;
  Boot(options_);
  ASSERT_TRUE(Swap(2).status.ok());
  Restart();
  const auto grants = Declare(1, absl::Seconds(20));
  ASSERT_TRUE(grants.ok()) << grants.status();
  EXPECT_FALSE(RestartOf().fd_store);
}

TEST_F(ManagerRestoreTest, AfterTheGraceADeclarationLoadsNothing) {
  with_store_ = false;
  options_.restart_grace = absl::ZeroDuration();
  Boot(options_);
  ASSERT_TRUE(Swap(2).status.ok());  // The grace is over by now.
  const auto grants = Declare(1, absl::Milliseconds(50));
  EXPECT_EQ(grants.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
}

TEST_F(ManagerRestoreTest, WhoMayNotReadCommandsNoLoad) {
  with_store_ = false;
  Boot(options_);
  auto told = std::make_shared<std::promise<absl::Status>>();
  auto future = told->get_future();
  OnLoop([&] {
    Peer peer;
    peer.uid = ::geteuid() + 1;
    peer.gid = ::getegid() + 1;
    const SessionId session = manager_->BeginSession(peer, "native");
    manager_->AcquireOrWait(
        session, {{"planner", "", 1, Digest{}}}, absl::Seconds(20),
        [told](const auto& grants) { told->set_value(grants.status()); },
        ModelManager::WaitFor::kKnownVersions);
  });
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  EXPECT_EQ(future.get().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
}

TEST_F(ManagerRestoreTest, WhatIsNotAsRecordedIsToldAndLoaded) {
  Boot(options_);
  ASSERT_TRUE(Swap(1).status.ok());
  parking_->Leave();
  Shutdown();
  std::filesystem::resize_file(base_ / "state/parked.json", 40);
  Boot(options_);
  Eventually([&] { return manager_->Version({"planner", 1})->phase == Phase::kReady; });
  EXPECT_NE(Version(1).resident->report.source, "restore");
  EXPECT_THAT(RestartOf().problem, HasSubstr("parked.json"));
  EXPECT_EQ(RestartOf().foreign, 2U);
}

TEST_F(ManagerRestoreTest, AVersionThatIsGoneFromTheStoreCountsAsFailed) {
  Boot(options_);
  ASSERT_TRUE(Swap(1).status.ok());
  parking_->Leave();
  Shutdown();
  ASSERT_TRUE(
      real_os_.RemoveTreeAt(*real_os_.OpenDir(base_ / "store/models/planner/versions"), "1").ok());
  options_.restart_grace = absl::Milliseconds(100);
  Boot(options_);
  Eventually([&] { return manager_->Status().restart.failed_versions == 1; });
}

}  // namespace
}  // namespace modelhost
