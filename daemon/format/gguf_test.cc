#include "daemon/format/gguf.h"

#include <bit>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/abi/dtype.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using testing::GgufBuilder;
using ::testing::HasSubstr;
using testing::Le;
using testing::MemoryFiles;

constexpr uint32_t kF32 = 0;
constexpr uint32_t kF16 = 1;

absl::StatusOr<TensorIndex> ReadGguf(std::string bytes) {
  MemoryFiles files({{"m.gguf", std::move(bytes)}});
  return ReadModel("m.gguf", files);
}

std::string GgufRefusal(const absl::StatusOr<TensorIndex>& index) {
  if (index.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(index.status()) || absl::IsUnimplemented(index.status()))
      << index.status();
  EXPECT_THAT(std::string(index.status().message()), HasSubstr(".gguf: "));
  return std::string(index.status().message());
}

std::string RefusalOf(const GgufBuilder& file) { return GgufRefusal(ReadGguf(file.Build())); }

std::string GgufMetadata(const TensorIndex& index, std::string_view key) {
  for (const MetadataItem& item : index.metadata()) {
    if (item.key == key) return item.value;
  }
  return "absent";
}

TEST(GgufTest, IndexesBothVersionsWithShapesOutermostFirst) {
  for (const uint32_t version : {2u, 3u}) {
    GgufBuilder file;
    file.version = version;
    file.KeyText("general.name", "x").Tensor("a", {3, 5}, kF32, 60).Tensor("b", {4}, kF16, 8);
    auto index = ReadGguf(file.Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->format(), "gguf");
    EXPECT_THAT(index->files(), ElementsAre("m.gguf"));
    ASSERT_EQ(index->size(), 2u);
    EXPECT_EQ(index->at(0).name, "a");
    EXPECT_THAT(index->at(0).shape, ElementsAre(5, 3));
    EXPECT_EQ(index->at(0).nbytes, 60u);
    EXPECT_EQ(index->at(0).offset % 32, 0u);
    EXPECT_EQ(index->at(1).offset, index->at(0).offset + 64);
    EXPECT_EQ(index->at(1).dtype, abi::DType::kF16);
  }
}

TEST(GgufTest, KnowsEveryTypeThatTheFormatHas) {
  for (uint32_t id = 0; id < 64; ++id) {
    const bool removed = id == 4 || id == 5 || (id >= 31 && id <= 33) || (id >= 36 && id <= 38);
    const abi::DTypeInfo* info = abi::FindDType(static_cast<abi::DType>(0x100 + id));
    uint64_t bytes = info == nullptr ? 0 : 512 / info->block_elements * info->block_bytes;
    for (const auto& [plain, size] : std::vector<std::pair<uint32_t, uint64_t>>{
             {0, 4}, {1, 2}, {24, 1}, {25, 2}, {26, 4}, {27, 8}, {28, 8}, {30, 2}}) {
      if (id == plain) bytes = 512 * size;
    }
    GgufBuilder file;
    file.Tensor("t", {256, 2}, id, bytes);
    auto index = ReadGguf(file.Build());
    if (removed) {
      EXPECT_THAT(GgufRefusal(index), HasSubstr(absl::StrCat("type ", id, ", which was removed")));
    } else if (id > 42) {
      EXPECT_THAT(GgufRefusal(index), HasSubstr(absl::StrCat("unknown type ", id)));
    } else {
      ASSERT_TRUE(index.ok()) << id << " " << index.status();
      EXPECT_EQ(index->at(0).nbytes, bytes) << id;
      EXPECT_NE(abi::DTypeName(index->at(0).dtype), "INVALID") << id;
    }
  }
  for (const uint32_t id : {0xffffffffu, 0x102u, 0x1000002u, 256u}) {
    GgufBuilder file;
    file.Tensor("t", {256}, id, 0);
    EXPECT_THAT(RefusalOf(file), HasSubstr("unknown type")) << id;
  }
}

TEST(GgufTest, BlockTypesNeedWholeBlocksInARow) {
  GgufBuilder rows;
  rows.Tensor("t", {128, 2}, 12, 144);  // 256 elements, but the rows are half a block.
  EXPECT_THAT(RefusalOf(rows), HasSubstr("Q4_K"));
  GgufBuilder scalar;
  scalar.Tensor("t", {}, 2, 18);
  EXPECT_THAT(RefusalOf(scalar), HasSubstr("Q4_0"));
}

