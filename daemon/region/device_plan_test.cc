#include "daemon/region/device_plan.h"

#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "proto/abi/version_index.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = uint64_t{1} << 20;

struct TestTensor {
  std::string name;
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool mappable = true;
};

ComponentIndex Component(const std::vector<std::string>& files,
                         const std::vector<TestTensor>& tensors) {
  ComponentIndex component{"model", TensorIndex("safetensors")};
  for (const std::string& file : files) component.index.AddFile(file);
  for (const TestTensor& each : tensors) {
    TensorInfo info;
    info.name = each.name;
    info.dtype = abi::DType::kU8;
    info.file = each.file;
    info.offset = each.offset;
    info.nbytes = each.bytes;
    info.mappable = each.mappable;
    if (!each.mappable) info.reason = "why";
    component.index.Add(info);
  }
  return component;
}

class DevicePlanTest : public testing::Test {
 protected:
  DevicePlan Plan(const DevicePolicy& policy, bool segments = true) {
    auto plan =
        PlanDevice(policy, components_, files_, file_regions_, segments, limits_, warnings_);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? *plan : DevicePlan{};
  }

  std::vector<std::string> files_ = {"a", "b", "c"};
  std::vector<uint32_t> file_regions_ = {1, 0, 2};
  std::vector<ComponentIndex> components_;
  DeviceLayoutLimits limits_;
  std::vector<std::string> warnings_;
};

TEST_F(DevicePlanTest, NothingIsPlannedWithoutAPolicy) {
  components_.push_back(Component({"a"}, {{"x", 0, 0, 100}}));
  EXPECT_TRUE(Plan({}).empty());
}

