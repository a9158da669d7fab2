#include "daemon/format/onnx_values.h"

#include <bit>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using testing::Le;
using testing::MemoryFiles;
using testing::OnnxOf;
using testing::OnnxRaw;
using testing::OnnxTensorOf;
using testing::Proto;

// Indexes a model of one tensor and decodes it; the bytes, or the error's text.
std::string Decoded(const Proto& tensor) {
  const std::string bytes = OnnxOf(tensor);
  MemoryFiles files({{"m.onnx", bytes}});
  auto index = ReadModel("m.onnx", files);
  if (!index.ok()) return absl::StrCat("not indexed: ", index.status().message());
  auto values =
      DecodeOnnxValues("m.onnx", std::as_bytes(std::span<const char>(bytes)), index->at(0));
  if (!values.ok()) return std::string(values.status().message());
  return {reinterpret_cast<const char*>(values->data()), values->size()};
}

std::string Packed(uint64_t type, uint32_t field, const std::vector<int64_t>& dims,
                   const std::vector<int64_t>& values) {
  return Decoded(OnnxTensorOf("w", type, dims)
                     .Packed(field, std::vector<uint64_t>(values.begin(), values.end())));
}

TEST(OnnxValuesTest, NumbersBecomeLittleEndianOfTheirType) {
  EXPECT_EQ(Packed(7, 7, {3}, {1, -2, INT64_MIN}),
            Le<int64_t>(1) + Le<int64_t>(-2) + Le(INT64_MIN));
  EXPECT_EQ(Packed(6, 5, {2}, {-1, INT32_MAX}), Le<int32_t>(-1) + Le(INT32_MAX));
  EXPECT_EQ(Packed(5, 5, {2}, {-2, 32767}), Le<int16_t>(-2) + Le<int16_t>(32767));
  EXPECT_EQ(Packed(4, 5, {2}, {0, 65535}), Le<uint16_t>(0) + Le<uint16_t>(65535));
  EXPECT_EQ(Packed(3, 5, {3}, {-128, -1, 127}), "\x80\xff\x7f");
  EXPECT_EQ(Packed(2, 5, {2}, {1, 255}), "\x01\xff");
  EXPECT_EQ(Packed(9, 5, {3}, {0, 1, 2}), std::string("\0\1\1", 3));
  EXPECT_EQ(Packed(12, 11, {2}, {1, UINT32_MAX}), Le(1u) + Le(UINT32_MAX));
  EXPECT_EQ(Packed(13, 11, {2}, {1, -1}), Le<uint64_t>(1) + Le(UINT64_MAX));
  // Bits of small floats.
  EXPECT_EQ(Packed(10, 5, {2}, {0x3c00, 0xffff}), Le<uint16_t>(0x3c00) + Le<uint16_t>(0xffff));
  EXPECT_EQ(Packed(16, 5, {1}, {0x3f80}), Le<uint16_t>(0x3f80));
  for (const uint64_t type : {17, 18, 19, 20, 24}) EXPECT_EQ(Packed(type, 5, {1}, {0xab}), "\xab");
  // Several to a byte.
  for (const uint64_t type : {21, 22, 23}) {
    EXPECT_EQ(Packed(type, 5, {3}, {0x21, 0xf3}), "\x21\xf3");
  }
  for (const uint64_t type : {25, 26}) EXPECT_EQ(Packed(type, 5, {5}, {0xe4, 0x01}), "\xe4\x01");
}

TEST(OnnxValuesTest, PiecesAreJoinedInTheirOrder) {
  const std::string one = Le(std::bit_cast<uint32_t>(1.0f));
  const std::string two = Le(std::bit_cast<uint32_t>(2.0f));
  EXPECT_EQ(Decoded(OnnxTensorOf("w", 1, {3}).Bytes(4, one).Tag(4, 5).Raw(two).Bytes(4, one)),
            one + two + one);
  const std::string half = Le(std::bit_cast<uint64_t>(0.5));
  EXPECT_EQ(Decoded(OnnxTensorOf("w", 15, {1}).Tag(10, 1).Raw(half).Tag(10, 1).Raw(half)),
            half + half);
  EXPECT_EQ(Decoded(OnnxTensorOf("w", 7, {4}).Varint(7, 1).Packed(7, {2, 3}).Varint(7, 4)),
            Le<int64_t>(1) + Le<int64_t>(2) + Le<int64_t>(3) + Le<int64_t>(4));
  // The field's number with another wire type is an unknown field.
  EXPECT_EQ(
      Decoded(OnnxTensorOf("w", 6, {1}).Varint(5, 1).Tag(5, 5).Raw("1234").Tag(4, 0).Raw("x")),
      Le<int32_t>(1));
}

TEST(OnnxValuesTest, NumbersThatAreNoneOfTheTypeAreRefused) {
  EXPECT_THAT(Packed(2, 5, {1}, {256}), HasSubstr("has the value 256, which is none of type U8"));
  EXPECT_THAT(Packed(3, 5, {1}, {-129}), HasSubstr("none of type I8"));
  EXPECT_THAT(Packed(10, 5, {1}, {65536}), HasSubstr("none of type F16"));
  EXPECT_THAT(Packed(6, 5, {1}, {int64_t{1} << 32}), HasSubstr("none of type I32"));
  EXPECT_THAT(Packed(12, 11, {1}, {-1}), HasSubstr("none of type U32"));
  EXPECT_THAT(Packed(21, 5, {2}, {256}), HasSubstr("none of type U4"));
  EXPECT_THAT(Packed(9, 5, {1}, {int64_t{1} << 40}), HasSubstr("none of type BOOL"));
}

TEST(OnnxValuesTest, StringsHaveNoBytes) {
  const std::string bytes = OnnxOf(OnnxTensorOf("w", 8, {1}).Bytes(6, "text"));
  MemoryFiles files({{"m.onnx", bytes}});
  auto index = ReadModel("m.onnx", files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_TRUE(absl::IsUnimplemented(
      DecodeOnnxValues("m.onnx", std::as_bytes(std::span<const char>(bytes)), index->at(0))
          .status()));
}

TEST(OnnxValuesTest, AFileThatChangedIsNotDecodedWrongly) {
  const std::string bytes = OnnxOf(OnnxTensorOf("w", 7, {2}).Packed(7, {1, 2}));
  MemoryFiles files({{"m.onnx", bytes}});
  auto index = ReadModel("m.onnx", files);
  ASSERT_TRUE(index.ok()) << index.status();
  const auto decode = [&](const std::string& changed) {
    return DecodeOnnxValues("m.onnx", std::as_bytes(std::span<const char>(changed)), index->at(0));
  };
  EXPECT_TRUE(decode(bytes).ok());
  for (const Proto& other :
       {OnnxTensorOf("w", 7, {3}).Packed(7, {1, 2, 3}),
        OnnxTensorOf("w", 13, {2}).Packed(11, {1, 2}), OnnxRaw("w", 7, {2}, std::string(16, 'x')),
        OnnxTensorOf("w", 7, {2}).Packed(7, {1})}) {
    EXPECT_FALSE(decode(OnnxOf(other)).ok());
  }
  for (size_t size = 0; size < index->at(0).offset + index->at(0).nbytes; ++size) {
    EXPECT_FALSE(decode(bytes.substr(0, size)).ok()) << size;
  }
}

}  // namespace
}  // namespace modelhost