TEST(GgufTest, AcceptsWhatTheFormatAllows) {
  GgufBuilder file;
  file.Tensor("scalar", {}, kF32, 4)
      .Tensor("empty", {0, 4}, kF32, 0)
      .Tensor("", {4}, kF32, 16)
      .Tensor(std::string(63, 'n'), {1, 1, 1, 2}, kF32, 8)
      .Tensor("\xd1\x8f \n", {1}, kF32, 4);
  file.last_padding = false;
  auto index = ReadGguf(file.Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_TRUE(index->at(0).shape.empty());
  EXPECT_EQ(index->at(0).nbytes, 4u);
  EXPECT_THAT(index->at(1).shape, ElementsAre(4, 0));
  EXPECT_EQ(index->at(1).nbytes, 0u);
  EXPECT_THAT(index->at(3).shape, ElementsAre(2, 1, 1, 1));
  EXPECT_TRUE(ReadGguf(file.Build() + "trailing bytes").ok());
  EXPECT_TRUE(ReadGguf(GgufBuilder().KeyText("a", "b").Build()).ok());
  EXPECT_TRUE(ReadGguf(GgufBuilder().Build()).ok());
}

TEST(GgufTest, ADimensionOfZeroMakesATensorEmptyWhateverTheOthersAre) {
  for (const std::vector<uint64_t>& dims : std::vector<std::vector<uint64_t>>{
           {0, uint64_t{1} << 62, uint64_t{1} << 62}, {uint64_t{1} << 62, uint64_t{1} << 62, 0}}) {
    auto index = ReadGguf(GgufBuilder().Tensor("t", dims, kF32, 0).Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->at(0).nbytes, 0u);
  }
}

TEST(GgufTest, AlignmentMayBeAnyPowerOfTwo) {
  for (const uint32_t alignment : {1u, 2u, 4u, 8u, 16u, 64u, 4096u}) {
    GgufBuilder file;
    file.alignment = alignment;
    file.KeyU32("general.alignment", alignment).Tensor("a", {3}, 24, 3).Tensor("b", {3}, 24, 3);
    auto index = ReadGguf(file.Build());
    ASSERT_TRUE(index.ok()) << alignment << " " << index.status();
    EXPECT_EQ(index->at(1).offset % alignment, 0u);
    EXPECT_LT(index->at(1).offset - index->at(0).offset, alignment + 3);
  }
  for (const uint32_t alignment : {0u, 3u, 33u, 0xffffffffu}) {
    EXPECT_THAT(RefusalOf(GgufBuilder().KeyU32("general.alignment", alignment)),
                HasSubstr("general.alignment"))
        << alignment;
  }
  EXPECT_THAT(RefusalOf(GgufBuilder().Key("general.alignment", 10, Le<uint64_t>(32))),
              HasSubstr("general.alignment"));
  EXPECT_THAT(RefusalOf(GgufBuilder().KeyText("general.alignment", "32")),
              HasSubstr("general.alignment"));
  EXPECT_THAT(RefusalOf(GgufBuilder().Key("general.alignment", 9, Le(4u) + Le<uint64_t>(0))),
              HasSubstr("general.alignment"));
  // The data section would start far behind the end of the file.
  GgufBuilder far;
  far.KeyU32("general.alignment", 1u << 31).Tensor("a", {0}, kF32, 0);
  EXPECT_NE(RefusalOf(far), "accepted");
}

TEST(GgufTest, MetadataIsTextAndLongArraysAreOnlyCounted) {
  GgufBuilder file;
  file.Key("u8", 0, Le<uint8_t>(200))
      .Key("i8", 1, Le<int8_t>(-5))
      .Key("u16", 2, Le<uint16_t>(65535))
      .Key("i16", 3, Le<int16_t>(-1))
      .KeyU32("u32", 4000000000u)
      .Key("i32", 5, Le<int32_t>(-7))
      .Key("f32", 6, Le(std::bit_cast<uint32_t>(1e-12f)))
      .Key("nan", 6, Le(0x7fc00000u))
      .Key("bool", 7, Le<uint8_t>(1))
      .KeyText("text", "a\"b\n")
      .KeyText("bad",
               "a\xff"
               "b")
      .Key("u64", 10, Le<uint64_t>(UINT64_MAX))
      .Key("i64", 11, Le<int64_t>(INT64_MIN))
      .Key("f64", 12, Le(std::bit_cast<uint64_t>(0.1)))
      .Key("words", 9, Le(8u) + Le<uint64_t>(2) + GgufBuilder::Text("x\"") + GgufBuilder::Text(""))
      .Key("floats", 9, Le(6u) + Le<uint64_t>(2) + Le(0x7f800000u) + Le(0x3f000000u))
      .Key("none", 9, Le(8u) + Le<uint64_t>(0));
  std::string vocabulary = Le(8u) + Le<uint64_t>(65);
  for (int i = 0; i < 65; ++i) vocabulary += GgufBuilder::Text("token");
  file.Key("vocabulary", 9, vocabulary)
      .Key("scores", 9, Le(6u) + Le<uint64_t>(1000) + std::string(4000, '\0'));
  auto index = ReadGguf(file.Build());
  ASSERT_TRUE(index.ok()) << index.status();
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"u8", "200"},
           {"i8", "-5"},
           {"u16", "65535"},
           {"i16", "-1"},
           {"u32", "4000000000"},
           {"i32", "-7"},
           {"f32", "1e-12"},
           {"nan", "NaN"},
           {"bool", "true"},
           {"text", "a\"b\n"},
           {"bad",
            "a\xef\xbf\xbd"
            "b"},
           {"u64", "18446744073709551615"},
           {"i64", "-9223372036854775808"},
           {"f64", "0.1"},
           {"words", "[\"x\\\"\",\"\"]"},
           {"floats", "[\"Infinity\",0.5]"},
           {"none", "[]"},
           {"vocabulary", "{\"type\":\"string\",\"count\":65}"},
           {"scores", "{\"type\":\"f32\",\"count\":1000}"}}) {
    EXPECT_EQ(GgufMetadata(*index, key), value) << key;
  }
}

