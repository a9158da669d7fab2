// Look-ups in sound and in broken indexes.
#include "client/src/index_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "client/src/near_names.h"
#include "client/src/testing/fake_version.h"

namespace modelhost {
namespace {

using testing::BuildIndex;
using testing::FakeTensor;
using testing::FakeVersion;
using ::testing::HasSubstr;
using testing::MakeVersion;

// Bytes at a multiple of 8, as a mapping has them.
class Aligned {
 public:
  explicit Aligned(const std::string& bytes) : words_((bytes.size() + 7) / 8), size_(bytes.size()) {
    if (!bytes.empty()) std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  std::span<const std::byte> bytes() const {
    return {reinterpret_cast<const std::byte*>(words_.data()), size_};
  }
  template <typename T>
  T& At(uint64_t offset) {
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(words_.data()) + offset);
  }
  abi::IndexHeader& header() { return At<abi::IndexHeader>(0); }
  abi::TensorEntry& tensor(size_t i) {
    return At<abi::TensorEntry>(header().tensors.offset + i * sizeof(abi::TensorEntry));
  }

 private:
  std::vector<uint64_t> words_;
  size_t size_;
};

IndexReader Opened(const Aligned& index) {
  auto reader = IndexReader::Open(index.bytes());
  EXPECT_TRUE(reader.ok()) << reader.error().text;
  return *reader;
}

TEST(IndexReader, FindsEveryTensorFileAndKey) {
  const Aligned index(BuildIndex(MakeVersion("m", 1, 500, 4, 1, 7)));
  const IndexReader reader = Opened(index);
  for (int i = 0; i < 500; ++i) {
    size_t number = 0;
    const std::string name = "tensor." + std::to_string(i);
    ASSERT_EQ(reader.FindTensor(name, &number), Find::kFound);
    IndexTensor tensor;
    ASSERT_TRUE(reader.Tensor(number, &tensor));
    EXPECT_EQ(tensor.name, name);
    EXPECT_EQ(tensor.name.data()[tensor.name.size()], '\0');
  }
  size_t number = 0;
  EXPECT_EQ(reader.FindFile("tokenizer.json", &number), Find::kFound);
  EXPECT_EQ(number, 7U);
  EXPECT_EQ(reader.FindFile("tokenizer", &number), Find::kMissing);
  EXPECT_EQ(reader.FindMetadata("note", &number), Find::kFound);
  EXPECT_EQ(reader.format(), "safetensors");
}

TEST(IndexReader, AnEmptyVersionHasNothing) {
  FakeVersion version;
  version.model = "empty";
  const Aligned index(BuildIndex(version));
  const IndexReader reader = Opened(index);
  size_t number = 0;
  EXPECT_EQ(reader.FindTensor("a", &number), Find::kMissing);
  EXPECT_EQ(reader.FindTensor("", &number), Find::kMissing);
  EXPECT_EQ(reader.FindFile("a", &number), Find::kMissing);
}

TEST(IndexReader, RefusesWhatIsNoIndex) {
  const std::string good = BuildIndex(MakeVersion("m", 1, 3, 4, 1));
  for (const size_t size : {size_t{0}, size_t{8}, size_t{511}, size_t{512}, good.size() - 8}) {
    const Aligned cut(good.substr(0, size));
    EXPECT_FALSE(IndexReader::Open(cut.bytes()).ok()) << size;
  }
  Aligned other(good);
  other.header().abi_version = 2;
  const auto opened = IndexReader::Open(other.bytes());
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().code, Code::kUnimplemented);
  EXPECT_THAT(opened.error().text, HasSubstr("ABI 2, this library reads 1"));
}

struct Damage {
  const char* what;
  void (*apply)(Aligned&);
};

class DamagedTensor : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedTensor, IsBrokenAndNotFollowed) {
  Aligned index(BuildIndex(MakeVersion("m", 1, 3, 4, 1)));
  GetParam().apply(index);
  const IndexReader reader = Opened(index);
  IndexTensor tensor;
  EXPECT_FALSE(reader.Tensor(0, &tensor));
  EXPECT_TRUE(reader.Tensor(1, &tensor)) << "the others are sound";
}

INSTANTIATE_TEST_SUITE_P(
    All, DamagedTensor,
    ::testing::Values(
        Damage{"name", [](Aligned& i) { i.tensor(0).name.offset = 0xfffffff0U; }},
        Damage{"name_length", [](Aligned& i) { i.tensor(0).name.length = 0xffffffffU; }},
        Damage{"name_end", [](Aligned& i) { i.tensor(0).name.length -= 1; }},
        Damage{"reason",
               [](Aligned& i) {
                 i.tensor(0).reason = {1U << 30, 4};
               }},
        Damage{"region", [](Aligned& i) { i.tensor(0).region = 99; }},
        Damage{"file", [](Aligned& i) { i.tensor(0).file = 99; }},
        Damage{"component", [](Aligned& i) { i.tensor(0).component = 99; }},
        Damage{"shape", [](Aligned& i) { i.tensor(0).shape = 0xffffffffU; }},
        Damage{"rank", [](Aligned& i) { i.tensor(0).rank = 5000; }},
        Damage{"rank_past_dims", [](Aligned& i) { i.tensor(0).rank = 4; }},
        Damage{"strides",
               [](Aligned& i) {
                 i.tensor(0).flags |= abi::kTensorStrided;
                 i.tensor(0).strides = 1000;
               }},
        Damage{"offset", [](Aligned& i) { i.tensor(0).region_offset = ~uint64_t{0} - 3; }},
        Damage{"nbytes", [](Aligned& i) { i.tensor(0).nbytes = 1 << 20; }},
        Damage{"shape_past_bytes", [](Aligned& i) { i.tensor(0).nbytes = 15; }},
        Damage{"wider_dtype",
               [](Aligned& i) { i.tensor(0).dtype = static_cast<uint16_t>(abi::DType::kF64); }},
        Damage{"huge_shape", [](Aligned& i) { i.At<int64_t>(i.header().dims.offset) = INT64_MAX; }},
        Damage{"negative_shape", [](Aligned& i) { i.At<int64_t>(i.header().dims.offset) = -1; }}),
    [](const auto& each) { return each.param.what; });

