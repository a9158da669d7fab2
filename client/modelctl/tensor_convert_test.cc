#include "client/modelctl/tensor_convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "client/modelctl/q8_0.h"
#include "gtest/gtest.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// From the definition of binary16: sign, 5 bits of exponent, 10 of fraction.
double HalfByDefinition(uint32_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const double fraction = bits & 0x3ff;
  if (exponent == 0x1f) return fraction == 0 ? sign * kInfinity : std::nan("");
  if (exponent == 0) return sign * fraction * std::pow(2.0, -24);
  return sign * (1 + fraction / 1024) * std::pow(2.0, exponent - 15);
}

double BrainByDefinition(uint32_t bits) {
  return static_cast<double>(std::bit_cast<float>(bits << 16));
}

struct Kind {
  DType dtype;
  double (*by_definition)(uint32_t);
  uint32_t infinity;  // Its bits; the largest finite value is one below.
};
const Kind kKinds[] = {{DType::kF16, HalfByDefinition, 0x7c00},
                       {DType::kBF16, BrainByDefinition, 0x7f80}};

TEST(TensorConvertTest, EveryValueOf16BitsIsReadAsDefinedAndComesBack) {
  for (const Kind& kind : kKinds) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double value = ToDouble(kind.dtype, bits);
      const double expected = kind.by_definition(bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << bits;
        const uint64_t back = FromDouble(kind.dtype, value);
        ASSERT_TRUE(std::isnan(kind.by_definition(static_cast<uint32_t>(back)))) << bits;
        ASSERT_EQ(back & 0x8000, bits & 0x8000) << "the sign of a NaN";
        continue;
      }
      ASSERT_EQ(std::bit_cast<uint64_t>(value), std::bit_cast<uint64_t>(expected)) << bits;
      ASSERT_EQ(FromDouble(kind.dtype, value), bits);
    }
  }
}

// Between each two neighbours: the middle goes to the even one, whatever is off the middle to the
// nearer one. For the largest finite value the neighbour is infinity, at the next power of two.
TEST(TensorConvertTest, RoundsToNearestAndTiesToEvenEverywhere) {
  for (const Kind& kind : kKinds) {
    for (uint32_t low = 0; low < kind.infinity; ++low) {
      const double a = kind.by_definition(low);
      const double b = low + 1 == kind.infinity ? 2 * a - kind.by_definition(low - 1)
                                                : kind.by_definition(low + 1);
      const double middle = (a + b) / 2;
      const uint32_t even = low % 2 == 0 ? low : low + 1;
      ASSERT_EQ(FromDouble(kind.dtype, middle), even) << low;
      ASSERT_EQ(FromDouble(kind.dtype, std::nextafter(middle, 0)), low) << low;
      ASSERT_EQ(FromDouble(kind.dtype, std::nextafter(middle, kInfinity)), low + 1) << low;
      ASSERT_EQ(FromDouble(kind.dtype, -middle), even | 0x8000) << low;
    }
  }
}

TEST(TensorConvertTest, F64ToBF16RoundsOnce) {
  // Through F32 this would become a tie first, and then the even neighbour below.
  const double value = 1 + std::pow(2.0, -8) + std::pow(2.0, -40);
  EXPECT_EQ(FromDouble(DType::kBF16, value), 0x3f81u);
  EXPECT_EQ(FromDouble(DType::kBF16, static_cast<double>(static_cast<float>(value))), 0x3f80u);
}

TEST(TensorConvertTest, ExtremesOfDoubles) {
  for (const Kind& kind : kKinds) {
    EXPECT_EQ(FromDouble(kind.dtype, std::numeric_limits<double>::max()), kind.infinity);
    EXPECT_EQ(FromDouble(kind.dtype, kInfinity), kind.infinity);
    EXPECT_EQ(FromDouble(kind.dtype, -kInfinity), kind.infinity | 0x8000);
    EXPECT_EQ(FromDouble(kind.dtype, std::numeric_limits<double>::denorm_min()), 0u);
    EXPECT_EQ(FromDouble(kind.dtype, -std::numeric_limits<double>::denorm_min()), 0x8000u);
    EXPECT_EQ(FromDouble(kind.dtype, -0.0), 0x8000u);
  }
}

