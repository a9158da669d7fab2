#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "daemon/service/health_reporter.h"
#include "daemon/service/model_watcher.h"
#include "daemon/service/operation_queue.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kNoWait = absl::ZeroDuration();

VersionSnapshot Version(uint64_t number, Phase phase, std::vector<std::string> labels = {}) {
  VersionSnapshot version;
  version.key = {"planner", number};
  version.phase = phase;
  version.labels = std::move(labels);
  return version;
}

// --- OperationQueue

OperationSnapshot Step(const std::string& phase, uint64_t done,
                       OperationState state = OperationState::kRunning) {
  OperationSnapshot step;
  step.phase = phase;
  step.bytes_done = done;
  step.state = state;
  return step;
}

TEST(OperationQueueTest, ProgressWithinAPhaseReplacesWhatWaits) {
  OperationQueue queue;
  queue.Push(Step("verify", 1));
  queue.Push(Step("verify", 2));
  queue.Push(Step("pin", 3));
  EXPECT_EQ(queue.Pop(kNoWait)->bytes_done, 2U);
  EXPECT_EQ(queue.Pop(kNoWait)->phase, "pin");
  EXPECT_FALSE(queue.Pop(kNoWait).has_value());
}

TEST(OperationQueueTest, TheEndIsNeverLost) {
  OperationQueue queue;
  for (int i = 0; i < 1000; ++i) queue.Push(Step(absl::StrCat("phase", i), 0));
  queue.Push(Step("phase999", 0, OperationState::kSucceeded));
  size_t waiting = 0;
  OperationState last = OperationState::kRunning;
  while (const auto step = queue.Pop(kNoWait)) {
    ++waiting;
    last = step->state;
  }
  EXPECT_LE(waiting, OperationQueue::kMostWaiting);
  EXPECT_EQ(last, OperationState::kSucceeded);
}

// --- ModelWatcher

TEST(ModelWatcherTest, ASlowReaderFindsEachChangedModelOnce) {
  ModelWatcher watcher;
  const auto subscription = watcher.Subscribe();
  for (int i = 0; i < 1000; ++i) watcher.OnVersion(Version(8, Phase::kReady));
  const LabelChange change{"detector", "stable", 1, 2, 3};
  watcher.OnLabelsMoved({&change, 1}, kNoWait);
  EXPECT_THAT(subscription->Take(kNoWait), ElementsAre("detector", "planner"));
  EXPECT_THAT(subscription->Take(kNoWait), IsEmpty());
}

TEST(ModelWatcherTest, StreamsDoNotTakeFromEachOther) {
  ModelWatcher watcher;
  const auto one = watcher.Subscribe();
  const auto two = watcher.Subscribe();
  watcher.OnVersionGone({"planner", 8});
  EXPECT_THAT(one->Take(kNoWait), ElementsAre("planner"));
  EXPECT_THAT(two->Take(kNoWait), ElementsAre("planner"));
}

TEST(ModelWatcherTest, WhatHappensAfterAStreamEndedIsNobodysBusiness) {
  ModelWatcher watcher;
  watcher.Subscribe().reset();
  watcher.OnVersionGone({"planner", 8});
  const auto later = watcher.Subscribe();
  EXPECT_THAT(later->Take(kNoWait), IsEmpty());
}

// --- HealthReporter

class FakeHealthService : public grpc::HealthCheckServiceInterface {
 public:
  void SetServingStatus(const std::string& name, bool serving) override { status[name] = serving; }
  void SetServingStatus(bool serving) override {
    for (auto& [name, value] : status) value = serving;
  }
  void Shutdown() override { SetServingStatus(false); }
  std::map<std::string, bool> status;
};

class HealthReporterTest : public ::testing::Test {
 protected:
  FakeHealthService service_;
  HealthReporter reporter_;
};

