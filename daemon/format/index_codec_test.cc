#include "daemon/format/index_codec.h"

#include <string>
#include <vector>

#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using testing::MemoryFiles;

std::span<const std::byte> EncodedBytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

IndexRequest Asked() { return {.files = {{"a.safetensors", 100}, {"b.gguf", 50}}}; }

constexpr int64_t kTen[] = {10};

TensorInfo Good() {
  TensorInfo tensor;
  tensor.shape = kTen;
  tensor.name = "w";
  tensor.dtype = abi::DType::kF32;
  tensor.offset = 10;
  tensor.nbytes = 40;
  return tensor;
}

std::string Answer(const TensorInfo& tensor, const std::string& file = "a.safetensors") {
  std::vector<ComponentIndex> components;
  components.push_back({"a", TensorIndex("safetensors")});
  components[0].index.AddFile(file);
  components[0].index.Add(tensor);
  return EncodeIndexes(std::move(components));
}

absl::Status ReadEncoded(const std::string& answer) {
  return DecodeIndexes(EncodedBytes(answer), Asked()).status();
}

TEST(IndexCodecTest, ARequestComesBackAsItWas) {
  const auto back = DecodeIndexRequest(EncodedBytes(EncodeIndexRequest(Asked())));
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->files.size(), 2U);
  EXPECT_EQ(back->files[1].name, "b.gguf");
  EXPECT_EQ(back->files[1].bytes, 50U);
}

TEST(IndexCodecTest, IndexesComeBackAsTheyWere) {
  std::vector<ComponentIndex> components;
  components.push_back({"first", TensorIndex("torch")});
  TensorIndex& index = components[0].index;
  index.AddFile("b.gguf");
  index.AddFile("a.safetensors");
  const std::vector<int64_t> shape = {2, 3};
  const std::vector<int64_t> strides = {1, 2};
  TensorInfo tensor = Good();
  tensor.shape = shape;
  tensor.strides = strides;
  tensor.nbytes = 24;
  tensor.file = 1;
  index.Add(tensor);
  TensorInfo other = Good();
  other.name = "typed";
  other.mappable = false;
  other.reason = "its values are varints";
  index.Add(other);
  index.AddMetadata("k", "v");
  index.AddWarning("careful");
  components.push_back({"second", TensorIndex("gguf")});
  components[1].index.AddFile("b.gguf");

  const auto back = DecodeIndexes(EncodedBytes(EncodeIndexes(std::move(components))), Asked());
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->size(), 2U);
  EXPECT_EQ((*back)[0].name, "first");
  const TensorIndex& got = (*back)[0].index;
  EXPECT_EQ(got.format(), "torch");
  EXPECT_THAT(got.files(), ::testing::ElementsAre("b.gguf", "a.safetensors"));
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(got.at(0).name, "w");
  EXPECT_EQ(got.at(0).dtype, abi::DType::kF32);
  EXPECT_EQ(got.at(0).file, 1U);
  EXPECT_EQ(got.at(0).offset, 10U);
  EXPECT_EQ(got.at(0).nbytes, 24U);
  EXPECT_THAT(got.at(0).shape, ::testing::ElementsAre(2, 3));
  EXPECT_THAT(got.at(0).strides, ::testing::ElementsAre(1, 2));
  EXPECT_FALSE(got.at(1).mappable);
  EXPECT_EQ(got.at(1).reason, "its values are varints");
  EXPECT_EQ(got.metadata().at(0).value, "v");
  EXPECT_EQ(got.warnings().at(0), "careful");
  EXPECT_EQ((*back)[1].index.size(), 0U);
}

TEST(IndexCodecTest, ARefusalKeepsItsCodeAndText) {
  const absl::Status refused = absl::UnimplementedError("m.pt: a legacy pickle");
  EXPECT_EQ(ReadEncoded(EncodeIndexes(refused)), refused);
}

TEST(IndexCodecTest, ARefusalIsOneThatReadersGive) {
  // Cancelled would be tried again for ever; the others are not about files.
  for (const absl::Status& status :
       {absl::CancelledError("x"), absl::AbortedError("x"), absl::ResourceExhaustedError("x"),
        absl::DataLossError("x"), absl::Status(static_cast<absl::StatusCode>(77), "x"),
        absl::InvalidArgumentError(""), absl::InvalidArgumentError(std::string(9000, 'x'))}) {
    EXPECT_TRUE(absl::IsInternal(ReadEncoded(EncodeIndexes(status)))) << status;
  }
}

