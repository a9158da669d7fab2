#include "client/modelctl/value_check.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "client/modelctl/q8_0.h"
#include "client/modelctl/tensor_convert.h"
#include "gtest/gtest.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;

std::span<const std::byte> Bytes(const std::vector<double>& values) {
  return std::as_bytes(std::span<const double>(values));
}

std::vector<std::byte> Encoded(DType to, const std::vector<double>& values) {
  std::vector<std::byte> out(values.size() * (abi::FindDType(to)->bits / 8));
  EncodeFloats(to, values, out);
  return out;
}

// The integer of the last value, so many further.
std::vector<std::byte> Moved(DType to, std::vector<std::byte> bytes, int by) {
  const size_t width = abi::FindDType(to)->bits / 8;
  uint64_t bits = 0;
  std::memcpy(&bits, bytes.data() + bytes.size() - width, width);
  bits += static_cast<uint64_t>(int64_t{by});
  std::memcpy(bytes.data() + bytes.size() - width, &bits, width);
  return bytes;
}

TEST(ValueCheckTest, TheNearestValueIsRightAndItsNeighboursAreNot) {
  std::vector<double> values = {0.0,   -0.0,     1.0 / 3,   -1e-30, 65519.0, 65520.0,
                                1e39,  INFINITY, -INFINITY, NAN,    5e-324,  3.39e38,
                                1e-45, 6e-8,     1e-40,     2.0,    -70000.0};
  for (int i = 0; i < 500; ++i) values.push_back(std::ldexp(1 + i * 0.0019, i % 60 - 30));
  for (const DType to : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (size_t i = 0; i < values.size(); ++i) {
      const std::vector<double> one = {1.0, values[i]};
      const std::vector<std::byte> encoded = Encoded(to, one);
      EXPECT_FALSE(FirstWrongFloat(DType::kF64, Bytes(one), to, encoded)) << values[i];
      if (!std::isfinite(values[i]) || std::fabs(values[i]) > 60000) continue;
      for (const int by : {-1, 1}) {
        if (by == -1 && std::fabs(values[i]) < 1e-20) continue;  // Below 0 is another sign.
        EXPECT_EQ(FirstWrongFloat(DType::kF64, Bytes(one), to, Moved(to, encoded, by)), 1u)
            << values[i] << " " << by;
      }
    }
  }
}

TEST(ValueCheckTest, InfinitiesSignsAndNansAreNotExcused) {
  const auto wrong = [](double value, double result) {
    const std::vector<double> one = {value};
    return FirstWrongFloat(DType::kF64, Bytes(one), DType::kF16, Encoded(DType::kF16, {result}));
  };
  EXPECT_TRUE(wrong(1, INFINITY));
  EXPECT_TRUE(wrong(65519, INFINITY));
  EXPECT_TRUE(wrong(65520, 65504));
  EXPECT_TRUE(wrong(1e9, -INFINITY));
  EXPECT_TRUE(wrong(NAN, 1));
  EXPECT_TRUE(wrong(1, NAN));
  EXPECT_TRUE(wrong(0.0, -0.0));
  EXPECT_TRUE(wrong(INFINITY, 65504));
  const std::vector<double> two = {1, 2};
  EXPECT_TRUE(FirstWrongFloat(DType::kF64, Bytes(two), DType::kF16, Encoded(DType::kF16, {1})));
}

TEST(ValueCheckTest, BlocksOfQ8AreRightOnlyAsTheyWereMade) {
  for (const double size : {1.0, 1e-3, 1e-6, 3e-8, 1e-30, 0.0, 1e5}) {
    std::vector<double> values(64);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = size * std::sin(static_cast<double>(i * i) + 0.3);
    }
    std::vector<std::byte> blocks(68);
    ASSERT_TRUE(QuantizeQ8(values, blocks));
    EXPECT_FALSE(FirstWrongQ8(DType::kF64, Bytes(values), blocks)) << size;
    if (size < 1e-4) continue;
    for (size_t i = 0; i < 32; ++i) {
      std::vector<std::byte> spoiled = blocks;
      spoiled[34 + 2 + i] = static_cast<std::byte>(static_cast<int>(spoiled[34 + 2 + i]) ^ 2);
      EXPECT_EQ(FirstWrongQ8(DType::kF64, Bytes(values), spoiled), 32 + i) << size;
    }
  }
  EXPECT_TRUE(FirstWrongQ8(DType::kF64, Bytes(std::vector<double>(64)), {}));
}

// Right by the definition, whose arithmetic is F32's: a quotient just below 126.5 becomes 127
// there.
TEST(ValueCheckTest, BlocksOfQ8MayRoundAsF32Does) {
  std::vector<double> values(32);
  values[0] = 128.42626953125;
  values[1] = 127.92064666748047;
  std::vector<std::byte> block(34);
  ASSERT_TRUE(QuantizeQ8(values, block));
  EXPECT_FALSE(FirstWrongQ8(DType::kF64, Bytes(values), block));
}

}  // namespace
}  // namespace modelhost::modelctl