TEST_F(DevicePlanTest, TensorsAreFoundByRegionAndRange) {
  components_.push_back(Component(
      {"b", "a"}, {{"x", 0, 4096, 1000}, {"y", 0, 0, 4096}, {"z", 1, 8, 100}, {"none", 0, 0, 0}}));
  const DevicePlan plan = Plan({true, "", {}});
  ASSERT_EQ(plan.parts.size(), 2U);
  EXPECT_EQ(plan.parts[0].region, 0U);
  EXPECT_THAT(plan.parts[0].ranges, ElementsAre(HostRange{0, 4096}, HostRange{4096, 1000}));
  EXPECT_EQ(plan.SegmentCount(), 2U);
  EXPECT_EQ(plan.TotalBytes(), 4 * kMiB);
  EXPECT_EQ(plan.Find(0, {4096, 1000})->segment, 0U);
  EXPECT_EQ(plan.Find(0, {4096, 1000})->offset, 4096U);
  EXPECT_EQ(plan.Find(1, {8, 100})->segment, 1U);  // In the index's numbers.
  EXPECT_EQ(plan.Find(1, {8, 100})->offset, 0U);
  for (const HostRange& other : {HostRange{0, 4095}, HostRange{1, 4096}, HostRange{0, 0}}) {
    EXPECT_FALSE(plan.Has(0, other));
    EXPECT_FALSE(plan.Find(0, other).has_value());
  }
  EXPECT_FALSE(plan.Has(2, {8, 100}));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(DevicePlanTest, PatternsChooseByTheWholeNameAndSayWhenTheyChooseNothing) {
  components_.push_back(Component({"a"}, {{"blk.1.w", 0, 0, 100}, {"out.w", 0, 100, 100}}));
  components_.push_back(Component({"c"}, {{"blk.10.w", 0, 0, 100}}));
  const DevicePlan plan = Plan({true, "", {"blk.[0-9].*", "blk.1\\..*", "out"}});
  EXPECT_TRUE(plan.Has(1, {0, 100}));
  EXPECT_FALSE(plan.Has(1, {100, 100}));
  EXPECT_TRUE(plan.Has(2, {0, 100}));
  EXPECT_THAT(warnings_, ElementsAre("device: no tensor's name matches the pattern 'out'"));
}

TEST_F(DevicePlanTest, WhatIsNotMappableStaysOnTheHostAndIsCounted) {
  components_.push_back(Component({"a"}, {{"x", 0, 0, 100, false}, {"y", 0, 100, 100}}));
  const DevicePlan plan = Plan({true, "", {}});
  EXPECT_FALSE(plan.Has(1, {0, 100}));
  EXPECT_TRUE(plan.Has(1, {100, 100}));
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_THAT(warnings_[0], HasSubstr("1 tensors"));
}

TEST_F(DevicePlanTest, TiedWeightsShareAndOverlappingOnesDoNot) {
  components_.push_back(
      Component({"a"}, {{"x", 0, 0, 1000}, {"tied", 0, 0, 1000}, {"part", 0, 500, 100}}));
  const DevicePlan plan = Plan({true, "", {}});
  ASSERT_EQ(plan.parts.size(), 1U);
  EXPECT_THAT(plan.parts[0].ranges, ElementsAre(HostRange{0, 1000}, HostRange{500, 100}));
  EXPECT_EQ(plan.Find(1, {500, 100})->offset, 1024U);
}

TEST_F(DevicePlanTest, WithoutSegmentsOnlyTheRangesAreKnown) {
  components_.push_back(Component({"a"}, {{"x", 0, 0, 1000}}));
  const DevicePlan plan = Plan({true, "", {}}, false);
  EXPECT_TRUE(plan.Has(1, {0, 1000}));
  EXPECT_FALSE(plan.Find(1, {0, 1000}).has_value());
  EXPECT_EQ(plan.SegmentCount(), 0U);
  EXPECT_EQ(plan.TotalBytes(), 0U);
}

TEST_F(DevicePlanTest, SegmentsAreNumberedThroughAllRegions) {
  limits_.max_segment_bytes = kMiB;
  limits_.granularity = kMiB;
  components_.push_back(
      Component({"a", "b"}, {{"x", 1, 0, kMiB}, {"y", 1, kMiB, kMiB}, {"z", 0, 0, 10}}));
  const DevicePlan plan = Plan({true, "", {}});
  EXPECT_EQ(plan.SegmentCount(), 3U);
  EXPECT_EQ(plan.Find(0, {kMiB, kMiB})->segment, 1U);
  EXPECT_EQ(plan.Find(1, {0, 10})->segment, 2U);
}

TEST_F(DevicePlanTest, ARangeThatNoDeviceCanHoldIsRefused) {
  components_.push_back(Component({"a"}, {{"x", 0, 0, UINT64_MAX / 2}}));
  const auto plan =
      PlanDevice({true, "", {}}, components_, files_, file_regions_, true, limits_, warnings_);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DevicePlanTest, TheDigestTellsRangesPlacesAndSegmentsApart) {
  components_.push_back(Component({"a"}, {{"x", 0, 0, kMiB}, {"y", 0, kMiB, kMiB}}));
  const DevicePlan::Part part = Plan({true, "", {}}).parts.at(0);
  EXPECT_EQ(PartDigest(part), PartDigest(Plan({true, "", {}}).parts.at(0)));
  DevicePlan::Part other = part;
  other.region = 7;  // The number differs from version to version.
  other.first_segment = 3;
  EXPECT_EQ(PartDigest(part), PartDigest(other));
  other.ranges[0].bytes -= 1;
  EXPECT_NE(PartDigest(part), PartDigest(other));
  other = part;
  other.places[1].offset += 512;
  EXPECT_NE(PartDigest(part), PartDigest(other));
  other = part;
  other.segment_bytes[0] *= 2;
  EXPECT_NE(PartDigest(part), PartDigest(other));
}

// An index with nothing but what a plan is read from.
struct RawIndex {
  std::vector<abi::TensorEntry> tensors;
  std::vector<abi::RegionEntry> regions;
  std::vector<abi::DeviceSegmentEntry> segments;

  std::vector<std::byte> Bytes() const {
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
    const uint64_t buckets = std::bit_ceil(tensors.size() * 2);
    if (!tensors.empty()) header.buckets = {end, buckets};
    if (!tensors.empty()) end += buckets * sizeof(abi::Bucket);
    header.index_bytes = end;
    std::vector<std::byte> bytes(end);
    std::memcpy(bytes.data(), &header, sizeof(header));
    const auto copy = [&bytes](const abi::TableRef& ref, const auto& table) {
      if (!table.empty()) {
        std::memcpy(bytes.data() + ref.offset, table.data(), table.size() * sizeof(table[0]));
      }
    };
    copy(header.tensors, tensors);
    copy(header.regions, regions);
    copy(header.device_segments, segments);
    return bytes;
  }
};

// The index that a plan is laid out in: one tensor for each range.
RawIndex IndexOf(const DevicePlan& plan, uint32_t regions, uint64_t region_bytes) {
  RawIndex index;
  for (uint32_t i = 0; i < regions; ++i) index.regions.push_back({region_bytes, {}, 1, 1});
  for (const DevicePlan::Part& part : plan.parts) {
    for (const HostRange& range : part.ranges) {
      abi::TensorEntry entry{};
      entry.region = part.region;
      entry.region_offset = range.offset;
      entry.nbytes = range.bytes;
      entry.flags = abi::kTensorMappable | abi::kTensorOnDevice;
      entry.device_segment = abi::kNone;
      if (const auto place = plan.Find(part.region, range)) {
        entry.device_segment = place->segment;
        entry.device_offset = place->offset;
      }
      index.tensors.push_back(entry);
    }
    for (const uint64_t bytes : part.segment_bytes) {
      index.segments.push_back({bytes, part.region, 0});
    }
  }
  abi::TensorEntry host{};
  host.device_segment = abi::kNone;
  host.flags = abi::kTensorMappable;
  index.tensors.push_back(host);
  return index;
}

void ExpectSame(const DevicePlan& a, const DevicePlan& b) {
  EXPECT_EQ(a.segments, b.segments);
  ASSERT_EQ(a.parts.size(), b.parts.size());
  for (size_t i = 0; i < a.parts.size(); ++i) {
    EXPECT_EQ(a.parts[i].region, b.parts[i].region);
    EXPECT_EQ(a.parts[i].first_segment, b.parts[i].first_segment);
    EXPECT_EQ(PartDigest(a.parts[i]), PartDigest(b.parts[i]));
  }
}

class PlanOfIndexTest : public DevicePlanTest {
 protected:
  void SetUp() override {
    limits_.granularity = 4096;
    limits_.max_segment_bytes = 8192;
    components_.push_back(Component({"a", "b"}, {{"v", 0, 0, 4096},
                                                 {"w", 0, 4096, 4096},
                                                 {"x", 0, 8192, 100},
                                                 {"y", 1, 10, 1000},
                                                 {"z", 1, 10, 900}}));
    plan_ = Plan({true, "", {}});
    ASSERT_EQ(plan_.SegmentCount(), 3U);
    index_ = IndexOf(plan_, 3, 16384);
  }
  std::string Refused() {
    const auto plan = PlanOfIndex(index_.Bytes());
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kDataLoss);
    return std::string(plan.status().message());
  }

  DevicePlan plan_;
  RawIndex index_;
};

