#include "daemon/region/flat_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/fakes/hand_index.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

HandIndex Sample() {
  HandIndex index;
  std::string("planner").copy(index.header.model, 8);
  index.header.version = 7;
  index.header.digest[0] = 9;
  index.header.format = index.Text("safetensors");
  index.regions.push_back({100, {1}, static_cast<uint32_t>(abi::RegionKind::kSealed), 1});
  index.files.push_back({index.Text("model.safetensors"), index.Text("weights"), 100, {1}, 0, 0});
  index.components.push_back({index.Text("main"), index.Text("safetensors")});
  index.AddMetadata("author", "me");
  index.segments.push_back({64, 0, 0});
  index.Add("a", 0, 60);
  abi::TensorEntry& b = index.Add("b", 60, 40);
  b.flags |= abi::kTensorStrided | abi::kTensorOnDevice;
  b.strides = b.shape;
  b.device_segment = 0;
  b.device_offset = 16;
  return index;
}

absl::Status BrokenTensor(const std::function<void(abi::TensorEntry&)>& breaks) {
  HandIndex index = Sample();
  breaks(index.tensors[1]);
  const std::vector<std::byte> bytes = index.Bytes();
  const auto tables = FlatIndex::Read(bytes);
  EXPECT_TRUE(tables.ok()) << tables.status();
  return tables.ok() ? tables->TensorAt(1).status() : tables.status();
}

TEST(FlatIndex, EveryTableIsReadBack) {
  const auto sealed = Sample().Seal();
  ASSERT_TRUE(sealed.ok());
  const auto tables = FlatIndex::Map(*sealed);
  ASSERT_TRUE(tables.ok()) << tables.status();
  EXPECT_EQ(tables->model(), "planner");
  EXPECT_EQ(tables->version(), 7U);
  EXPECT_EQ(tables->digest()[0], 9);
  EXPECT_EQ(*tables->format(), "safetensors");
  EXPECT_EQ(tables->RegionAt(0).bytes, 100U);
  EXPECT_TRUE(tables->RegionAt(0).sealed);
  EXPECT_TRUE(tables->RegionAt(0).eager);
  EXPECT_EQ(tables->FileAt(0)->path, "model.safetensors");
  EXPECT_EQ(tables->FileAt(0)->role, "weights");
  EXPECT_EQ(tables->ComponentAt(0)->first, "main");
  EXPECT_EQ(tables->MetadataAt(0)->second, "me");
  EXPECT_EQ(tables->SegmentAt(0).bytes, 64U);
  ASSERT_EQ(tables->tensor_count(), 2U);
  const auto a = tables->TensorAt(0);
  EXPECT_EQ(a->name, "a");
  EXPECT_EQ(a->dtype, "U8");
  EXPECT_THAT(a->shape, ElementsAre(60));
  EXPECT_THAT(a->strides, ElementsAre());
  EXPECT_TRUE(a->mappable);
  EXPECT_FALSE(a->on_device);
  const auto b = tables->TensorAt(1);
  EXPECT_EQ(b->offset, 60U);
  EXPECT_EQ(b->nbytes, 40U);
  EXPECT_THAT(b->strides, ElementsAre(40));
  EXPECT_TRUE(b->has_segment);
  EXPECT_EQ(b->segment_offset, 16U);
}

TEST(FlatIndex, BytesThatAreNoIndexAreRefused) {
  std::vector<std::byte> bytes = Sample().Bytes();
  EXPECT_TRUE(absl::IsDataLoss(FlatIndex::Read(std::span(bytes).first(100)).status()));
  EXPECT_TRUE(absl::IsDataLoss(FlatIndex::Read(std::span(bytes).first(bytes.size() - 8)).status()));
  bytes[0] ^= std::byte{1};
  EXPECT_TRUE(absl::IsDataLoss(FlatIndex::Read(bytes).status()));
}

TEST(FlatIndex, NumbersThatLeadOutsideAreErrors) {
  EXPECT_TRUE(BrokenTensor([](abi::TensorEntry&) {}).ok());
  EXPECT_THAT(std::string(BrokenTensor([](auto& entry) { entry.name.length = 9999; }).message()),
              HasSubstr("the text at"));
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.rank = 9; }).ok());
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.strides = 7; }).ok());
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.region = 1; }).ok());
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.nbytes = 41; }).ok());
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.region_offset = UINT64_MAX; }).ok());
  EXPECT_FALSE(BrokenTensor([](auto& entry) { entry.device_segment = 1; }).ok());
  // What is not mappable leads nowhere.
  EXPECT_TRUE(BrokenTensor([](auto& entry) {
                entry.flags = 0;
                entry.region = abi::kNone;
              }).ok());
}

}  // namespace
}  // namespace modelhost
