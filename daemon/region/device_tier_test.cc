// What there is on this machine, which GPUs a policy means, and whether the copies are still there.
#include "daemon/region/device_tier.h"

#include <gmock/gmock.h>

#include <thread>

#include "absl/synchronization/notification.h"
#include "daemon/region/device_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kTierGiB = uint64_t{1} << 30;

class DeviceTierTest : public DeviceTest {
 protected:
  DeviceTier::Targets Chosen(const DevicePolicy& policy) {
    auto targets = tier_->Choose(policy, cancel_);
    EXPECT_TRUE(targets.ok()) << targets.status();
    return targets.ok() ? *targets : DeviceTier::Targets{};
  }
};

TEST_F(DeviceTierTest, AMachineWithoutADriverIsHostOnlyWithTheReason) {
  gpus_.FailFrom("List", 1, absl::UnavailableError("no libcuda.so.1"));
  StartTier();
  const DeviceTierSnapshot snapshot = tier_->Snapshot();
  EXPECT_TRUE(snapshot.known);
  EXPECT_EQ(snapshot.reason, "no libcuda.so.1");
  EXPECT_THAT(tier_->Pools(), IsEmpty());
  const DeviceTier::Targets targets = Chosen({true, "", {}});
  EXPECT_THAT(targets.gpus, IsEmpty());
  EXPECT_THAT(targets.warnings,
              ElementsAre("device = \"all\": no libcuda.so.1; it stays on the host"));
  EXPECT_THAT(Chosen({}).warnings, IsEmpty());
}

TEST_F(DeviceTierTest, SwitchedOffAsksNobody) {
  gpus_.Add(kGpu, "vmm_fd", kTierGiB);
  StartTier({.enabled = false});
  EXPECT_THAT(tier_->Snapshot().reason, HasSubstr("switched off"));
  EXPECT_EQ(gpus_.calls("List"), 0);
}

TEST_F(DeviceTierTest, NothingIsKnownBeforeItWasLookedFor) {
  gpus_.Add(kGpu, "vmm_fd", kTierGiB);
  DeviceTier tier(gpus_, clock_, host_, {});
  EXPECT_FALSE(tier.Snapshot().known);
  EXPECT_THAT(tier.Pools(), IsEmpty());
  EXPECT_THAT(tier.GpusOf({true, "", {}}), IsEmpty());
}

TEST_F(DeviceTierTest, PoolsAreOfGpusWhoseMemoryCopiesTake) {
  gpus_.Add("GPU-1", "vmm_fd", 10 * kTierGiB);
  gpus_.Add("GPU-2", "host_direct", 10 * kTierGiB);
  gpus_.Add("GPU-3", "cuda_ipc", 20 * kTierGiB);
  gpus_.Add("GPU-4", "host_only", kTierGiB);
  gpus_.Add("GPU-5", "host_registered", kTierGiB);
  StartTier();
  const std::vector<BudgetPool*> pools = tier_->Pools();
  ASSERT_EQ(pools.size(), 2U);
  EXPECT_EQ(pools[0]->name(), "GPU-1");
  EXPECT_EQ(pools[0]->limit(), 9 * kTierGiB);
  EXPECT_EQ(pools[1]->name(), "GPU-3");
  EXPECT_THAT(tier_->GpusOf({true, "", {}}), ElementsAre("GPU-1", "GPU-3"));
  EXPECT_THAT(tier_->GpusOf({true, "GPU-3", {}}), ElementsAre("GPU-3"));
  EXPECT_THAT(tier_->GpusOf({true, "GPU-2", {}}), IsEmpty());
  EXPECT_THAT(tier_->GpusOf({}), IsEmpty());
  EXPECT_EQ(tier_->Snapshot().gpus[3].mode, abi::DeviceMode::kNone);
}

TEST_F(DeviceTierTest, TheBudgetOfTheConfigurationIsEachGpus) {
  gpus_.Add("GPU-1", "vmm_fd", 10 * kTierGiB);
  StartTier({.budget_bytes = 3 * kTierGiB});
  EXPECT_EQ(tier_->Pools().at(0)->limit(), 3 * kTierGiB);
  EXPECT_EQ(tier_->Snapshot().gpus[0].limit_bytes, 3 * kTierGiB);
}

TEST_F(DeviceTierTest, AGpuThatDoesNotAnswerIsThereAndNotUsed) {
  gpus_.Add(kGpu, "vmm_fd", kTierGiB);
  gpus_.FailFrom("Report", 1, absl::DeadlineExceededError("the agent hangs"));
  StartTier();
  const DeviceTierSnapshot snapshot = tier_->Snapshot();
  ASSERT_EQ(snapshot.gpus.size(), 1U);
  EXPECT_FALSE(snapshot.gpus[0].usable);
  EXPECT_EQ(snapshot.gpus[0].problem, "the agent hangs");
  EXPECT_EQ(snapshot.gpus[0].report.info.uuid, kGpu);
  EXPECT_THAT(snapshot.reason, HasSubstr("the agent hangs"));
  EXPECT_THAT(Chosen({true, kGpu, {}}).warnings,
              ElementsAre(HasSubstr("GPU-1 does not answer: the agent hangs")));
  // It comes back.
  gpus_.Heal();
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_TRUE(tier_->Snapshot().gpus[0].usable);
  EXPECT_EQ(Chosen({true, kGpu, {}}).gpus.size(), 1U);
  EXPECT_EQ(tier_->Pools().size(), 1U);
}

