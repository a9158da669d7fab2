// The device tier on real agents and the fake driver: what it asks for is what they can do.
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "daemon/device_agent/agent_finder.h"
#include "daemon/device_agent/device_agent_test_fixture.h"
#include "daemon/platform/linux_os.h"
#include "daemon/region/device_tier.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AgentTierTest : public DeviceAgentTest {
 protected:
  void TearDown() override {
    tier_.reset();
    DeviceAgentTest::TearDown();
  }
  void Start(uint64_t segment_bytes = UINT64_MAX) {
    finder_ = std::make_unique<AgentFinder>(*program_.Duplicate(), clock_, Options());
    tier_ = std::make_unique<DeviceTier>(
        *finder_, clock_, host_,
        DeviceTierOptions{.segment_bytes = segment_bytes, .ring_bytes = 4 * kMiB});
    tier_->Discover();
    auto targets = tier_->Choose(policy_, cancel_);
    ASSERT_TRUE(targets.ok()) << targets.status();
    targets_ = *std::move(targets);
    ASSERT_THAT(targets_.gpus, ElementsAre(kGpu));
    MakeRegion();
    Plan();
  }
  void MakeRegion() {
    auto memory = WritableRegion::Create("weights", kBytes, HugePages::kOff);
    ASSERT_TRUE(memory.ok());
    uint32_t word = 1;
    for (std::byte& byte : memory->bytes()) {
      byte = static_cast<std::byte>((word = word * 1664525U + 1013904223U) >> 24);
    }
    auto sealed = std::move(*memory).Seal();
    ASSERT_TRUE(sealed.ok());
    HostRegion::Parts parts;
    parts.kind = abi::RegionKind::kSealed;
    parts.residency = Residency::kSealed;
    parts.bytes = kBytes;
    parts.mapping = *ReadOnlyMapping::MapSealed(sealed->fd, kBytes);
    parts.content = Sha256(parts.mapping.bytes());
    parts.fd = std::move(sealed->fd);
    regions_ = {std::make_shared<const HostRegion>(os_, std::move(parts))};
  }
  void Plan() {
    std::vector<ComponentIndex> components;
    components.push_back({"model", TensorIndex("safetensors")});
    components[0].index.AddFile("a");
    uint64_t at = 13;
    for (int i = 0; i < 40; ++i) {
      TensorInfo info;
      const std::string name = "t" + std::to_string(i);
      info.name = name;
      info.dtype = abi::DType::kU8;
      info.offset = at;
      info.nbytes = 100'000 + 3001 * static_cast<uint64_t>(i);
      at += info.nbytes + static_cast<uint64_t>(i % 3);
      components[0].index.Add(info);
    }
    const std::vector<std::string> files = {"a"};
    const std::vector<uint32_t> file_regions = {0};
    std::vector<std::string> warnings;
    auto plan = PlanDevice(policy_, components, files, file_regions, targets_.segments,
                           targets_.limits, warnings);
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
  }
  absl::StatusOr<std::vector<DeviceImage>> Make() {
    return tier_->Make({.name = "planner@8",
                        .policy = policy_,
                        .plan = plan_,
                        .gpus = targets_.gpus,
                        .regions = regions_,
                        .cancel = cancel_});
  }
  // What a segment holds, as the fake keeps it.
  std::string Held(const DeviceRegion& region, uint32_t number) {
    std::string bytes(region.segments().at(number).bytes, '\0');
    EXPECT_EQ(::pread(region.segments()[number].fd.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  std::string Wanted(uint32_t number) {
    const DevicePlan::Part& part = plan_.parts.at(0);
    std::string bytes(part.segment_bytes.at(number), '\0');
    const auto* from = reinterpret_cast<const char*>(regions_[0]->data().data());
    for (size_t i = 0; i < part.ranges.size(); ++i) {
      if (part.places[i].segment != number) continue;
      bytes.replace(part.places[i].offset, part.ranges[i].bytes, from + part.ranges[i].offset,
                    part.ranges[i].bytes);
    }
    return bytes;
  }
  uint64_t Free() {
    auto agent = Agent(Options());
    const auto memory = agent->Memory();
    EXPECT_TRUE(memory.ok()) << memory.status();
    return memory.ok() ? memory->free_bytes : 0;
  }

  static constexpr uint64_t kBytes = 7 * kMiB;
  LinuxOs os_;
  BudgetPool host_{"host", uint64_t{1} << 30};
  std::unique_ptr<AgentFinder> finder_;
  std::unique_ptr<DeviceTier> tier_;
  const DevicePolicy policy_{true, "", {}};
  CancelToken cancel_;
  DeviceTier::Targets targets_;
  DevicePlan plan_;
  std::vector<std::shared_ptr<const HostRegion>> regions_;
};

TEST_F(AgentTierTest, TensorsAreOnTheDeviceOnceAndGoWithTheLastUser) {
  Start(4 * kMiB);
  const uint64_t free_bytes = Free();
  {
    auto first = Make();
    ASSERT_TRUE(first.ok()) << first.status();
    const DeviceRegion& region = *first->at(0).regions.at(0);
    ASSERT_GE(region.segments().size(), 2U);
    for (uint32_t s = 0; s < region.segments().size(); ++s) {
      EXPECT_TRUE(Held(region, s) == Wanted(s)) << s;
    }
    const auto second = Make();
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(second->at(0).regions[0].get(), &region);
    EXPECT_EQ(free_bytes - Free(), plan_.TotalBytes());
    EXPECT_FALSE(tier_->CheckCopies());
    EXPECT_FALSE(region.lost());
  }
  EXPECT_EQ(Free(), free_bytes);
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), 0U);
  EXPECT_EQ(host_.reserved(), 0U);
}