TEST(IndexCodecTest, ComponentsAreOfFilesAndOfKnownFormats) {
  const auto read = [](const char* format, int files, int components) {
    std::vector<ComponentIndex> all;
    for (int i = 0; i < components; ++i) {
      all.push_back({"c", TensorIndex(format)});
      for (int j = 0; j < files; ++j) all.back().index.AddFile("b.gguf");
    }
    return ReadEncoded(EncodeIndexes(std::move(all)));
  };
  EXPECT_TRUE(read("gguf", 1, 2).ok());
  EXPECT_TRUE(absl::IsInternal(read("gguf", 0, 1)));
  EXPECT_TRUE(absl::IsInternal(read("gguf", 3, 1)));
  EXPECT_TRUE(absl::IsInternal(read("gguf", 1, 3)));
  EXPECT_TRUE(absl::IsInternal(read("pickle", 1, 1)));
}

TEST(IndexCodecTest, WhatNoGoodIndexerSaysIsAnError) {
  EXPECT_TRUE(ReadEncoded(Answer(Good())).ok());
  const auto refused = [](const TensorInfo& tensor, const std::string& why) {
    const absl::Status status = ReadEncoded(Answer(tensor));
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  TensorInfo tensor = Good();
  tensor.nbytes = 91;
  refused(tensor, "leaves its file");
  tensor = Good();
  tensor.offset = UINT64_MAX;
  refused(tensor, "leaves its file");
  tensor = Good();
  tensor.file = 1;
  refused(tensor, "file number");
  tensor = Good();
  tensor.dtype = static_cast<abi::DType>(0x7777);
  refused(tensor, "unknown type");
  tensor = Good();
  tensor.nbytes = 39;
  refused(tensor, "does not fit");
  tensor.nbytes = 44;
  refused(tensor, "does not fit");
  tensor = Good();
  constexpr int64_t kTwo[] = {2};
  tensor.strides = kTwo;  // Reaches to the 19th element.
  refused(tensor, "does not fit");
  constexpr int64_t kMinus[] = {-1};
  tensor.strides = kMinus;
  refused(tensor, "does not fit");
  tensor = Good();
  constexpr int64_t kHuge[] = {INT64_MAX, 4};
  tensor.shape = kHuge;
  refused(tensor, "does not fit");
  tensor = Good();
  tensor.dtype = abi::DType::kQ8_0;  // 10 elements are no whole block.
  refused(tensor, "does not fit");
  tensor.dtype = abi::DType::kString;
  refused(tensor, "does not fit");
  tensor = Good();
  tensor.name = "\xff";
  refused(tensor, "UTF-8");
  tensor = Good();
  tensor.name = std::string_view("a\0b", 3);
  refused(tensor, "NUL");
  tensor = Good();
  tensor.mappable = false;
  refused(tensor, "reason");
  EXPECT_THAT(std::string(ReadEncoded(Answer(Good(), "/etc/passwd")).message()),
              HasSubstr("was not asked about"));
}

TEST(IndexCodecTest, EveryCutAndEveryTailIsAnError) {
  const std::string answer = Answer(Good());
  for (size_t size = 0; size < answer.size(); ++size) {
    EXPECT_TRUE(absl::IsInternal(ReadEncoded(answer.substr(0, size)))) << size;
  }
  EXPECT_TRUE(absl::IsInternal(ReadEncoded(answer + "x")));
  const std::string request = EncodeIndexRequest(Asked());
  for (size_t size = 0; size < request.size(); ++size) {
    EXPECT_FALSE(DecodeIndexRequest(EncodedBytes(request.substr(0, size))).ok()) << size;
  }
}

TEST(IndexCodecTest, HugeCountsAreRefusedBeforeAnythingIsMade) {
  // Magic and status, then a count.
  const std::string start = EncodeIndexes(std::vector<ComponentIndex>()).substr(0, 12);
  EXPECT_THAT(std::string(ReadEncoded(start + "\xff\xff\xff\xff").message()),
              HasSubstr("do not fit"));
}

}  // namespace
}  // namespace modelhost
