// Loads whose policy wants copies on GPUs, and what of them outlives the daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/device_tier.h"
#include "daemon/region/loader_test_fixture.h"
#include "daemon/region/parking.h"
#include "daemon/region/restored_memory.h"
#include "daemon/store/atomic_file.h"
#include "proto/abi/version_index.h"
#include "tests/fakes/fake_device.h"
#include "tests/fakes/memory_fd_store.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kWeightBytes = uint64_t{3} << 20;
constexpr char kGpuA[] = "GPU-a";

// An index with nothing but what a plan is read from.
class PlanIndexBuilder final : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                     const std::vector<ComponentIndex>& components,
                                     const DevicePlan& plan) override {
    ++builds;
    last = plan;
    std::vector<abi::TensorEntry> tensors;
    for (const ComponentIndex& component : components) {
      for (size_t i = 0; i < component.index.size(); ++i) {
        const TensorInfo info = component.index.at(i);
        abi::TensorEntry& entry = tensors.emplace_back();
        entry.region = version.file_regions.at(info.file);
        entry.region_offset = info.offset;
        entry.nbytes = info.nbytes;
        entry.device_segment = abi::kNone;
        entry.flags = abi::kTensorMappable;
        if (!plan.Has(entry.region, {info.offset, info.nbytes})) continue;
        entry.flags |= abi::kTensorOnDevice;
        if (const auto place = plan.Find(entry.region, {info.offset, info.nbytes})) {
          entry.device_segment = place->segment;
          entry.device_offset = place->offset;
        }
      }
    }
    std::vector<abi::RegionEntry> regions;
    for (const auto& region : version.regions) regions.push_back({region->bytes(), {}, 1, 1});
    std::vector<abi::DeviceSegmentEntry> segments;
    for (const DevicePlan::Part& part : plan.parts) {
      for (const uint64_t bytes : part.segment_bytes) segments.push_back({bytes, part.region, 0});
    }
    return Write(tensors, regions, segments);
  }
  int builds = 0;
  DevicePlan last;

 private:
  static absl::StatusOr<SealedRegion> Write(const std::vector<abi::TensorEntry>& tensors,
                                            const std::vector<abi::RegionEntry>& regions,
                                            const std::vector<abi::DeviceSegmentEntry>& segments) {
    abi::IndexHeader header{};
    header.magic = abi::kIndexMagic;
    header.abi_version = abi::kIndexAbi;
    header.header_bytes = sizeof(header);
    uint64_t end = sizeof(header);
    const auto place = [&end](const auto& table) {
      const abi::TableRef ref{end, table.size()};
      end += table.size() * sizeof(table[0]);
      return ref;
    };
    header.tensors = place(tensors);
    header.regions = place(regions);
    header.device_segments = place(segments);
    header.buckets = {end, 4 * std::bit_ceil(tensors.size())};
    end += header.buckets.count * sizeof(abi::Bucket);
    header.index_bytes = end;
    auto memory = WritableRegion::Create("index", end, HugePages::kOff);
    if (!memory.ok()) return ToStatus(memory.error());
    std::byte* const base = memory->bytes().data();
    std::memcpy(base, &header, sizeof(header));
    const auto copy = [base](const abi::TableRef& ref, const auto& table) {
      if (!table.empty()) {
        std::memcpy(base + ref.offset, table.data(), table.size() * sizeof(table[0]));
      }
    };
    copy(header.tensors, tensors);
    copy(header.regions, regions);
    copy(header.device_segments, segments);
    return ToStatusOr(std::move(*memory).Seal());
  }
};

