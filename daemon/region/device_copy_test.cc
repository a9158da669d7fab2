// How copies come about: booked, created, filled, shared; and what a failure leaves, which is
// nothing.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "daemon/region/device_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kDeviceBytes = uint64_t{64} << 20;
constexpr uint64_t kSourceBytes = 1'500'000;

class DeviceCopyTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    gpus_.Add(kGpu, "vmm_fd", kDeviceBytes);
    gpus_.Add(kOther, "cuda_ipc", kDeviceBytes);
    gpus_.Add("GPU-3", "host_direct", kDeviceBytes);
    gpus_.Add("GPU-4", "host_registered", kDeviceBytes);
    regions_ = {Sealed('a', kSourceBytes), Sealed('b', kSourceBytes)};
    plan_ = PlanOf(2, kMiB);
    StartTier();
  }
  BudgetPool& PoolOf(const std::string& gpu) {
    for (BudgetPool* pool : tier_->Pools()) {
      if (pool->name() == gpu) return *pool;
    }
    return host_;
  }
};

TEST_F(DeviceCopyTest, TensorsArePackedIntoSegmentsAndBooked) {
  const auto images = MustMake();
  ASSERT_EQ(images.size(), 1U);
  const DeviceImage& image = images[0];
  EXPECT_EQ(image.gpu, kGpu);
  EXPECT_EQ(image.mode, abi::DeviceMode::kVmmFd);
  ASSERT_EQ(image.regions.size(), 2U);
  for (size_t r = 0; r < 2; ++r) {
    const DeviceRegion& region = *image.regions[r];
    ASSERT_EQ(region.segments().size(), plan_.parts[r].segment_bytes.size());
    ASSERT_GE(region.segments().size(), 2U);
    for (uint32_t s = 0; s < region.segments().size(); ++s) {
      const std::string bytes = FakeGpus::Read(region.segments()[s]);
      EXPECT_TRUE(bytes == Expected(*regions_[r], plan_.parts[r], s)) << r << " " << s;
      EXPECT_EQ(region.checksums().at(s), FakeGpus::Sum(bytes));
    }
    EXPECT_EQ(region.booked_bytes(), region.bytes());
    EXPECT_EQ(region.planned(), PlannedDeviceId(kGpu, regions_[r]->digest(), "\"all\""));
  }
  EXPECT_EQ(PoolOf(kGpu).reserved(), plan_.TotalBytes());
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes());
  EXPECT_EQ(host_.reserved(), 0U);  // The ring is given back.
  const std::string bytes = std::to_string(plan_.TotalBytes());
  EXPECT_THAT(phases_, ElementsAre("device_create " + bytes, "device_upload " + bytes,
                                   "device_verify " + bytes));
  EXPECT_EQ(progressed_, plan_.TotalBytes());
}

TEST_F(DeviceCopyTest, MemoryOfAnotherKindThanTheGpuWasToMakeIsNotTaken) {
  gpus_.ChangeMode(kGpu, "cuda_ipc");
  auto made = Make();
  EXPECT_TRUE(absl::IsUnavailable(made.status())) << made.status();
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("which is not vmm_fd"));
  ExpectNothingLeft();
  gpus_.ChangeMode(kOther, "vmm_fd");
  on_ = {kOther};
  made = Make();
  EXPECT_TRUE(absl::IsUnavailable(made.status())) << made.status();
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("which is not cuda_ipc"));
  ExpectNothingLeft();
}

TEST_F(DeviceCopyTest, WithTheLastUserMemoryAndBookingGo) {
  on_ = {kGpu, kOther, "GPU-3", "GPU-4"};
  {
    const auto images = MustMake();
    ASSERT_EQ(images.size(), 4U);
    EXPECT_EQ(gpus_.used(kOther), plan_.TotalBytes());
    EXPECT_EQ(PoolOf(kOther).reserved(), plan_.TotalBytes());
    EXPECT_THAT(images[2].regions, IsEmpty());
    EXPECT_EQ(host_.reserved(), plan_.TotalBytes());  // Of GPU-4.
  }
  ExpectNothingLeft();
  EXPECT_EQ(gpus_.calls("Release"), static_cast<int>(plan_.SegmentCount()));
}

