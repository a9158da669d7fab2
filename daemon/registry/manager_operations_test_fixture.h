// A manager whose operations are started, looked at and hung at will.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "daemon/registry/model_manager_test_fixture.h"

namespace modelhost {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

class JournalObserver : public Observer {
 public:
  void OnJournalError(const absl::Status& status) override { errors.push_back(status); }
  void OnLoadRetry(const VersionKey&, int attempt, absl::Duration delay,
                   const absl::Status&) override {
    attempts.push_back(attempt);
    delays.push_back(delay);
  }
  std::vector<absl::Status> errors;
  std::vector<int> attempts;
  std::vector<absl::Duration> delays;
};

class ManagerOperationsTest : public ManagerTest {
 protected:
  void TearDown() override {
    Unblock();
    ManagerTest::TearDown();
  }
  void Start(ManagerOptions options = {}) {
    Boot(std::move(options));
    OnLoop([&] { manager_->AddObserver(&told_); });
  }
  static ManagerOptions Quick(int most = 3) {
    ManagerOptions options;
    options.retry = {most, absl::Milliseconds(1), absl::Milliseconds(20), 0.2};
    return options;
  }
  static ManagerOptions Slow() {
    ManagerOptions options;
    options.retry = {5, absl::Hours(1), absl::Hours(1), 0};
    return options;
  }
  // From now on calls of `call` hang, until Unblock.
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
  OperationSnapshot Now(OperationId id) {
    return OnLoop([&] { return *manager_->GetOperation(id); });
  }
  absl::Status Cancel(OperationId id) {
    return OnLoop([&] { return manager_->CancelOperation(id); });
  }
  // CANCELLED in the same turn, whatever its worker does.
  void ExpectCancelledAtOnce(OperationId id) {
    const auto ended = OnLoop([&] {
      EXPECT_TRUE(manager_->CancelOperation(id).ok());
      return *manager_->GetOperation(id);
    });
    EXPECT_EQ(ended.state, OperationState::kCancelled) << ended.status;
    EXPECT_EQ(ended.successor, 0U);
    EXPECT_EQ(Cancel(id).code(), absl::StatusCode::kFailedPrecondition);
  }
  OperationId StartLoad(uint64_t version) {
    return *OnLoop([&] { return manager_->Load({"planner", version}, 7); });
  }
  OperationId StartVerify(uint64_t version) {
    return *OnLoop([&] { return manager_->Verify({"planner", version}, 0); });
  }
  OperationId StartUnload(uint64_t version) {
    return *OnLoop([&] {
      return manager_->Unload({"planner", version}, absl::InfiniteDuration(), false, 0);
    });
  }
  OperationId StartSwap(uint64_t version) {
    SwapRequest request;
    request.targets = {{"planner", version}};
    return *OnLoop([&] { return manager_->Swap(request, 0); });
  }
  // A publish whose descriptors have come.
  OperationId StartPublish(uint64_t version, const std::string& bytes) {
    const auto source = base_ / absl::StrCat("source-", ++sources_);
    WriteFile(source / "model.safetensors", bytes);
    Peer owner;
    owner.uid = ::geteuid();
    const PublishRequest request{"planner", version, {{"model.safetensors", bytes.size()}}, "", {}};
    const auto ticket = OnLoop([&] { return *manager_->PublishFromDescriptors(request, owner); });
    std::vector<UniqueFd> fds;
    fds.push_back(*real_os_.OpenFileAt(*real_os_.OpenDir(source), "model.safetensors"));
    EXPECT_TRUE(OnLoop([&] {
                  return manager_->OfferUpload(owner, ticket.ticket, 0, std::move(fds), true);
                }).ok());
    return ticket.operation;
  }
  void AwaitPhase(OperationId id, const std::string& phase) {
    Eventually([&, id, phase] { return manager_->GetOperation(id)->phase == phase; });
  }

  JournalObserver told_;
  absl::Notification release_;
  std::atomic<bool> hanging_{false};
  int sources_ = 0;
};

}  // namespace modelhost