class DeviceLoadTest : public LoaderTest {
 protected:
  void SetUp() override {
    LoaderTest::SetUp();
    MakeVersion(1, {{"a.safetensors", Weights(kWeightBytes, 1)}, {"config.json", "{}"}});
    gpus_.Add(kGpuA, "vmm_fd", uint64_t{1} << 30);
    Boot({});
  }
  void TearDown() override {
    End();
    LoaderTest::TearDown();
  }
  void Boot(std::vector<NamedFd> stored) {
    ++epoch_;
    tier_ = std::make_unique<DeviceTier>(gpus_, clock_, *host_, tier_options_);
    tier_->Discover();
    restored_ = std::make_unique<RestoredMemory>();
    Parking::Options options;
    options.epoch = epoch_;
    options.builder = "1.0 abc";
    options.most = most_;
    parking_ = std::make_unique<Parking>(os_, fd_store_, state_dir_, options);
    cache_ = std::make_unique<RegionCache>();
    loader_ =
        std::make_unique<Loader>(os_, clock_, *store_, *verified_, *pool_, *cache_, *host_,
                                 *memlock_, indexer_, plan_builder_, machine_, LoaderOptions());
    loader_->UseFdStore(*parking_, *restored_);
    loader_->UseDevices(*tier_);
    restored_->Take(os_, fd_store_, state_dir_, std::move(stored));
  }
  std::vector<NamedFd> End() {
    parking_->Leave();
    resident_.clear();
    loader_.reset();
    parking_.reset();
    restored_.reset();
    const absl::Duration give_up = clock_.Monotonic() + absl::Seconds(60);
    for (BudgetPool* pool : tier_->Pools()) {
      // What an agent holds is released by a thread of the GPU's.
      while (pool->reserved() > 0 && clock_.Monotonic() < give_up) std::this_thread::yield();
      EXPECT_EQ(pool->reserved(), 0U) << pool->name();
    }
    tier_.reset();
    return fd_store_.GiveAll();
  }
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> LoadOn(
      const DevicePolicy& policy, Residency residency = Residency::kSealed, uint64_t number = 1) {
    LoadRequest request = Request(number, residency);
    request.policy.device = policy;
    request.progress = [this](const LoadProgress& progress) {
      if (seen_.empty() || seen_.back() != progress.phase) seen_.push_back(progress.phase);
    };
    return loader_->Load(request);
  }
  const ResidentVersion& Resident(const DevicePolicy& policy = {true, "", {}},
                                  Residency residency = Residency::kSealed, uint64_t number = 1) {
    auto loaded = LoadOn(policy, residency, number);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) std::abort();
    resident_.push_back(*std::move(loaded));
    return *resident_.back();
  }
  // The tensor lies on the device as it does in the file.
  void ExpectOnDevice(const ResidentVersion& version) {
    const DeviceImage* image = version.DeviceOf(kGpuA);
    ASSERT_NE(image, nullptr);
    const std::string bytes = FakeGpus::Read(image->regions.at(0)->segments().at(0));
    const std::string file = Weights(kWeightBytes, 1);
    EXPECT_TRUE(bytes.substr(0, kWeightBytes) == file.substr(file.size() - kWeightBytes));
  }

  uint64_t epoch_ = 0;
  size_t most_ = 100;
  FakeGpus gpus_;
  DeviceTierOptions tier_options_{.ring_bytes = uint64_t{1} << 20};
  MemoryFdStore fd_store_;
  PlanIndexBuilder plan_builder_;
  std::unique_ptr<DeviceTier> tier_;
  std::unique_ptr<RestoredMemory> restored_;
  std::unique_ptr<Parking> parking_;
  std::unique_ptr<RegionCache> cache_;
  std::vector<std::shared_ptr<const ResidentVersion>> resident_;
  std::vector<std::string> seen_;
};

TEST_F(DeviceLoadTest, AVersionIsOnTheDeviceWhenItsLoadEnds) {
  const ResidentVersion& version = Resident();
  ExpectOnDevice(version);
  EXPECT_EQ(version.devices[0].mode, abi::DeviceMode::kVmmFd);
  EXPECT_EQ(version.devices[0].regions[0]->key().content, version.regions[0]->key().content);
  EXPECT_EQ(plan_builder_.last.SegmentCount(), 1U);
  std::vector<std::string> names;
  for (const LoadPhase& phase : version.report.phases) names.push_back(phase.name);
  EXPECT_THAT(names, testing::IsSupersetOf({"device_create", "device_upload", "device_verify"}));
  EXPECT_THAT(seen_, testing::IsSupersetOf({"device_create", "device_upload"}));
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), version.devices[0].bytes());
}

TEST_F(DeviceLoadTest, WithoutAPolicyNothingIsAsked) {
  const ResidentVersion& version = Resident({});
  EXPECT_THAT(version.devices, IsEmpty());
  EXPECT_EQ(gpus_.calls("Create"), 0);
  EXPECT_TRUE(plan_builder_.last.empty());
}