// An agent that hangs may take half a minute to be given up.
TEST_F(DeviceCopyTest, ACopyThatTheAgentHoldsIsDroppedWithoutWaitingForTheAgent) {
  on_ = {kOther};
  auto images = MustMake();
  absl::Notification releasing;
  absl::Notification go_on;
  gpus_.Before("Release", [&] {
    if (!releasing.HasBeenNotified()) releasing.Notify();
    go_on.WaitForNotification();
  });
  absl::Notification dropped;
  std::thread drops([&] {
    images.clear();
    dropped.Notify();
  });
  EXPECT_TRUE(dropped.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_TRUE(releasing.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(PoolOf(kOther).reserved(), plan_.TotalBytes()) << "the agent has it still";
  // A load of that GPU waits for its turn, and hears that it is cancelled.
  const int creates = gpus_.calls("Create");
  absl::Notification ended;
  absl::Status cancelled;
  std::thread loads([&] {
    cancelled = Make().status();
    ended.Notify();
  });
  cancel_.Cancel();
  EXPECT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(gpus_.calls("Create"), creates);
  go_on.Notify();
  drops.join();
  loads.join();
  EXPECT_TRUE(absl::IsCancelled(cancelled)) << cancelled;
  ExpectNothingLeft();
}

// Else a load would find the GPU full of what is about to go.
TEST_F(DeviceCopyTest, WhatIsToBeReleasedGoesBeforeTheNextLoadBegins) {
  on_ = {kOther};
  auto images = MustMake();
  images.clear();
  uint64_t used = 1;
  gpus_.Before("Create", [&] {
    if (used == 1) used = gpus_.used(kOther);
  });
  images = MustMake();
  EXPECT_EQ(used, 0U);
}

TEST_F(DeviceCopyTest, TheRingIsBookedWhileItIsUsed) {
  uint64_t seen = 0;
  gpus_.Before("Upload", [&] { seen = host_.reserved(); });
  MustMake();
  EXPECT_EQ(seen, kMiB);
}

TEST_F(DeviceCopyTest, HostRegisteredCopiesAreMemoryThatCanBeWrittenAndNotResized) {
  on_ = {"GPU-4"};
  const auto images = MustMake();
  ASSERT_EQ(images.size(), 1U);
  const DeviceRegion& region = *images[0].regions.at(1);
  for (uint32_t s = 0; s < region.segments().size(); ++s) {
    const DeviceSegment& segment = region.segments()[s];
    EXPECT_TRUE(FakeGpus::Read(segment) == Expected(*regions_[1], plan_.parts[1], s));
    EXPECT_EQ(::pwrite(segment.fd.get(), "x", 1, 0), 1);
    EXPECT_NE(::ftruncate(segment.fd.get(), 0), 0);
  }
  EXPECT_EQ(gpus_.calls("Create"), 0);
  EXPECT_FALSE(tier_->CheckCopies());
}

TEST_F(DeviceCopyTest, AVersionThatSharesABytePartSharesTheCopy) {
  const auto first = MustMake();
  const int creates = gpus_.calls("Create");
  name_ = "planner@9";
  regions_ = {Sealed('c', kSourceBytes), Sealed('a', kSourceBytes)};  // Other numbers.
  const auto second = MustMake();
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].regions[1], first[0].regions[0]);
  EXPECT_EQ(gpus_.calls("Create"), creates + static_cast<int>(plan_.parts[0].segment_bytes.size()));
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes() / 2 * 3);
}

TEST_F(DeviceCopyTest, AnotherLayoutOfTheSameBytesIsAnotherCopy) {
  const auto first = MustMake();
  plan_ = PlanOf(2);
  const auto second = MustMake();
  EXPECT_NE(second[0].regions[0], first[0].regions[0]);
}

TEST_F(DeviceCopyTest, TwoLoadsAtOnceMakeOneCopy) {
  absl::Notification uploading;
  absl::Notification go_on;
  gpus_.Before("Upload", [&] {
    if (!uploading.HasBeenNotified()) uploading.Notify();
    go_on.WaitForNotification();
  });
  std::vector<DeviceImage> first;
  std::vector<DeviceImage> second;
  std::thread one([&] { first = MustMake(); });
  uploading.WaitForNotification();
  const DeviceTier::Work work{.name = "other@1",
                              .policy = policy_,
                              .plan = plan_,
                              .gpus = on_,
                              .regions = regions_,
                              .cancel = cancel_};
  std::thread two([&] { second = *tier_->Make(work); });
  go_on.Notify();
  one.join();
  two.join();
  EXPECT_EQ(first.at(0).regions, second.at(0).regions);
  EXPECT_EQ(gpus_.calls("Create"), static_cast<int>(plan_.SegmentCount()));
}

