#include "daemon/format/safetensors.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MemoryFiles;
using testing::Safetensors;
using testing::SmallSafetensors;
using testing::TensorJson;

absl::StatusOr<TensorIndex> ReadSafetensors(std::string bytes) {
  MemoryFiles files;
  files.Put("m.safetensors", std::move(bytes));
  return ReadModel("m.safetensors", files);
}

absl::StatusOr<TensorIndex> ReadHeader(std::string_view header, size_t data_bytes) {
  return ReadSafetensors(Safetensors(header, data_bytes));
}

// The error text of a file that has to be refused; "accepted" otherwise.
std::string Refusal(absl::StatusOr<TensorIndex> index) {
  if (index.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(index.status()) || absl::IsUnimplemented(index.status()))
      << index.status();
  EXPECT_THAT(std::string(index.status().message()), HasSubstr("m.safetensors: "));
  return std::string(index.status().message());
}

std::string SafetensorsRefusal(std::string_view header, size_t data_bytes) {
  return Refusal(ReadHeader(header, data_bytes));
}

TEST(SafetensorsTest, IndexesTensorsAtTheirAbsoluteOffsets) {
  const std::string header = "{\"__metadata__\":{\"format\":\"pt\"}," +
                             TensorJson("w", "BF16", "[2,3]", 4, 16) + "," +
                             TensorJson("b", "F32", "[]", 0, 4) + "}";
  auto index = ReadHeader(header, 16);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "safetensors");
  EXPECT_THAT(index->files(), ElementsAre("m.safetensors"));
  ASSERT_EQ(index->size(), 2u);
  const TensorInfo w = index->at(0);
  EXPECT_EQ(w.name, "w");
  EXPECT_EQ(w.dtype, abi::DType::kBF16);
  EXPECT_THAT(w.shape, ElementsAre(2, 3));
  EXPECT_TRUE(w.strides.empty());
  EXPECT_EQ(w.file, 0u);
  EXPECT_EQ(w.offset, 8 + header.size() + 4);
  EXPECT_EQ(w.nbytes, 12u);
  EXPECT_TRUE(w.mappable);
  EXPECT_EQ(index->at(1).offset, 8 + header.size());
  EXPECT_TRUE(index->at(1).shape.empty());
  ASSERT_EQ(index->metadata().size(), 1u);
  EXPECT_EQ(index->metadata()[0].key, "format");
  EXPECT_EQ(index->metadata()[0].value, "pt");
}

TEST(SafetensorsTest, KnowsEveryDtypeOfTheFormatAndNoOther) {
  struct Row {
    const char* name;
    int bits;
  };
  for (const Row row :
       {Row{"BOOL", 8},     {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
        {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
        {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
        {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
        {"I64", 64},        {"U64", 64}}) {
    const auto bytes = static_cast<size_t>(row.bits);  // Of 8 elements.
    auto index = ReadHeader("{" + TensorJson("t", row.name, "[8]", 0, bytes) + "}", bytes);
    EXPECT_TRUE(index.ok()) << row.name << " " << index.status();
  }
  for (const std::string dtype : {"F128", "f32", "F8_E4M3FN", "Q4_0", "C128", "U4", "I4", "I2",
                                  "STRING", "", "F32 ", "INVALID"}) {
    EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("t", dtype, "[0]", 0, 0) + "}", 0),
                HasSubstr("unknown dtype '" + dtype + "'"));
  }
}

TEST(SafetensorsTest, SubByteTypesCountElementsAndMustFillBytes) {
  EXPECT_TRUE(ReadHeader("{" + TensorJson("t", "F4", "[3,2]", 0, 3) + "}", 3).ok());
  EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("t", "F4", "[3]", 0, 2) + "}", 2),
              HasSubstr("12 bits"));
  EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("t", "F6_E2M3", "[3]", 0, 3) + "}", 3),
              HasSubstr("18 bits"));
  EXPECT_TRUE(ReadHeader("{" + TensorJson("t", "F6_E3M2", "[4]", 0, 3) + "}", 3).ok());
}