TEST(GgufTest, KeysThatAreNotUtf8AreLeftOutWithAWarning) {
  auto index = ReadGguf(GgufBuilder().KeyU32("a\xff", 1).KeyU32("b", 2).Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->metadata().size(), 1u);
  EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("'a\\xff'")));
}

TEST(GgufTest, NoArithmeticIsDoneOnOtherMetadata) {
  GgufBuilder file;
  file.KeyU32("llama.block_count", 0).KeyU32("llama.attention.head_count", 0);
  EXPECT_TRUE(ReadGguf(file.Tensor("w", {4}, kF32, 16).Build()).ok());
}

TEST(GgufTest, RefusesBadMetadata) {
  EXPECT_THAT(RefusalOf(GgufBuilder().KeyU32("a", 1).KeyU32("b", 1).KeyU32("a", 1)),
              HasSubstr("duplicate key: 'a'"));
  EXPECT_THAT(RefusalOf(GgufBuilder().KeyU32("", 1)), HasSubstr("empty"));
  for (const uint32_t type : {13u, 100u, 0xffffffffu}) {
    EXPECT_THAT(RefusalOf(GgufBuilder().Key("k", type, Le(1u))), HasSubstr("value type")) << type;
    EXPECT_THAT(RefusalOf(GgufBuilder().Key("k", 9, Le(type) + Le<uint64_t>(0))),
                HasSubstr("element type"))
        << type;
  }
  EXPECT_THAT(RefusalOf(GgufBuilder().Key("k", 9, Le(9u) + Le<uint64_t>(0))),
              HasSubstr("array of arrays"));
  for (const uint64_t count :
       {uint64_t{5}, (uint64_t{1} << 30) + 1, uint64_t{1} << 40, uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_THAT(RefusalOf(GgufBuilder().Key("k", 9, Le(4u) + Le(count) + Le(1u))),
                HasSubstr("elements"))
        << count;
    EXPECT_NE(RefusalOf(GgufBuilder().Key("k", 9, Le(8u) + Le(count))), "accepted") << count;
    EXPECT_NE(RefusalOf(GgufBuilder().Key("k", 8, Le(count) + "abc")), "accepted") << count;
  }
}

TEST(GgufTest, RefusesCountsThatTheFileCannotHold) {
  for (const int64_t error : {int64_t{1}, int64_t{1} << 40, int64_t{1} << 62, int64_t{-2}}) {
    GgufBuilder tensors;
    tensors.Tensor("w", {4}, kF32, 16).tensor_count_error = error;
    EXPECT_NE(RefusalOf(tensors), "accepted") << error;
    GgufBuilder keys;
    keys.KeyU32("a", 1).key_count_error = error;
    EXPECT_NE(RefusalOf(keys), "accepted") << error;
  }
}

TEST(GgufTest, RefusesBadTensors) {
  const auto refusal = [](const std::string& name, const std::vector<uint64_t>& dims) {
    GgufBuilder file;
    file.Tensor(name, dims, kF32, 64);
    return RefusalOf(file);
  };
  EXPECT_THAT(refusal(std::string(64, 'n'), {16}), HasSubstr("64 bytes"));
  EXPECT_THAT(refusal(std::string("a\0b", 3), {16}), HasSubstr("NUL"));
  EXPECT_THAT(refusal("a\xff", {16}), HasSubstr("UTF-8"));
  EXPECT_THAT(refusal("t", {1, 1, 1, 1, 16}), HasSubstr("5 dimensions"));
  EXPECT_THAT(refusal("t", {uint64_t{1} << 63}), HasSubstr("negative"));
  EXPECT_THAT(refusal("t", {UINT64_MAX}), HasSubstr("negative"));
  // Products that wrap to 0, to 16 bytes, and to a negative count.
  EXPECT_NE(refusal("t", {uint64_t{1} << 32, uint64_t{1} << 32}), "accepted");
  EXPECT_NE(refusal("t", {1 << 22, 1 << 21, 1 << 21}), "accepted");
  EXPECT_NE(refusal("t", {(uint64_t{1} << 62) + 4}), "accepted");
  EXPECT_NE(refusal("t", {uint64_t{1} << 32, uint64_t{1} << 31}), "accepted");
  EXPECT_NE(refusal("t", {INT64_MAX}), "accepted");
  EXPECT_THAT(refusal("t", {uint64_t{1} << 31, uint64_t{1} << 32}), HasSubstr("63 bits can count"));
}

TEST(GgufTest, NamesMayNotOccurTwice) {
  GgufBuilder file;
  file.Tensor("w", {4}, kF32, 16);
  for (int i = 0; i < 5; ++i) file.Tensor(absl::StrCat("t", i), {4}, kF32, 16);
  EXPECT_TRUE(ReadGguf(file.Build()).ok());
  file.Tensor("w", {4}, kF32, 16);
  EXPECT_THAT(RefusalOf(file), HasSubstr("duplicate tensor name: 'w'"));
}

TEST(GgufTest, OffsetsMustBeTheRunningSum) {
  for (const uint64_t offset : {uint64_t{0}, uint64_t{16}, uint64_t{64}, UINT64_MAX}) {
    GgufBuilder file;
    file.Tensor("a", {4}, kF32, 16).TensorAt("b", {4}, kF32, 16, offset);
    // The layout of the builder would follow a wild offset.
    std::string bytes = file.Build().substr(0, 320);
    bytes.resize(320);
    EXPECT_THAT(GgufRefusal(ReadGguf(bytes)), HasSubstr("'b' starts at data offset")) << offset;
  }
}

TEST(GgufTest, EveryCutOfAGoodFileIsRefused) {
  GgufBuilder file;
  file.KeyText("general.name", "x")
      .Key("k", 9, Le(8u) + Le<uint64_t>(1) + GgufBuilder::Text("y"))
      .Tensor("a", {3, 5}, kF32, 60)
      .Tensor("b", {4}, kF16, 8);
  file.last_padding = false;
  const std::string whole = file.Build();
  ASSERT_TRUE(ReadGguf(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(GgufRefusal(ReadGguf(whole.substr(0, size))), "accepted") << size;
  }
}

TEST(GgufTest, RefusesOtherVersionsAndByteOrdersByName) {
  const auto refusal = [](uint32_t version) {
    GgufBuilder file;
    file.version = version;
    return RefusalOf(file);
  };
  EXPECT_THAT(refusal(0), HasSubstr("version 0"));
  EXPECT_THAT(refusal(1), HasSubstr("version 1"));
  EXPECT_THAT(refusal(4), HasSubstr("version 4"));
  EXPECT_THAT(refusal(3u << 24), HasSubstr("big-endian"));
  EXPECT_THAT(GgufRefusal(ReadGguf("FUGG" + GgufBuilder().Build().substr(4))),
              HasSubstr("big-endian"));
  EXPECT_NE(GgufRefusal(ReadGguf("NOPE" + GgufBuilder().Build().substr(4))), "accepted");
}

// --- Sets of files.

class GgufSetTest : public ::testing::Test {
 protected:
  static std::string Name(int part, int count = 3) {
    return FormatGgufSetName({"m", static_cast<uint64_t>(part), static_cast<uint64_t>(count)});
  }
  // The first part has metadata alone, the others a tensor each.
  GgufSetTest() {
    files_.Put(Name(1), GgufBuilder().KeyText("general.name", "x").Split(0, 3, 2).Build());
    files_.Put(Name(2), Part(1, "a").Build());
    files_.Put(Name(3), Part(2, "b").Build());
  }
  static GgufBuilder Part(uint16_t number, const std::string& tensor) {
    GgufBuilder file;
    file.Split(number, 3, 2).Tensor(tensor, {4}, kF32, 16);
    return file;
  }
  std::string RefusalAt(int part = 1) { return GgufRefusal(ReadModel(Name(part), files_)); }

  MemoryFiles files_;
};

TEST_F(GgufSetTest, FirstFileStandsForTheSet) {
  auto index = ReadModel(Name(1), files_);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files(), ElementsAre(Name(1), Name(2), Name(3)));
  ASSERT_EQ(index->size(), 2u);
  EXPECT_EQ(index->at(0).name, "a");
  EXPECT_EQ(index->at(0).file, 1u);
  EXPECT_EQ(index->at(1).file, 2u);
  EXPECT_EQ(GgufMetadata(*index, "general.name"), "x");
}

TEST_F(GgufSetTest, AnyOtherFileStandsForTheSetToo) {
  auto index = ReadModel(Name(3), files_);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files(), ElementsAre(Name(3), Name(1), Name(2)));
  EXPECT_EQ(index->at(0).name, "a");
  EXPECT_EQ(index->at(0).file, 2u);
  EXPECT_EQ(index->at(1).file, 0u);
  EXPECT_EQ(GgufMetadata(*index, "general.name"), "x");
}