TEST_F(DeviceCopyTest, WhoWaitsForAnotherLoadCanBeCancelledAndTriesWhereItFailed) {
  absl::Notification uploading;
  absl::Notification go_on;
  gpus_.Before("Upload", [&] {
    if (!uploading.HasBeenNotified()) uploading.Notify();
    go_on.WaitForNotification();
  });
  gpus_.FailCall("Upload", 1, absl::UnavailableError("the agent has ended (signal 9)"));
  absl::Status failed;
  std::thread one([&] { failed = Make().status(); });
  uploading.WaitForNotification();
  CancelToken cancelled;
  cancelled.Cancel();
  const auto work = [&](const CancelToken& cancel) {
    return DeviceTier::Work{.name = "other@1",
                            .policy = policy_,
                            .plan = plan_,
                            .gpus = on_,
                            .regions = regions_,
                            .cancel = cancel};
  };
  EXPECT_TRUE(absl::IsCancelled(tier_->Make(work(cancelled)).status()));
  std::vector<DeviceImage> second;
  std::thread two([&] {
    auto made = tier_->Make(work(cancel_));
    EXPECT_TRUE(made.ok()) << made.status();
    if (made.ok()) second = *std::move(made);
  });
  go_on.Notify();
  one.join();
  two.join();
  EXPECT_EQ(failed.message(), "copy of planner@8 on GPU-1: the agent has ended (signal 9)");
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes());
}

TEST_F(DeviceCopyTest, AFailureAtAnyCallLeavesNothing) {
  on_ = {kGpu, kOther, "GPU-4"};
  for (const char* call : {"Create", "Upload"}) {
    for (int nth = 1; nth <= 2 * static_cast<int>(plan_.SegmentCount()); ++nth) {
      gpus_.FailCall(call, nth, absl::DeadlineExceededError("hangs"));
      const auto made = Make();
      EXPECT_TRUE(absl::IsUnavailable(made.status())) << call << nth << made.status();
      EXPECT_THAT(made.status().message(), HasSubstr("copy of planner@8 on GPU-"));
      ExpectNothingLeft();
      gpus_.Heal();
    }
  }
  EXPECT_EQ(MustMake().size(), 3U);
}

TEST_F(DeviceCopyTest, ABudgetThatIsUsedUpRefusesAndNamesItself) {
  StartTier({.budget_bytes = plan_.TotalBytes() - 1});
  const auto made = Make();
  ASSERT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
  const auto refusal = BudgetRefusalOf(made.status());
  ASSERT_TRUE(refusal.has_value());
  EXPECT_EQ(refusal->pool, kGpu);
  EXPECT_EQ(refusal->need_bytes, plan_.TotalBytes());
  EXPECT_THAT(made.status().message(), HasSubstr("copy of planner@8 on GPU-1: needs"));
  EXPECT_EQ(gpus_.calls("Create"), 0);
  ExpectNothingLeft();
}

TEST_F(DeviceCopyTest, WithoutRoomForTheRingTheHostsBudgetIsNamed) {
  StartTier({.ring_bytes = uint64_t{1} << 40});
  const auto made = Make();
  const auto refusal = BudgetRefusalOf(made.status());
  ASSERT_TRUE(refusal.has_value()) << made.status();
  EXPECT_EQ(refusal->pool, "host");
  ExpectNothingLeft();
}

TEST_F(DeviceCopyTest, AFullDeviceIsNoBudgetsMatter) {
  FakeGpus small;
  small.Add(kGpu, "vmm_fd", 3 * kMiB);
  tier_ = std::make_unique<DeviceTier>(
      small, clock_, host_, DeviceTierOptions{.budget_bytes = kDeviceBytes, .ring_bytes = kMiB});
  tier_->Discover();
  const auto made = Make();
  EXPECT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
  EXPECT_FALSE(BudgetRefusalOf(made.status()).has_value());
  EXPECT_EQ(small.used(kGpu), 0U);
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), 0U);
  tier_.reset();
}