TEST(SafetensorsTest, AcceptsWhatTheFormatAllows) {
  const std::string a = TensorJson("a", "U8", "[4]", 0, 4);
  // An empty tensor stands at the running offset, in any number.
  EXPECT_TRUE(ReadHeader("{" + a + "," + TensorJson("e", "F32", "[0,7]", 4, 4) + "," +
                             TensorJson("f", "F64", "[2,0]", 4, 4) + "}",
                         4)
                  .ok());
  EXPECT_TRUE(ReadHeader("{}", 0).ok());
  EXPECT_TRUE(ReadHeader("{} \t\r\n  ", 0).ok());
  EXPECT_TRUE(ReadHeader("{\"__metadata__\":{}," + a + "}", 4).ok());
  EXPECT_TRUE(ReadHeader("{\"__metadata__\":null," + a + "}", 4).ok());
  // Names: empty, any Unicode, escaped newline.
  EXPECT_TRUE(
      ReadSafetensors(SmallSafetensors({"", "\\n", "\\ud83d\\ude00", "\xd1\x8f", "a b"})).ok());
  // The order of the JSON is not that of the data.
  EXPECT_TRUE(ReadHeader("{" + TensorJson("b", "U8", "[1]", 4, 5) + "," + a + "}", 5).ok());
  // Unknown fields of a tensor, of any kind, also escaped known ones.
  EXPECT_TRUE(
      ReadHeader("{\"t\":{\"x\":{\"y\":[1,2.5,null]},\"\\u0064type\":\"\\u00558\",\"shape\":"
                 "[1],\"data_offsets\":[0,1],\"z\":-1e3}}",
                 1)
          .ok());
}

TEST(SafetensorsTest, EmptyTensorsMayHaveHugeOtherDimensions) {
  // 2^63 twice behind a 0: no element, no overflow. The other order overflows before the 0 comes.
  auto index = ReadHeader(
      "{" + TensorJson("t", "U8", "[0,9223372036854775808,9223372036854775808]", 0, 0) + "}", 0);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(static_cast<uint64_t>(index->at(0).shape[1]), uint64_t{1} << 63);
  EXPECT_THAT(
      SafetensorsRefusal(
          "{" + TensorJson("t", "U8", "[9223372036854775808,9223372036854775808,0]", 0, 0) + "}",
          0),
      HasSubstr("does not fit"));
}

TEST(SafetensorsTest, RankIsNotLimited) {
  std::string shape = "[1";
  for (int i = 1; i < 5000; ++i) shape += ",1";
  auto index = ReadHeader("{" + TensorJson("t", "U8", shape + "]", 0, 1) + "}", 1);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->at(0).shape.size(), 5000u);
}

TEST(SafetensorsTest, DataStartsRightBehindAHeaderOfAnyLength) {
  for (size_t spaces = 0; spaces < 8; ++spaces) {
    const std::string header =
        "{" + TensorJson("t", "F32", "[1]", 0, 4) + "}" + std::string(spaces, ' ');
    auto index = ReadHeader(header, 4);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->at(0).offset, 8 + header.size());
  }
}

TEST(SafetensorsTest, RefusesDuplicateKeysHoweverTheyAreWritten) {
  const std::string a = TensorJson("a", "U8", "[4]", 0, 4);
  const std::string same = TensorJson("\\u0061", "U8", "[4]", 0, 4);
  const std::string next = TensorJson("a", "U8", "[4]", 4, 8);
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + next + "}", 8),
              HasSubstr("duplicate key: tensor 'a'"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + a + "}", 4),
              HasSubstr("duplicate key: tensor 'a'"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + same + "}", 4),
              HasSubstr("duplicate key: tensor 'a'"));
  EXPECT_THAT(SafetensorsRefusal("{\"__metadata__\":{},\"__metadata__\":{}}", 0),
              HasSubstr("twice"));
  EXPECT_THAT(SafetensorsRefusal("{\"__metadata__\":{},\"\\u005f_metadata__\":{}}", 0),
              HasSubstr("twice"));
  EXPECT_THAT(SafetensorsRefusal("{\"__metadata__\":{\"k\":\"1\",\"\\u006b\":\"1\"}}", 0),
              HasSubstr("duplicate key"));
  for (const char* field :
       {"\"dtype\":\"U8\"", "\"shape\":[1]", "\"data_offsets\":[0,1]", "\"x\":1"}) {
    const std::string header =
        std::string("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1,") +
        field + "}}";
    EXPECT_THAT(SafetensorsRefusal(header, 1), HasSubstr("twice")) << field;
  }
}