class DamagedPlace : public ::testing::TestWithParam<Damage> {};

TEST_P(DamagedPlace, IsBrokenAndNotFollowed) {
  FakeVersion version = MakeVersion("m", 1, 3, 4, 1, 2);
  PutOnDevice(version, 4096);
  Aligned index(BuildIndex(version));
  IndexTensor tensor;
  EXPECT_TRUE(Opened(index).Tensor(0, &tensor));
  EXPECT_EQ(Opened(index).device_segments().size(), 2U);
  GetParam().apply(index);
  const IndexReader reader = Opened(index);
  EXPECT_FALSE(reader.Tensor(0, &tensor));
  EXPECT_TRUE(reader.Tensor(1, &tensor)) << "the others are sound";
}

INSTANTIATE_TEST_SUITE_P(
    All, DamagedPlace,
    ::testing::Values(
        Damage{"segment", [](Aligned& i) { i.tensor(0).device_segment = 2; }},
        Damage{"segment_of_another_region", [](Aligned& i) { i.tensor(0).device_segment = 1; }},
        Damage{"offset", [](Aligned& i) { i.tensor(0).device_offset = 4096 - 15; }},
        Damage{"offset_wraps", [](Aligned& i) { i.tensor(0).device_offset = ~uint64_t{0}; }},
        Damage{
            "not_mappable",
            [](Aligned& i) { i.tensor(0).flags &= static_cast<uint8_t>(~abi::kTensorMappable); }}),
    [](const auto& each) { return each.param.what; });

TEST(IndexReader, StridesMayNotReachPastTheRange) {
  FakeVersion version = MakeVersion("m", 1, 1, 6, 1);
  version.tensors[0].shape = {2, 3};
  version.tensors[0].strides = {1, 2};
  IndexTensor tensor;
  const Aligned sound(BuildIndex(version));
  EXPECT_TRUE(Opened(sound).Tensor(0, &tensor));
  version.tensors[0].strides = {3, 2};
  const Aligned outside(BuildIndex(version));
  EXPECT_FALSE(Opened(outside).Tensor(0, &tensor));
  version.tensors[0].strides = {-1, 2};
  const Aligned negative(BuildIndex(version));
  EXPECT_FALSE(Opened(negative).Tensor(0, &tensor));
}

TEST(IndexReader, BlockTypesAreCountedInBlocks) {
  FakeVersion version = MakeVersion("m", 1, 1, 36, 1);  // 144 bytes: one Q4_K block.
  version.tensors[0].dtype = abi::DType::kQ4_K;
  version.tensors[0].shape = {1, 256};
  IndexTensor tensor;
  const Aligned sound(BuildIndex(version));
  EXPECT_TRUE(Opened(sound).Tensor(0, &tensor));
  version.tensors[0].shape = {2, 256};
  const Aligned outside(BuildIndex(version));
  EXPECT_FALSE(Opened(outside).Tensor(0, &tensor));
}

TEST(IndexReader, ATableFullOfEntriesEndsTheSearch) {
  Aligned index(BuildIndex(MakeVersion("m", 1, 3, 4, 1)));
  const uint32_t hash = abi::HashName(index.header().hash_key, "not there");
  for (uint64_t i = 0; i < index.header().buckets.count; ++i) {
    index.At<abi::Bucket>(index.header().buckets.offset + i * sizeof(abi::Bucket)) = {hash, 1};
  }
  size_t number = 0;
  EXPECT_EQ(Opened(index).FindTensor("not there", &number), Find::kMissing);
  const uint64_t first = hash & (index.header().buckets.count - 1);
  index.At<abi::Bucket>(index.header().buckets.offset + first * sizeof(abi::Bucket)).number = 1000;
  EXPECT_EQ(Opened(index).FindTensor("not there", &number), Find::kBroken);
}

TEST(NearNames, NearestFirstAndNeverMoreThanThree) {
  const std::vector<std::string_view> names = {"alpha", "alphb", "alpc",
                                               "alph",  "omega", "alphabet"};
  const auto at = [&](size_t i) { return names[i]; };
  EXPECT_EQ(DidYouMean("alphx", names.size(), 0, at), " (did you mean alph, alpha, alphb?)");
  EXPECT_EQ(DidYouMean("zzzzzz", names.size(), 0, at), "");
  EXPECT_EQ(DidYouMean("", names.size(), 0, at), "");
}

}  // namespace
}  // namespace modelhost