TEST_F(DeviceCopyTest, CancellingAnUploadEndsItAndLeavesNothing) {
  gpus_.Before("Upload", [&] { cancel_.Cancel(); });
  const auto made = Make();
  EXPECT_TRUE(absl::IsCancelled(made.status())) << made.status();
  EXPECT_EQ(made.status().message(), "load of planner@8: it was cancelled");
  ExpectNothingLeft();
}

TEST_F(DeviceCopyTest, MappedFilesPassThePageCacheByAndOthersDoNot) {
  plan_ = PlanOf(1);
  regions_ = {File('f', kSourceBytes, Residency::kMapped)};
  EXPECT_EQ(MustMake().size(), 1U);
  EXPECT_TRUE(gpus_.last_direct());
  regions_ = {File('g', kSourceBytes, Residency::kPinned)};
  EXPECT_EQ(MustMake().size(), 1U);
  EXPECT_FALSE(gpus_.last_direct());
  regions_ = {Sealed('h', kSourceBytes)};
  EXPECT_EQ(MustMake().size(), 1U);
  EXPECT_FALSE(gpus_.last_direct());
}

TEST_F(DeviceCopyTest, AFileThatChangesWhileItIsCopiedIsDataLoss) {
  plan_ = PlanOf(1);
  regions_ = {File('f', kSourceBytes, Residency::kMapped)};
  gpus_.Before("Upload", [&] {
    const UniqueFd fd(::open((root_ + "/f").c_str(), O_WRONLY | O_CLOEXEC));
    EXPECT_EQ(::pwrite(fd.get(), "XX", 2, 5000), 2);
    const timespec times[2] = {{1, 0}, {1, 0}};
    EXPECT_EQ(::futimens(fd.get(), times), 0);
  });
  const auto made = Make();
  EXPECT_TRUE(absl::IsDataLoss(made.status())) << made.status();
  EXPECT_THAT(made.status().message(), HasSubstr("/f: it was changed in place"));
  ExpectNothingLeft();
}

TEST_F(DeviceCopyTest, ATensorPastTheEndOfItsFileIsRefusedBeforeAnythingIsMade) {
  plan_.parts[0].ranges[2].bytes = kSourceBytes;
  EXPECT_EQ(Make().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gpus_.calls("Create"), 0);
}

class OfferedTest : public DeviceCopyTest {
 protected:
  // Of the same version, and not cancelled.
  DeviceTier::Work OfAnotherLoad() const {
    return {.name = name_,
            .policy = policy_,
            .plan = plan_,
            .gpus = on_,
            .regions = regions_,
            .cancel = goes_on_};
  }
  // What a daemon before this one left: taken out of a copy that is given up.
  void Leave() {
    const auto images = MustMake();
    for (const auto& region : images[0].regions) {
      DeviceRegion::Parts parts;
      parts.key = region->key();
      parts.mode = region->mode();
      parts.planned = region->planned();
      parts.checksums = region->checksums();
      for (const DeviceSegment& segment : region->segments()) {
        DeviceSegment& copy = parts.segments.emplace_back();
        copy.bytes = segment.bytes;
        copy.fd = *segment.fd.Duplicate();
      }
      left_.push_back(std::move(parts));
    }
  }
  void OfferAll() {
    for (DeviceRegion::Parts& parts : left_) {
      const DeviceRegionKey key = parts.key;
      tier_->Offer(key, std::move(parts));
    }
    left_.clear();
  }
  const CancelToken goes_on_;
  std::vector<DeviceRegion::Parts> left_;
};