TEST_F(DeviceTierTest, APolicyChoosesGpusThatCanAndSaysWhyNot) {
  gpus_.Add("GPU-1", "vmm_fd", kTierGiB, 4 * kMiB);
  gpus_.Add("GPU-2", "host_direct", kTierGiB);
  gpus_.Add("GPU-3", "host_only", kTierGiB);
  StartTier({.segment_bytes = 64 * kMiB});
  const DeviceTier::Targets all = Chosen({true, "", {}});
  EXPECT_THAT(all.gpus, ElementsAre("GPU-1", "GPU-2"));
  EXPECT_TRUE(all.segments);
  EXPECT_EQ(all.limits.granularity, 4 * kMiB);
  EXPECT_EQ(all.limits.max_segment_bytes, 64 * kMiB);
  EXPECT_THAT(all.warnings, ElementsAre(HasSubstr("GPU-3 is host_only: the test says so")));
  const DeviceTier::Targets direct = Chosen({true, "GPU-2", {}});
  EXPECT_THAT(direct.gpus, ElementsAre("GPU-2"));
  EXPECT_FALSE(direct.segments);
  EXPECT_EQ(direct.limits.granularity, 2 * kMiB);
  EXPECT_THAT(Chosen({true, "GPU-3", {}}).warnings, ElementsAre(HasSubstr("host_only")));
  EXPECT_THAT(Chosen({true, "GPU-9", {}}).warnings,
              ElementsAre(HasSubstr("no such GPU, it has GPU-1, GPU-2, GPU-3")));
}

TEST_F(DeviceTierTest, ALoadWaitsForWhatIsNotKnownYetAndCanBeCancelled) {
  gpus_.Add(kGpu, "vmm_fd", kTierGiB);
  absl::Notification go_on;
  gpus_.Before("List", [&] { go_on.WaitForNotification(); });
  tier_ = std::make_unique<DeviceTier>(gpus_, clock_, host_, DeviceTierOptions{});
  std::thread looking([this] { tier_->Discover(); });
  CancelToken cancelled;
  cancelled.Cancel();
  EXPECT_TRUE(absl::IsCancelled(tier_->Choose({true, "", {}}, cancelled).status()));
  std::vector<std::string> chosen;
  std::thread loading([&] { chosen = Chosen({true, "", {}}).gpus; });
  go_on.Notify();
  loading.join();
  looking.join();
  EXPECT_THAT(chosen, ElementsAre(kGpu));
}

TEST_F(DeviceTierTest, AfterTheDeadlineALoadGoesWithoutAndSaysSo) {
  tier_ = std::make_unique<DeviceTier>(gpus_, clock_, host_,
                                       DeviceTierOptions{.discovery = absl::Milliseconds(1)});
  EXPECT_THAT(Chosen({true, "", {}}).warnings, ElementsAre(HasSubstr("were not found within")));
}

class CheckTest : public DeviceTierTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    gpus_.Add(kGpu, "vmm_fd", kTierGiB);
    gpus_.Add(kOther, "vmm_fd", kTierGiB);
    StartTier();
    regions_ = {Sealed('a', 1'500'000)};
    plan_ = PlanOf(1);
    on_ = {kGpu, kOther};
    images_ = MustMake();
    ASSERT_EQ(images_.size(), 2U);
  }
  void TearDown() override {
    images_.clear();
    DeviceTest::TearDown();
  }
  std::vector<DeviceImage> images_;
};

TEST_F(CheckTest, CopiesThatAreThereStay) {
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_FALSE(images_[0].lost());
  EXPECT_EQ(gpus_.calls("Check"), 2);
  EXPECT_EQ(tier_->Snapshot().gpus[0].copies, 1U);
  EXPECT_EQ(tier_->Snapshot().gpus[0].copied_bytes, images_[0].bytes());
}

TEST_F(CheckTest, WhatAResetTookIsLostOnceAndMadeAgain) {
  gpus_.Reset(kGpu);
  EXPECT_TRUE(tier_->CheckCopies());
  EXPECT_TRUE(images_[0].lost());
  EXPECT_FALSE(images_[1].lost());
  EXPECT_EQ(tier_->Snapshot().gpus[0].lost, 1U);
  EXPECT_EQ(tier_->Snapshot().gpus[0].copies, 0U);
  EXPECT_TRUE(tier_->Snapshot().gpus[0].usable);
  EXPECT_FALSE(tier_->CheckCopies());
  const auto again = MustMake();
  ASSERT_EQ(again.size(), 2U);
  EXPECT_FALSE(again[0].lost());
  EXPECT_NE(again[0].regions[0], images_[0].regions[0]);
  EXPECT_EQ(again[1].regions[0], images_[1].regions[0]);
}