TEST(TensorConvertTest, SinglesAgreeWithTheMachine) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const auto value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    ASSERT_EQ(ToDouble(DType::kF32, bits), static_cast<double>(value));
    ASSERT_EQ(FromDouble(DType::kF32, static_cast<double>(value)), bits);
  }
  EXPECT_EQ(FromDouble(DType::kF32, std::nan("")) & 0x7fc00000, 0x7fc00000u);
}

TEST(TensorConvertTest, EightBitFloatsAreReadAsTheirDefinitionsSay) {
  struct Case {
    DType dtype;
    uint64_t bits;
    double value;
  };
  for (const Case& each : std::vector<Case>{{DType::kF8E4M3, 0x00, 0},
                                            {DType::kF8E4M3, 0x01, std::pow(2.0, -9)},
                                            {DType::kF8E4M3, 0x08, std::pow(2.0, -6)},
                                            {DType::kF8E4M3, 0x38, 1},
                                            {DType::kF8E4M3, 0x7e, 448},
                                            {DType::kF8E4M3, 0xfe, -448},
                                            {DType::kF8E5M2, 0x01, std::pow(2.0, -16)},
                                            {DType::kF8E5M2, 0x3c, 1},
                                            {DType::kF8E5M2, 0x7b, 57344},
                                            {DType::kF8E5M2, 0xfc, -kInfinity},
                                            {DType::kF8E4M3Fnuz, 0x01, std::pow(2.0, -10)},
                                            {DType::kF8E4M3Fnuz, 0x40, 1},
                                            {DType::kF8E4M3Fnuz, 0x7f, 240},
                                            {DType::kF8E5M2Fnuz, 0x01, std::pow(2.0, -17)},
                                            {DType::kF8E5M2Fnuz, 0x40, 1},
                                            {DType::kF8E5M2Fnuz, 0xff, -57344},
                                            {DType::kF8E8M0, 0, std::pow(2.0, -127)},
                                            {DType::kF8E8M0, 127, 1},
                                            {DType::kF8E8M0, 254, std::pow(2.0, 127)}}) {
    EXPECT_EQ(ToDouble(each.dtype, each.bits), each.value)
        << abi::DTypeName(each.dtype) << " " << each.bits;
  }
  for (const auto& [dtype, bits] :
       std::vector<std::pair<DType, uint64_t>>{{DType::kF8E4M3, 0x7f},
                                               {DType::kF8E4M3, 0xff},
                                               {DType::kF8E5M2, 0x7d},
                                               {DType::kF8E4M3Fnuz, 0x80},
                                               {DType::kF8E5M2Fnuz, 0x80},
                                               {DType::kF8E8M0, 0xff}}) {
    EXPECT_TRUE(std::isnan(ToDouble(dtype, bits))) << abi::DTypeName(dtype) << " " << bits;
  }
}

TEST(TensorConvertTest, WholeRangesAreTheSingleValues) {
  for (const DType from : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    const size_t size = abi::FindDType(from)->bits / 8;
    std::mt19937_64 random(3);
    std::vector<std::byte> in(size * 4096);
    for (std::byte& byte : in) byte = static_cast<std::byte>(random());
    std::vector<double> values(4096);
    DecodeFloats(from, in, values);
    for (size_t i = 0; i < values.size(); ++i) {
      uint64_t bits = 0;
      std::memcpy(&bits, &in[i * size], size);
      const double value = ToDouble(from, bits);
      ASSERT_TRUE(values[i] == value || (std::isnan(values[i]) && std::isnan(value)));
    }
    for (const DType to : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      const size_t to_size = abi::FindDType(to)->bits / 8;
      std::vector<std::byte> out(to_size * values.size());
      uint64_t overflowed = 0;
      for (const double value : values) {
        const bool infinite = std::isinf(ToDouble(to, FromDouble(to, value)));
        if (infinite && std::isfinite(value)) ++overflowed;
      }
      EXPECT_EQ(EncodeFloats(to, values, out), overflowed);
      for (size_t i = 0; i < values.size(); ++i) {
        uint64_t bits = 0;
        std::memcpy(&bits, &out[i * to_size], to_size);
        ASSERT_EQ(bits, FromDouble(to, values[i]));
      }
    }
  }
}

// --- Q8_0, against its definition written once more.