TEST(SafetensorsTest, RefusesOtherSpellings) {
  const std::string a = TensorJson("a", "U8", "[1]", 0, 1);
  ASSERT_TRUE(ReadHeader("{" + a + "}", 1).ok());
  for (const std::string& header : std::vector<std::string>{
           " {" + a + "}", "\n{" + a + "}", "\t{" + a + "}", "\xef\xbb\xbf{" + a + "}",
           "{" + a + ",}", "{" + a + "}{}", "{" + a + "}x", "{" + a + "}" + std::string(1, '\0'),
           "[" + a + "]", "[]", "null", "{" + a, "{a:1}", "{,}"}) {
    EXPECT_NE(SafetensorsRefusal(header, 1), "accepted") << header;
  }
  for (const std::string tensor :
       {"[\"U8\",[1],[0,1]]", "{\"dtype\":{\"U8\":null},\"shape\":[1],\"data_offsets\":[0,1]}",
        "{\"dtype\":[\"U8\"],\"shape\":[1],\"data_offsets\":[0,1]}", "null", "{}", "1", "\"U8\"",
        "{\"dtype\":\"U8\",\"shape\":[1]}", "{\"dtype\":\"U8\",\"data_offsets\":[0,1]}",
        "{\"shape\":[1],\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":null,\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":[[1]],\"data_offsets\":[0,1]}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{\"a\":0,\"b\":1}}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"Data_offsets\":[0,1]}"}) {
    EXPECT_NE(SafetensorsRefusal("{\"t\":" + tensor + "}", 1), "accepted") << tensor;
  }
  for (const std::string metadata :
       {"nul", "\"x\"", "[]", "1", "true", "{\"a\":1}", "{\"a\":null}", "{\"a\":{}}",
        "{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}"}) {
    EXPECT_NE(SafetensorsRefusal("{\"__metadata__\":" + metadata + "," + a + "}", 1), "accepted")
        << metadata;
  }
}

TEST(SafetensorsTest, RefusesNumbersThatAreNotCounts) {
  for (const char* number : {"1.0", "1e0", "-0", "-1", "18446744073709551616", "01", "+1", "\"1\"",
                             "true", "null", "[1]", "0x1"}) {
    const std::string text(number);
    EXPECT_NE(SafetensorsRefusal("{" + TensorJson("t", "U8", "[" + text + "]", 0, 1) + "}", 1),
              "accepted")
        << number;
    EXPECT_NE(SafetensorsRefusal(
                  "{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0," + text + "]}}", 1),
              "accepted")
        << number;
  }
}

TEST(SafetensorsTest, RefusesNamesThatCannotBeCarried) {
  EXPECT_THAT(Refusal(ReadSafetensors(SmallSafetensors({"a\\u0000b"}))), HasSubstr("NUL"));
  EXPECT_NE(Refusal(ReadSafetensors(SmallSafetensors({"\\ud800"}))), "accepted");
  EXPECT_NE(Refusal(ReadSafetensors(SmallSafetensors({"\\udc00\\ud800"}))), "accepted");
  EXPECT_NE(Refusal(ReadSafetensors(SmallSafetensors({"\xff"}))), "accepted");
  EXPECT_NE(Refusal(ReadSafetensors(SmallSafetensors({"a\nb"}))), "accepted");
}