TEST_F(CheckTest, OneFailureOfAnAgentLosesNothing) {
  gpus_.FailCall("Check", 1, absl::UnavailableError("the context: 700"));
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_FALSE(images_[0].lost());
  EXPECT_FALSE(images_[1].lost());
}

// The kernel that kills agents for memory says nothing of the GPU's.
TEST_F(CheckTest, AgentsThatDieOrHangLoseNothingAndAfterAWhileTheGpuIsNotUsedUntilOneAnswers) {
  const uint64_t booked = tier_->Pools().at(0)->reserved();
  for (const absl::Status& silence : {absl::AbortedError("the agent has ended (signal 9)"),
                                      absl::DeadlineExceededError("no sign of progress")}) {
    gpus_.FailFrom("Check", 1, silence);
    for (int check = 1; check < 3 * DeviceGpu::kSilentChecks; ++check) {
      EXPECT_FALSE(tier_->CheckCopies());
      EXPECT_EQ(tier_->Snapshot().gpus[0].usable, check < DeviceGpu::kSilentChecks) << check;
    }
    EXPECT_EQ(tier_->Snapshot().gpus[0].problem, silence.message());
    EXPECT_FALSE(images_[0].lost());
    EXPECT_EQ(tier_->Pools().at(0)->reserved(), booked);
    gpus_.Heal();
    EXPECT_FALSE(tier_->CheckCopies());
    EXPECT_TRUE(tier_->Snapshot().gpus[0].usable);
  }
  EXPECT_EQ(tier_->Snapshot().gpus[0].lost, 0U);
  EXPECT_EQ(tier_->Snapshot().gpus[0].copies, 1U);
}

TEST_F(CheckTest, OneAnswerIsTheEndOfAllSilenceBefore) {
  for (int check = 1; check < 3 * DeviceGpu::kSilentChecks; ++check) {
    if (check % 2 == 1) gpus_.FailFrom("Check", 1, absl::AbortedError("the agent has ended"));
    EXPECT_FALSE(tier_->CheckCopies());
    EXPECT_TRUE(tier_->Snapshot().gpus[0].usable) << check;
    gpus_.Heal();
  }
}

// Twice is twice the driver: the first word of one that is silent then is not taken for two.
TEST_F(CheckTest, ADriversWordAfterASilentAgentIsNoProofYet) {
  on_ = {kGpu};
  images_ = MustMake();
  gpus_.FailCall("Check", 1, absl::AbortedError("the agent has ended"));
  gpus_.FailCall("Check", 2, absl::UnavailableError("the context: 700"));
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_FALSE(images_[0].lost());
}

TEST_F(CheckTest, NoRoomToLookTellsNothing) {
  gpus_.FailFrom("Check", 1, absl::ResourceExhaustedError("the device is full"));
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_FALSE(images_[0].lost());
}

TEST_F(CheckTest, AGpuThatIsGoneTwiceIsLostWithAllOnItAndNotUsed) {
  gpus_.FailFrom("Check", 1, absl::UnavailableError("the GPU has fallen off the bus"));
  EXPECT_TRUE(tier_->CheckCopies());
  EXPECT_TRUE(images_[0].lost());
  EXPECT_TRUE(images_[1].lost());
  EXPECT_FALSE(tier_->Snapshot().gpus[0].usable);
  EXPECT_THAT(tier_->GpusOf({true, "", {}}), IsEmpty());
  gpus_.Heal();
  EXPECT_FALSE(tier_->CheckCopies());
  EXPECT_THAT(tier_->GpusOf({true, "", {}}), ElementsAre(kGpu, kOther));
}

// The check of the GPU that hangs goes on; what it finds is told later.
TEST_F(CheckTest, AGpuThatHangsHoldsUpNoOther) {
  absl::Notification go_on;
  std::atomic<int> first{0};
  gpus_.Before("Check", [&] {
    if (first.fetch_add(1) == 0) go_on.WaitForNotification();
  });
  gpus_.Reset(kGpu);
  gpus_.Reset(kOther);
  EXPECT_TRUE(tier_->CheckCopies());  // One of the two.
  EXPECT_NE(images_[0].lost(), images_[1].lost());
  EXPECT_FALSE(go_on.HasBeenNotified());
  go_on.Notify();
  EXPECT_TRUE(tier_->CheckCopies());
  EXPECT_TRUE(images_[0].lost() && images_[1].lost());
}

}  // namespace
}  // namespace modelhost