TEST_F(DeviceLoadTest, WithoutTheGpuItStaysOnTheHostAndSaysSo) {
  const ResidentVersion& version = Resident({true, "GPU-b", {}});
  EXPECT_THAT(version.devices, IsEmpty());
  EXPECT_THAT(version.report.warnings, ElementsAre(HasSubstr("no such GPU")));
  EXPECT_TRUE(plan_builder_.last.empty());
}

TEST_F(DeviceLoadTest, APatternThatMatchesNothingLeavesItOnTheHost) {
  const ResidentVersion& version = Resident({true, "", {"blk.*"}});
  EXPECT_THAT(version.devices, IsEmpty());
  EXPECT_THAT(version.report.warnings, ElementsAre(HasSubstr("'blk.*'")));
}

TEST_F(DeviceLoadTest, AFailedUploadFailsTheLoadAndLeavesNothing) {
  gpus_.FailCall("Upload", 1, absl::UnavailableError("the agent has ended (signal 9)"));
  const auto loaded = LoadOn({true, "", {}});
  EXPECT_TRUE(absl::IsUnavailable(loaded.status())) << loaded.status();
  EXPECT_THAT(loaded.status().message(), HasSubstr("copy of m@1 on GPU-a"));
  EXPECT_EQ(gpus_.used(kGpuA), 0U);
  EXPECT_EQ(host_->reserved(), 0U);
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), 0U);
  ExpectOnDevice(Resident());
}

TEST_F(DeviceLoadTest, AFullBudgetIsTheGpus) {
  MakeVersion(2, {{"a.safetensors", Weights(kWeightBytes, 2)}});
  End();
  tier_options_.budget_bytes = uint64_t{5} << 20;
  Boot({});
  Resident();
  const auto second = LoadOn({true, "", {}}, Residency::kSealed, 2);
  const auto refusal = BudgetRefusalOf(second.status());
  ASSERT_TRUE(refusal.has_value()) << second.status();
  EXPECT_EQ(refusal->pool, kGpuA);
}

TEST_F(DeviceLoadTest, ACancelledLoadEndsDuringTheUpload) {
  LoadRequest request = Request(1, Residency::kSealed);
  request.policy.device = {true, "", {}};
  gpus_.Before("Upload", [&] { request.cancel->Cancel(); });
  EXPECT_TRUE(absl::IsCancelled(loader_->Load(request).status()));
  EXPECT_EQ(gpus_.used(kGpuA), 0U);
}

TEST_F(DeviceLoadTest, ACopyComesBackFromTheFdStoreVerifiedAndNotUploaded) {
  ExpectOnDevice(Resident());
  EXPECT_EQ(fd_store_.size(), 4U);  // Two files, the index, one segment.
  const int uploads = gpus_.calls("Upload");
  const int builds = plan_builder_.builds;
  Boot(End());
  EXPECT_EQ(restored_->report().copies, 1U);
  EXPECT_EQ(restored_->report().taken, 4U);
  const ResidentVersion& after = Resident();
  ExpectOnDevice(after);
  EXPECT_TRUE(after.report.restored_index);
  EXPECT_EQ(gpus_.calls("Upload"), uploads);
  EXPECT_EQ(gpus_.calls("Verify"), 1);
  EXPECT_EQ(plan_builder_.builds, builds);
  EXPECT_EQ(tier_->Pools().at(0)->reserved(), after.devices[0].bytes());
  EXPECT_EQ(fd_store_.size(), 4U);
  // And again.
  Boot(End());
  ExpectOnDevice(Resident());
  EXPECT_EQ(gpus_.calls("Upload"), uploads);
}

// What is lost may keep the memory from what is to take its place.
TEST_F(DeviceLoadTest, ALostCopyLeavesTheVersionAndTheFdStoreAndTheRestStays) {
  ExpectOnDevice(Resident());
  EXPECT_EQ(parking_->parked(), 4U);
  const DeviceRegion& lost = *resident_.back()->devices[0].regions[0];
  EXPECT_EQ(WithoutLostCopies(*resident_.back())->devices[0].regions.size(), 1U);
  lost.MarkLost();
  auto left = WithoutLostCopies(*resident_.back());
  ASSERT_NE(left, nullptr);
  parking_->Forget(lost);
  parking_->Forget(lost);  // It is not there any more.
  ASSERT_TRUE(parking_->Settle(absl::Seconds(60)));
  EXPECT_EQ(parking_->parked(), 3U);
  EXPECT_EQ(fd_store_.size(), 3U);
  resident_.back() = std::move(left);  // With the region, which nobody else has.
  EXPECT_EQ(gpus_.used(kGpuA), 0U);
  const ResidentVersion& version = *resident_.back();
  EXPECT_TRUE(version.devices.at(0).lost());
  EXPECT_THAT(version.devices[0].regions, IsEmpty());
  EXPECT_EQ(version.host_bytes(), version.manifest->TotalBytes());
  EXPECT_FALSE(version.report.phases.empty());
  // The next daemon finds the version, and makes the copy.
  Boot(End());
  EXPECT_EQ(restored_->report().copies, 0U);
  const ResidentVersion& after = Resident();
  ExpectOnDevice(after);
  EXPECT_EQ(after.report.restored_bytes, after.host_bytes());
}