TEST_F(OfferedTest, WhatWasLeftIsTakenVerifiedAndBooked) {
  Leave();
  OfferAll();
  const int creates = gpus_.calls("Create");
  const auto images = MustMake();
  EXPECT_EQ(gpus_.calls("Create"), creates);
  EXPECT_EQ(gpus_.calls("Verify"), static_cast<int>(plan_.SegmentCount()));
  EXPECT_EQ(PoolOf(kGpu).reserved(), plan_.TotalBytes());
  EXPECT_TRUE(FakeGpus::Read(images.at(0).regions.at(1)->segments().at(0)) ==
              Expected(*regions_[1], plan_.parts[1], 0));
  EXPECT_THAT(phases_, ElementsAre(HasSubstr("device_verify")));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(OfferedTest, WhatDoesNotHoldWhatItShouldIsMadeAgain) {
  Leave();
  EXPECT_EQ(::pwrite(left_[0].segments[0].fd.get(), "spoilt", 6, 100), 6);
  OfferAll();
  const auto images = MustMake();
  EXPECT_TRUE(FakeGpus::Read(images.at(0).regions.at(0)->segments().at(0)) ==
              Expected(*regions_[0], plan_.parts[0], 0));
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_THAT(warnings_[0], HasSubstr("does not hold what was uploaded"));
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes());  // The spoilt one is gone.
}

TEST_F(OfferedTest, WhatIsLaidOutOtherwiseIsMadeAgain) {
  Leave();
  left_[0].checksums.pop_back();
  left_[1].segments[0].bytes += kMiB;
  OfferAll();
  EXPECT_EQ(MustMake().size(), 1U);
  EXPECT_EQ(warnings_.size(), 2U);
  EXPECT_EQ(gpus_.calls("Verify"), 0);
}

TEST_F(OfferedTest, ACancelledLoadLeavesItForTheNext) {
  Leave();
  OfferAll();
  gpus_.Before("Verify", [&] { cancel_.Cancel(); });
  EXPECT_TRUE(absl::IsCancelled(Make().status()));
  gpus_.Heal();
  const int creates = gpus_.calls("Create");
  const DeviceTier::Work work = OfAnotherLoad();
  EXPECT_TRUE(tier_->Make(work).ok());
  EXPECT_EQ(gpus_.calls("Create"), creates);
}

TEST_F(OfferedTest, WhatWasTakenBeforeTheLoadFailedIsLeftForTheNextToo) {
  Leave();
  OfferAll();
  const int creates = gpus_.calls("Create");
  // The first part was taken; the second one is looked at when the cancel comes.
  auto looks = std::make_shared<std::atomic<size_t>>(0);
  gpus_.Before("Verify", [this, looks] {
    if (++*looks == plan_.parts[0].segment_bytes.size() + 1) cancel_.Cancel();
  });
  EXPECT_TRUE(absl::IsCancelled(Make().status()));
  gpus_.Heal();
  EXPECT_EQ(PoolOf(kGpu).reserved(), 0U);
  const DeviceTier::Work work = OfAnotherLoad();
  // And when another step fails after all were taken, or some.
  {
    gpus_.FailCall("Verify", 1, absl::DataLossError("does not hold what was uploaded"));
    gpus_.FailCall("Upload", 1, absl::UnavailableError("the agent has ended"));
    EXPECT_TRUE(absl::IsUnavailable(tier_->Make(work).status()));
    gpus_.Heal();
  }
  EXPECT_EQ(gpus_.calls("Create"), creates + static_cast<int>(plan_.parts[0].segment_bytes.size()));
  const int before = gpus_.calls("Create");
  const auto made = tier_->Make(work);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(gpus_.calls("Create"), before + static_cast<int>(plan_.parts[0].segment_bytes.size()));
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes());
}

TEST_F(OfferedTest, WhatNobodyTookGoesWhenItIsInTheWay) {
  Leave();
  OfferAll();
  gpus_.FailCall("Create", 1, absl::ResourceExhaustedError("the device is full"));
  regions_ = {Sealed('x', kSourceBytes), Sealed('y', kSourceBytes)};
  const auto images = MustMake();
  EXPECT_EQ(images.size(), 1U);
  EXPECT_EQ(gpus_.used(kGpu), plan_.TotalBytes());
}

TEST_F(OfferedTest, WhatNobodyTookGoesWhenItIsDroppedAndWhatComesTooLateToo) {
  Leave();
  OfferAll();
  tier_->DropOffered();
  EXPECT_EQ(gpus_.used(kGpu), 0U);
  Leave();
  OfferAll();
  EXPECT_EQ(gpus_.used(kGpu), 0U);
}

}  // namespace
}  // namespace modelhost