TEST_F(PlanOfIndexTest, ThePlanComesBackFromTheIndex) {
  const auto read = PlanOfIndex(index_.Bytes());
  ASSERT_TRUE(read.ok()) << read.status();
  ExpectSame(*read, plan_);
  // In whatever order its tensors are.
  std::shuffle(index_.tensors.begin(), index_.tensors.end(), std::mt19937(7));
  index_.tensors.push_back(index_.tensors[0]);  // And with a tied one.
  ExpectSame(*PlanOfIndex(index_.Bytes()), plan_);
  const DevicePlan direct = Plan({true, "", {}}, false);
  ExpectSame(*PlanOfIndex(IndexOf(direct, 3, 16384).Bytes()), direct);
  EXPECT_TRUE(PlanOfIndex(IndexOf({}, 3, 16384).Bytes())->empty());
}

TEST_F(PlanOfIndexTest, TensorsThatDoNotFitTheirTablesAreRefused) {
  const RawIndex good = index_;
  const auto with = [&](auto change) {
    index_ = good;
    change(index_.tensors[1]);
    return Refused();
  };
  EXPECT_THAT(with([](auto& t) { t.device_segment = 3; }), HasSubstr("no segment 3"));
  EXPECT_THAT(with([](auto& t) { t.device_segment = 2; }), HasSubstr("bytes of region 1"));
  EXPECT_THAT(with([](auto& t) { t.device_segment = abi::kNone; }), HasSubstr("tensor 1: it has"));
  EXPECT_THAT(with([](auto& t) { t.flags = abi::kTensorMappable; }), HasSubstr("tensor 1: it has"));
  EXPECT_THAT(with([](auto& t) { t.flags = abi::kTensorOnDevice; }), HasSubstr("not mappable"));
  EXPECT_THAT(with([](auto& t) { t.region = 3; }), HasSubstr("no region 3"));
  EXPECT_THAT(with([](auto& t) { t.region_offset = UINT64_MAX; }), HasSubstr("tensor 1: bytes"));
  EXPECT_THAT(with([](auto& t) { t.nbytes = 16385; }), HasSubstr("of a region that has 16384"));
  EXPECT_THAT(with([](auto& t) { t.device_offset = 8192; }), HasSubstr("offset 8192 of segment"));
  EXPECT_THAT(with([](auto& t) { t.device_offset = UINT64_MAX - 511; }), HasSubstr("of segment"));
  EXPECT_THAT(with([](auto& t) { t.device_offset += 1; }), HasSubstr("of segment"));
  EXPECT_THAT(with([](auto& t) { t.device_offset = 512; }), HasSubstr("lie on others"));
}