TEST_F(DeviceLoadTest, OfAFileBackedVersionTheCopyComesBackToo) {
  Resident({true, "", {}}, Residency::kPinned);
  EXPECT_EQ(fd_store_.size(), 2U);
  const int uploads = gpus_.calls("Upload");
  Boot(End());
  ExpectOnDevice(Resident({true, "", {}}, Residency::kPinned));
  EXPECT_EQ(gpus_.calls("Upload"), uploads);
}

TEST_F(DeviceLoadTest, ACopyThatWentBadIsUploadedAgain) {
  const ResidentVersion& before = Resident();
  EXPECT_EQ(::pwrite(before.devices[0].regions[0]->segments()[0].fd.get(), "XX", 2, 77), 2);
  Boot(End());
  const ResidentVersion& after = Resident();
  ExpectOnDevice(after);
  EXPECT_THAT(after.report.warnings, ElementsAre(HasSubstr("what the fd store kept of it")));
}

TEST_F(DeviceLoadTest, WithoutItsDescriptorTheCopyAloneIsMadeAgain) {
  Resident();
  std::vector<NamedFd> stored = End();
  const ParkedRecord record =
      *ParseParkedRecord(*ReadSmallFileAt(os_, state_dir_, kParkedName, 1 << 20));
  const std::string name = record.devices.at(0).segments.at(0).name;
  std::erase_if(stored, [&](const NamedFd& each) { return each.name == name; });
  Boot(std::move(stored));
  EXPECT_EQ(restored_->report().copies, 0U);
  EXPECT_EQ(restored_->report().incomplete, 0U);
  const ResidentVersion& after = Resident();
  ExpectOnDevice(after);
  EXPECT_EQ(after.report.restored_bytes, after.host_bytes());
}

TEST_F(DeviceLoadTest, AnIndexOfAnotherPolicyIsNotTakenUp) {
  Resident({});
  Boot(End());
  const ResidentVersion& after = Resident();
  EXPECT_FALSE(after.report.restored_index);
  ExpectOnDevice(after);
  Boot(End());
  EXPECT_FALSE(Resident({}).report.restored_index);
  EXPECT_THAT(resident_.back()->devices, IsEmpty());
}

TEST_F(DeviceLoadTest, WhatNobodyTakesIsLetGo) {
  Resident();
  Boot(End());

  EXPECT_GT(gpus_.used(kGpuA), 0U);
  restored_->DropRest();
  EXPECT_EQ(gpus_.used(kGpuA), 0U);
}

TEST_F(DeviceLoadTest, AFullStoreKeepsTheIndexAndNoHalfCopy) {
  End();
  tier_options_.segment_bytes = uint64_t{1} << 20;
  most_ = 3;
  Boot({});
  MakeVersion(2, {{"a.safetensors", Weights(kWeightBytes, 1)}});
  const ResidentVersion& version = Resident({true, "", {}}, Residency::kSealed, 2);
  ExpectOnDevice(version);
  EXPECT_EQ(fd_store_.size(), 3U);
}

TEST_F(DeviceLoadTest, LegacyCopiesAreNotParked) {
  gpus_.Add("GPU-ipc", "cuda_ipc", uint64_t{1} << 30);
  Boot(End());
  const ResidentVersion& version = Resident({true, "GPU-ipc", {}});
  EXPECT_EQ(version.devices.at(0).mode, abi::DeviceMode::kCudaIpc);
  EXPECT_EQ(fd_store_.size(), 3U);
}

}  // namespace
}  // namespace modelhost