TEST_F(HealthReporterTest, WhatWasSeenBeforeAttachCounts) {
  reporter_.OnReady(true);
  reporter_.OnVersion(Version(8, Phase::kReady, {"stable"}));
  reporter_.Attach(&service_);
  EXPECT_TRUE(service_.status.at(""));
  EXPECT_TRUE(service_.status.at("modelhost.liveness"));
  EXPECT_TRUE(service_.status.at("model/planner"));
}

TEST_F(HealthReporterTest, TheDaemonIsAliveBeforeItIsReady) {
  reporter_.Attach(&service_);
  EXPECT_FALSE(service_.status.at(""));
  EXPECT_TRUE(service_.status.at("modelhost.liveness"));
  reporter_.OnReady(true);
  EXPECT_TRUE(service_.status.at(""));
}

TEST_F(HealthReporterTest, LoadingANewVersionDoesNotTakeTheModelDown) {
  reporter_.Attach(&service_);
  reporter_.OnVersion(Version(8, Phase::kReady, {"stable"}));
  reporter_.OnVersion(Version(9, Phase::kLoading));
  EXPECT_TRUE(service_.status.at("model/planner"));
  reporter_.OnVersion(Version(9, Phase::kFailed));
  EXPECT_TRUE(service_.status.at("model/planner"));
}

TEST_F(HealthReporterTest, ASwapKeepsTheModelServedThroughout) {
  reporter_.Attach(&service_);
  reporter_.OnVersion(Version(8, Phase::kReady, {"stable"}));
  reporter_.OnVersion(Version(9, Phase::kReady));
  const LabelChange change{"planner", "stable", 8, 9, 2};
  reporter_.OnLabelsMoved({&change, 1}, kNoWait);
  EXPECT_TRUE(service_.status.at("model/planner"));
  reporter_.OnVersion(Version(8, Phase::kDraining));
  reporter_.OnVersion(Version(8, Phase::kStaged));
  EXPECT_TRUE(service_.status.at("model/planner"));
}

TEST_F(HealthReporterTest, NotServedWithoutALabelledGoodVersion) {
  reporter_.Attach(&service_);
  reporter_.OnVersion(Version(8, Phase::kReady));
  EXPECT_FALSE(service_.status.at("model/planner"));
  reporter_.OnVersion(Version(8, Phase::kReady, {"canary"}));
  EXPECT_TRUE(service_.status.at("model/planner"));  // No stable: any label.
  reporter_.OnVersion(Version(9, Phase::kLoading, {"stable"}));
  EXPECT_FALSE(service_.status.at("model/planner"));
  reporter_.OnVersion(Version(9, Phase::kReady, {"stable"}));
  EXPECT_TRUE(service_.status.at("model/planner"));
  VersionSnapshot suspect = Version(9, Phase::kReady, {"stable"});
  suspect.health = Health::kSuspect;
  reporter_.OnVersion(suspect);
  EXPECT_FALSE(service_.status.at("model/planner"));
}

TEST_F(HealthReporterTest, RemovedLabelsAndVersionsNoLongerCount) {
  reporter_.Attach(&service_);
  reporter_.OnVersion(Version(8, Phase::kReady, {"stable"}));
  const LabelChange removed{"planner", "stable", 8, 0, 3};
  reporter_.OnLabelsMoved({&removed, 1}, kNoWait);
  EXPECT_FALSE(service_.status.at("model/planner"));
  reporter_.OnVersion(Version(8, Phase::kReady, {"stable"}));
  reporter_.OnVersionGone({"planner", 8});
  EXPECT_FALSE(service_.status.at("model/planner"));
}

TEST_F(HealthReporterTest, AfterDetachNothingServesAndNothingIsTouched) {
  reporter_.Attach(&service_);
  reporter_.OnReady(true);
  reporter_.Detach();
  EXPECT_FALSE(service_.status.at("modelhost.liveness"));
  reporter_.OnReady(true);
  EXPECT_FALSE(service_.status.at(""));
}

}  // namespace
}  // namespace modelhost