TEST_F(GgufSetTest, WorksInASubfolder) {
  MemoryFiles files;
  for (const std::string& name : files_.Names()) {
    const auto bytes = *files_.Open(name);
    files.Put("sub/" + name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  auto index = ReadModel("sub/" + Name(1), files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->size(), 2u);
}

TEST_F(GgufSetTest, LaterPartsNeedTheirNumberOnly) {
  GgufBuilder part;
  part.Key("split.no", 2, Le<uint16_t>(1)).Tensor("a", {4}, kF32, 16);
  files_.Put(Name(2), part.Build());
  EXPECT_TRUE(ReadModel(Name(1), files_).ok());
}

TEST_F(GgufSetTest, ASetOfOneIsASingleFile) {
  MemoryFiles files({{"m.gguf", GgufBuilder().Split(0, 1, 1).Tensor("a", {4}, 0, 16).Build()}});
  EXPECT_TRUE(ReadModel("m.gguf", files).ok());
}

TEST_F(GgufSetTest, MissingPartsAreListed) {
  MemoryFiles only;
  only.Put(Name(1), GgufBuilder().Split(0, 3, 2).Build());
  EXPECT_THAT(GgufRefusal(ReadModel(Name(1), only)),
              ::testing::AllOf(HasSubstr(Name(2)), HasSubstr(Name(3))));
  MemoryFiles second;
  second.Put(Name(2), Part(1, "a").Build());
  EXPECT_THAT(GgufRefusal(ReadModel(Name(2), second)), HasSubstr(Name(1)));
  // A part that says its number only is a part all the same.
  GgufBuilder numbered;
  numbered.Key("split.no", 2, Le<uint16_t>(1)).Tensor("a", {4}, kF32, 16);
  second.Put(Name(2), numbered.Build());
  EXPECT_THAT(GgufRefusal(ReadModel(Name(2), second)), HasSubstr(Name(1)));
}

TEST_F(GgufSetTest, RefusesPartsThatDoNotFitTogether) {
  files_.Put(Name(3), Part(1, "b").Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("split.no is 1"));
  files_.Put(Name(3), Part(2, "a").Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("duplicate tensor name: 'a'"));
  files_.Put(Name(3), GgufBuilder().Split(2, 4, 2).Tensor("b", {4}, kF32, 16).Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("split.count is 4"));
  files_.Put(Name(3), GgufBuilder().Split(2, 3, 7).Tensor("b", {4}, kF32, 16).Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("split.tensors.count is 7"));
  files_.Put(Name(3), GgufBuilder().Tensor("b", {4}, kF32, 16).Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("no split.no"));
  files_.Put(Name(3), Part(2, "b").Tensor("c", {4}, kF32, 16).Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("have 3 tensors"));
  files_.Put(Name(3), Part(2, "b").Build().substr(0, 150));
  EXPECT_THAT(RefusalAt(), HasSubstr(Name(3)));
  files_.Put(Name(3), "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_THAT(RefusalAt(), HasSubstr("Git LFS"));
  files_.Put(Name(3), testing::SmallSafetensors({"b"}));
  EXPECT_THAT(RefusalAt(), HasSubstr(Name(3)));
}

TEST_F(GgufSetTest, TheFirstFileMustSayHowManyTensorsThereAre) {
  GgufBuilder first;
  first.Key("split.no", 2, Le<uint16_t>(0)).Key("split.count", 2, Le<uint16_t>(3));
  files_.Put(Name(1), first.Build());
  EXPECT_THAT(RefusalAt(), HasSubstr("split.tensors.count"));
}

TEST_F(GgufSetTest, TheNameMustSayTheSame) {
  MemoryFiles renamed;
  renamed.Put("m.gguf", GgufBuilder().Split(0, 3, 2).Build());
  EXPECT_THAT(GgufRefusal(ReadModel("m.gguf", renamed)), HasSubstr("part of a set of 3 files"));
  renamed.Put(Name(2), GgufBuilder().Split(0, 3, 2).Build());
  EXPECT_THAT(GgufRefusal(ReadModel(Name(2), renamed)), HasSubstr("is part 1 of 3"));
  renamed.Put(Name(1, 4), GgufBuilder().Split(0, 3, 2).Build());
  EXPECT_THAT(GgufRefusal(ReadModel(Name(1, 4), renamed)), HasSubstr("is named part 1 of 4"));
}

TEST_F(GgufSetTest, SplitKeysMustBeCounts) {
  EXPECT_THAT(GgufRefusal(ReadGguf(GgufBuilder().KeyText("split.count", "3").Build())),
              HasSubstr("split.count"));
  EXPECT_THAT(GgufRefusal(ReadGguf(GgufBuilder().Key("split.no", 5, Le<int32_t>(-1)).Build())),
              HasSubstr("split.no"));
}

TEST(GgufSetNameTest, TakesNamesApart) {
  const auto set = ParseGgufSetName("a/b-00002-of-00003.gguf");
  ASSERT_TRUE(set.has_value());
  EXPECT_EQ(set->prefix, "a/b");
  EXPECT_EQ(set->part, 2u);
  EXPECT_EQ(set->count, 3u);
  EXPECT_EQ(FormatGgufSetName(*set), "a/b-00002-of-00003.gguf");
  for (const char* other :
       {"m.gguf", "-00001-of-00002.gguf", "m-0001-of-0002.gguf", "m-00003-of-00002.gguf",
        "m-00000-of-00002.gguf", "m-00001-of-00002.safetensors", "m-00001-of-0000x.gguf",
        "m-+0001-of-00002.gguf", "m-00001_of_00002.gguf", ""}) {
    EXPECT_FALSE(ParseGgufSetName(other).has_value()) << other;
  }
}

}  // namespace
}  // namespace modelhost