TEST(SafetensorsTest, RangesMustCoverTheDataWithoutHoleOrOverlap) {
  const std::string a = TensorJson("a", "U8", "[4]", 0, 4);
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + TensorJson("b", "U8", "[4]", 5, 9) + "}", 9),
              HasSubstr("hole"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + TensorJson("b", "U8", "[4]", 3, 7) + "}", 7),
              HasSubstr("overlaps"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + TensorJson("b", "U8", "[4]", 0, 4) + "}", 4),
              HasSubstr("overlaps"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "," + TensorJson("b", "U8", "[0]", 2, 2) + "}", 4),
              HasSubstr("overlaps"));
  EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("a", "U8", "[4]", 1, 5) + "}", 5),
              HasSubstr("hole"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "}", 5), HasSubstr("1 bytes belong to no tensor"));
  EXPECT_THAT(SafetensorsRefusal("{" + a + "}", 3), HasSubstr("cut short"));
  EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("a", "U8", "[4]", 4, 0) + "}", 4),
              HasSubstr("before"));
  EXPECT_THAT(SafetensorsRefusal("{" + TensorJson("a", "U8", "[8]", 0, 4) + "}", 4),
              HasSubstr("need 8"));
  EXPECT_NE(SafetensorsRefusal("{" + TensorJson("a", "U8", "[0]", UINT64_MAX, UINT64_MAX) + "}", 0),
            "accepted");
  EXPECT_THAT(
      SafetensorsRefusal("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1),
      HasSubstr("fewer"));
  EXPECT_THAT(
      SafetensorsRefusal("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1),
      HasSubstr("more"));
}

TEST(SafetensorsTest, RefusesSizesThatWrap) {
  EXPECT_NE(
      SafetensorsRefusal("{" + TensorJson("t", "U8", "[4294967296,4294967296]", 0, 0) + "}", 0),
      "accepted");
  EXPECT_NE(
      SafetensorsRefusal("{" + TensorJson("t", "F64", "[2305843009213693952]", 0, 0) + "}", 0),
      "accepted");
}

TEST(SafetensorsTest, EveryCutOfAGoodFileIsRefused) {
  const std::string whole = SmallSafetensors({"a", "b", "layer.0.weight"});
  ASSERT_TRUE(ReadSafetensors(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(Refusal(ReadSafetensors(whole.substr(0, size))), "accepted") << size;
  }
}

TEST(SafetensorsTest, HeaderLengthIsCheckedBeforeAnythingIsRead) {
  using testing::Le;
  EXPECT_THAT(Refusal(ReadSafetensors(Le<uint64_t>(0) + "{}")), HasSubstr("length of 0"));
  EXPECT_THAT(Refusal(ReadSafetensors(Le<uint64_t>(100'000'001) + "{}")),
              ::testing::AllOf(HasSubstr("100000001"), HasSubstr("100000000")));
  EXPECT_THAT(Refusal(ReadSafetensors(Le<uint64_t>(UINT64_MAX) + "{}")),
              HasSubstr("18446744073709551615"));
  EXPECT_THAT(Refusal(ReadSafetensors(Le<uint64_t>(3) + "{}")), HasSubstr("only 2 follow"));
  EXPECT_THAT(Refusal(ReadSafetensors(std::string(4096, '\0'))), HasSubstr("length of 0"));
  EXPECT_THAT(Refusal(ReadSafetensors(Le<uint64_t>(100) + std::string(100, '\0'))),
              HasSubstr("zeros"));
}

TEST(SafetensorsTest, HeaderOfExactlyTheLimitIsRead) {
  std::string bytes = testing::Le(kSafetensorsHeaderCap);
  bytes.reserve(8 + kSafetensorsHeaderCap + 1);
  bytes += "{" + TensorJson("w", "U8", "[1]", 0, 1) + "}";
  bytes.resize(8 + kSafetensorsHeaderCap, ' ');
  bytes += 'x';
  EXPECT_TRUE(ReadSafetensors(std::move(bytes)).ok());
}

TEST(SafetensorsTest, DeepNestingInIgnoredFieldsIsBounded) {
  const auto header = [](size_t levels) {
    return "{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":" +
           std::string(levels, '[') + std::string(levels, ']') + "}}";
  };
  EXPECT_TRUE(ReadHeader(header(100), 1).ok());
  EXPECT_THAT(SafetensorsRefusal(header(200), 1), HasSubstr("nested"));
  EXPECT_THAT(SafetensorsRefusal(header(1'000'000), 1), HasSubstr("nested"));
}

TEST(SafetensorsTest, MessagesShowNamesOnOneLine) {
  const std::string text = Refusal(ReadSafetensors(
      Safetensors("{" + TensorJson("a\\nb\\u001b[31m", "F128", "[1]", 0, 1) + "}", 1)));
  EXPECT_THAT(text, HasSubstr("'a\\x0ab\\x1b[31m'"));
  EXPECT_EQ(text.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace modelhost