TEST_F(AgentTierTest, AnAgentThatDiesFailsOneLoadAndTheNextOneSucceeds) {
  const std::string mark = ::testing::TempDir() + "/tier_mark_" + std::to_string(::getpid());
  Set("FAKECUDA_FAIL", "cuMemcpyHtoDAsync:1:kill");
  Set("FAKECUDA_FAIL_MARK", mark);
  Set("FAKECUDA_FAIL_ONCE", "1");
  Start();
  const auto failed = Make();
  EXPECT_TRUE(absl::IsUnavailable(failed.status())) << failed.status();
  EXPECT_THAT(std::string(failed.status().message()), HasSubstr("copy of planner@8 on GPU-"));
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), 0U);
  EXPECT_EQ(host_.reserved(), 0U);
  const auto made = Make();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_TRUE(Held(*made->at(0).regions[0], 0) == Wanted(0));
  ::unlink(mark.c_str());
}

TEST_F(AgentTierTest, WhatWasLeftIsTakenAfterTheDeviceWasAsked) {
  Start();
  DeviceRegion::Parts left;
  {
    const auto made = Make();
    ASSERT_TRUE(made.ok()) << made.status();
    const DeviceRegion& region = *made->at(0).regions[0];
    left.key = region.key();
    left.mode = region.mode();
    left.checksums = region.checksums();
    for (const DeviceSegment& segment : region.segments()) {
      DeviceSegment& copy = left.segments.emplace_back();
      copy.bytes = segment.bytes;
      copy.fd = *segment.fd.Duplicate();
    }
  }
  // Another daemon, with agents of its own.
  tier_.reset();
  Start();
  const DeviceRegionKey key = left.key;
  const int fd = left.segments[0].fd.get();
  tier_->Offer(key, std::move(left));
  const auto made = Make();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->at(0).regions[0]->segments()[0].fd.get(), fd);
  EXPECT_TRUE(Held(*made->at(0).regions[0], 0) == Wanted(0));
}

TEST_F(AgentTierTest, AFullDeviceRefuses) {
  Set("FAKECUDA_MEM_MB", "4");
  Start();
  const auto made = Make();
  EXPECT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
}

// Also while it looks for GPUs, of which nobody knows yet.
TEST_F(AgentTierTest, NobodyWaitsForADriverThatHangsOnceTheDaemonEnds) {
  const std::string mark = ::testing::TempDir() + "/tier_hang_" + std::to_string(::getpid());
  Set("FAKECUDA_FAIL", "cuInit:1:hang");
  Set("FAKECUDA_FAIL_MARK", mark);
  DeviceAgentOptions options = Options();
  options.stall = absl::Seconds(60);
  finder_ = std::make_unique<AgentFinder>(*program_.Duplicate(), clock_, options);
  tier_ = std::make_unique<DeviceTier>(*finder_, clock_, host_, DeviceTierOptions{});
  std::thread discovery([this] { tier_->Discover(); });
  const absl::Duration start = clock_.Monotonic();
  while (::access(mark.c_str(), F_OK) != 0 && clock_.Monotonic() - start < absl::Seconds(30)) {
    std::this_thread::yield();
  }
  tier_->Stop();
  discovery.join();
  EXPECT_LT(clock_.Monotonic() - start, absl::Seconds(45));
  EXPECT_THAT(tier_->Snapshot().reason, HasSubstr("the daemon ends"));
  ::unlink(mark.c_str());
}

// Without exports of memory: the agent holds it, and it goes when it is told.
TEST_F(AgentTierTest, LegacyCopiesLiveAsLongAsTheirUsers) {
  Set("FAKECUDA_ATTR_103", "0");
  Start();
  const uint64_t free_bytes = Free();
  {
    const auto made = Make();
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->at(0).mode, abi::DeviceMode::kCudaIpc);
    EXPECT_LT(Free(), free_bytes);
    EXPECT_FALSE(tier_->CheckCopies());
  }
  // A thread of the GPU's asks the agent to release what it holds.
  BudgetPool& pool = *tier_->Pools().at(0);
  const absl::Time give_up = absl::Now() + absl::Seconds(60);
  while (pool.reserved() > 0 && absl::Now() < give_up) std::this_thread::yield();
  EXPECT_EQ(Free(), free_bytes);
}

}  // namespace
}  // namespace modelhost