// d = max|x| / 127 in F32, stored as F16; q = round(x / d), halves away from zero.
std::vector<uint8_t> BlockByDefinition(const std::vector<double>& values) {
  float largest = 0;
  for (const double value : values) {
    largest = std::fmax(largest, std::fabs(static_cast<float>(value)));
  }
  const float d = largest / 127;
  // The nearest of all 65536 halves, the even one when two are as near.
  uint32_t half = 0;
  for (uint32_t bits = 1; bits < 0x7c00; ++bits) {
    const double off = std::fabs(HalfByDefinition(bits) - d);
    const double best = std::fabs(HalfByDefinition(half) - d);
    if (off < best || (off == best && bits % 2 == 0)) half = bits;
  }
  std::vector<uint8_t> block = {static_cast<uint8_t>(half), static_cast<uint8_t>(half >> 8)};
  for (const double value : values) {
    const float scaled = d == 0 ? 0 : static_cast<float>(value) * (1 / d);
    const float away = std::floor(std::fabs(scaled) + 0.5F);
    block.push_back(static_cast<uint8_t>(static_cast<int8_t>(scaled < 0 ? -away : away)));
  }
  return block;
}

TEST(Q8Test, BlocksAreWhatTheDefinitionSays) {
  std::mt19937_64 random(11);
  std::vector<std::vector<double>> blocks(1, std::vector<double>(32, 0.0));
  blocks.push_back(std::vector<double>(32, -2.5));
  for (int i = 0; i < 40; ++i) {
    const double scale = std::pow(10.0, i % 10 - 7);
    std::vector<double> block(32);
    for (double& value : block) {
      value = static_cast<float>(scale * std::normal_distribution<double>()(random));
    }
    blocks.push_back(block);
  }
  // Halves: with d = 1 they are exact.
  std::vector<double> halves(32);
  for (size_t i = 0; i < 32; ++i) halves[i] = static_cast<double>(i) - 15.5;
  halves[0] = 127;
  blocks.push_back(halves);
  for (const std::vector<double>& block : blocks) {
    std::vector<std::byte> out(kQ8BlockBytes);
    ASSERT_TRUE(QuantizeQ8(block, out));
    const std::vector<uint8_t> expected = BlockByDefinition(block);
    ASSERT_EQ(std::memcmp(out.data(), expected.data(), kQ8BlockBytes), 0);
    std::vector<double> back(32);
    DequantizeQ8(out, back);
    const double d = HalfByDefinition(static_cast<uint32_t>(expected[0] | expected[1] << 8));
    double largest = 0;
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(back[i], d * static_cast<int8_t>(expected[2 + i]));
      largest = std::fmax(largest, std::fabs(block[i]));
    }
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_LE(std::fabs(back[i] - block[i]),
                largest / 127 * 0.51 + 127 * std::pow(2.0, -25) + largest * std::pow(2.0, -11));
    }
  }
}

TEST(Q8Test, SeveralBlocksStandOneBehindTheOther) {
  std::vector<double> values(64, 1.0);
  for (size_t i = 32; i < 64; ++i) values[i] = -254.0;
  std::vector<std::byte> out(2 * kQ8BlockBytes);
  ASSERT_TRUE(QuantizeQ8(values, out));
  std::vector<double> back(64);
  DequantizeQ8(out, back);
  EXPECT_NEAR(back[31], 1.0, 1e-3);
  EXPECT_EQ(back[32], -254.0);
}

TEST(Q8Test, WhatItCannotHoldIsRefused) {
  std::vector<std::byte> out(kQ8BlockBytes);
  for (const double bad : {std::nan(""), kInfinity, -kInfinity, 1e300, 127 * 65520.0}) {
    std::vector<double> values(32, 0.5);
    values[17] = bad;
    EXPECT_FALSE(QuantizeQ8(values, out)) << bad;
  }
  EXPECT_TRUE(QuantizeQ8(std::vector<double>(32, 127 * 65504.0), out));
}

TEST(Q8Test, ScalesTooSmallForHalvesGiveZeros) {
  std::vector<std::byte> out(kQ8BlockBytes);
  for (const double tiny : {1e-12, 1e-40, 1.5e-45}) {
    ASSERT_TRUE(QuantizeQ8(std::vector<double>(32, tiny), out));
    std::vector<double> back(32);
    DequantizeQ8(out, back);
    for (const double value : back) EXPECT_EQ(value, 0);
  }
}

}  // namespace
}  // namespace modelhost::modelctl