TEST_F(PlanOfIndexTest, OneTensorHasOnePlace) {
  index_.tensors.push_back(index_.tensors[0]);
  index_.tensors.back().device_offset += 512;
  index_.tensors.back().device_segment = 0;
  EXPECT_THAT(Refused(), HasSubstr("have two places"));
}

TEST_F(PlanOfIndexTest, SegmentsThatMakeNoSenseAreRefused) {
  const RawIndex good = index_;
  index_.segments[1].region = 9;
  EXPECT_THAT(Refused(), HasSubstr("segment 1 is of region 9"));
  index_ = good;
  index_.segments[1].bytes = 0;
  EXPECT_THAT(Refused(), HasSubstr("segment 1"));
  index_ = good;
  std::swap(index_.segments[0], index_.segments[2]);
  EXPECT_THAT(Refused(), HasSubstr("not in the order of regions"));
  index_ = good;
  index_.segments.push_back({4096, 2, 0});
  EXPECT_THAT(Refused(), HasSubstr("segment 3 holds no tensor"));
}

TEST_F(PlanOfIndexTest, ACutIndexIsRefusedAtEveryLength) {
  const std::vector<std::byte> bytes = index_.Bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(PlanOfIndex(std::span(bytes).first(size)).ok()) << size;
  }
}

TEST_F(DevicePlanTest, AHundredThousandTensorsComeBack) {
  std::vector<TestTensor> tensors;
  for (uint64_t i = 0; i < 100'000; ++i) {
    tensors.push_back({absl::StrCat("layer.", i), 0, i * 1000, 1000});
  }
  std::shuffle(tensors.begin(), tensors.end(), std::mt19937(1));
  components_.push_back(Component({"a"}, tensors));
  limits_.max_segment_bytes = 8 * kMiB;
  const DevicePlan plan = Plan({true, "", {"layer\\.[0-9]+"}});
  ASSERT_EQ(plan.parts.at(0).ranges.size(), 100'000U);
  const auto read = PlanOfIndex(IndexOf(plan, 3, 200'000'000).Bytes());
  ASSERT_TRUE(read.ok()) << read.status();
  ExpectSame(*read, plan);
  for (const TestTensor& each : tensors) {
    ASSERT_TRUE(read->Find(1, {each.offset, each.bytes}).has_value());
  }
}

}  // namespace
}  // namespace modelhost
