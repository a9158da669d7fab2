#include "client/modelctl/tensor_convert.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace modelhost::modelctl {
namespace {

using abi::DType;

// A binary floating point kind: sign, exponent, mantissa.
struct FloatKind {
  int exponent_bits;
  int mantissa_bits;
  int bias;
};
constexpr FloatKind kHalf = {5, 10, 15};
constexpr FloatKind kBrain = {8, 7, 127};
constexpr int kDoubleMantissaBits = 52;
constexpr int kDoubleBias = 1023;

// `value` in steps of 2^-`exponent` is a whole number of few bits: exact.
double Scaled(uint64_t mantissa, int exponent, bool negative) {
  const double value = std::ldexp(static_cast<double>(mantissa), exponent);
  return negative ? -value : value;
}

// Of a kind whose largest exponent is for infinities and NaNs.
double IeeeToDouble(const FloatKind& kind, uint64_t bits) {
  const uint64_t mantissa = bits & ((uint64_t{1} << kind.mantissa_bits) - 1);
  const auto exponent =
      static_cast<int>((bits >> kind.mantissa_bits) & ((uint64_t{1} << kind.exponent_bits) - 1));
  const bool negative = (bits >> (kind.mantissa_bits + kind.exponent_bits) & 1) != 0;
  uint64_t wide = negative ? uint64_t{1} << 63 : 0;
  if (exponent == (1 << kind.exponent_bits) - 1) {
    wide |= uint64_t{0x7ff} << kDoubleMantissaBits;
    wide |= mantissa << (kDoubleMantissaBits - kind.mantissa_bits);
    return std::bit_cast<double>(wide);
  }
  if (exponent == 0) return Scaled(mantissa, 1 - kind.bias - kind.mantissa_bits, negative);
  wide |= static_cast<uint64_t>(exponent - kind.bias + kDoubleBias) << kDoubleMantissaBits;
  wide |= mantissa << (kDoubleMantissaBits - kind.mantissa_bits);
  return std::bit_cast<double>(wide);
}

uint64_t DoubleToIeee(const FloatKind& kind, double value) {
  const auto wide = std::bit_cast<uint64_t>(value);
  const uint64_t sign = (wide >> 63) << (kind.exponent_bits + kind.mantissa_bits);
  const uint64_t infinity = ((uint64_t{1} << kind.exponent_bits) - 1) << kind.mantissa_bits;
  const uint64_t fraction = wide & ((uint64_t{1} << kDoubleMantissaBits) - 1);
  const auto raw = static_cast<int>(wide >> kDoubleMantissaBits & 0x7ff);
  if (raw == 0x7ff) {
    if (fraction == 0) return sign | infinity;
    const uint64_t quiet = uint64_t{1} << (kind.mantissa_bits - 1);
    return sign | infinity | quiet | fraction >> (kDoubleMantissaBits - kind.mantissa_bits);
  }
  if (raw == 0) return sign;  // A subnormal double is below half of every smallest value here.
  const int exponent = raw - kDoubleBias + kind.bias;
  if (exponent >= (1 << kind.exponent_bits) - 1) return sign | infinity;
  uint64_t mantissa = fraction | uint64_t{1} << kDoubleMantissaBits;
  int drop = kDoubleMantissaBits - kind.mantissa_bits;
  if (exponent < 1) drop += 1 - exponent;
  if (drop > kDoubleMantissaBits + 1) return sign;  // Less than half of the smallest subnormal.
  const uint64_t rest = mantissa & ((uint64_t{1} << drop) - 1);
  const uint64_t half = uint64_t{1} << (drop - 1);
  mantissa >>= drop;
  if (rest > half || (rest == half && (mantissa & 1) != 0)) ++mantissa;
  // The hidden bit adds one to the exponent, and so does a carry out of the mantissa, into infinity
  // too.
  const uint64_t base = exponent < 1 ? 0 : static_cast<uint64_t>(exponent - 1);
  return sign | ((base << kind.mantissa_bits) + mantissa);
}

double Float8ToDouble(DType from, uint64_t bits) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  if (from == DType::kF8E5M2) return IeeeToDouble({5, 2, 15}, bits);
  if (from == DType::kF8E8M0) {
    return bits == 0xff ? kNan : std::ldexp(1.0, static_cast<int>(bits) - 127);
  }
  const bool fnuz = from == DType::kF8E4M3Fnuz || from == DType::kF8E5M2Fnuz;
  const int mantissa_bits = from == DType::kF8E5M2Fnuz ? 2 : 3;
  const int bias = from == DType::kF8E5M2Fnuz ? 16 : from == DType::kF8E4M3Fnuz ? 8 : 7;
  if (fnuz ? bits == 0x80 : (bits & 0x7f) == 0x7f) return kNan;
  const uint64_t mantissa = bits & ((uint64_t{1} << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits & 0x7f) >> mantissa_bits;
  const bool negative = (bits & 0x80) != 0;
  if (exponent == 0) return Scaled(mantissa, 1 - bias - mantissa_bits, negative);
  return Scaled(mantissa | uint64_t{1} << mantissa_bits, exponent - bias - mantissa_bits, negative);
}

template <typename Bits>
Bits Load(const std::byte* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

// One loop per size, so that the switch stands outside.
template <typename Bits, typename Decode>
void DecodeAll(std::span<const std::byte> in, std::span<double> out, Decode decode) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = decode(Load<Bits>(&in[i * sizeof(Bits)]));
}

template <typename Bits, typename Encode>
uint64_t EncodeAll(std::span<const double> in, std::span<std::byte> out, Bits infinity,
                   Encode encode) {
  constexpr Bits kNoSign = static_cast<Bits>(~Bits{0}) >> 1;
  uint64_t overflowed = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    const auto bits = static_cast<Bits>(encode(in[i]));
    if ((bits & kNoSign) == infinity && std::isfinite(in[i])) ++overflowed;
    std::memcpy(&out[i * sizeof(Bits)], &bits, sizeof(bits));
  }
  return overflowed;
}

uint64_t DoubleToSingle(double value) {
  // The conversion of the machine rounds to nearest even, but is free to choose a NaN's payload.
  if (std::isnan(value)) return DoubleToIeee({8, 23, 127}, value);
  return std::bit_cast<uint32_t>(static_cast<float>(value));
}

}  // namespace

static_assert(std::endian::native == std::endian::little);

bool IsWideFloat(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
}

bool IsFloat(DType dtype) {
  return IsWideFloat(dtype) || dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2 ||
         dtype == DType::kF8E8M0 || dtype == DType::kF8E4M3Fnuz || dtype == DType::kF8E5M2Fnuz;
}

double ToDouble(DType from, uint64_t bits) {
  switch (from) {
    case DType::kF64:
      return std::bit_cast<double>(bits);
    case DType::kF32:
      return IeeeToDouble({8, 23, 127}, bits);
    case DType::kF16:
      return IeeeToDouble(kHalf, bits);
    case DType::kBF16:
      return IeeeToDouble(kBrain, bits);
    default:
      return Float8ToDouble(from, bits);
  }
}

uint64_t FromDouble(DType to, double value) {
  switch (to) {
    case DType::kF64:
      return std::bit_cast<uint64_t>(value);
    case DType::kF32:
      return DoubleToSingle(value);
    case DType::kF16:
      return DoubleToIeee(kHalf, value);
    default:
      return DoubleToIeee(kBrain, value);
  }
}

void DecodeFloats(DType from, std::span<const std::byte> in, std::span<double> out) {
  switch (from) {
    case DType::kF64:
      return DecodeAll<uint64_t>(in, out,
                                 [](uint64_t bits) { return std::bit_cast<double>(bits); });
    case DType::kF32:
      // As ToDouble, but that signalling NaNs may come out quiet, which EncodeFloats makes them.
      return DecodeAll<uint32_t>(
          in, out, [](uint32_t bits) { return static_cast<double>(std::bit_cast<float>(bits)); });
    case DType::kF16:
      return DecodeAll<uint16_t>(in, out, [](uint16_t bits) { return IeeeToDouble(kHalf, bits); });
    case DType::kBF16:
      return DecodeAll<uint16_t>(in, out, [](uint16_t bits) { return IeeeToDouble(kBrain, bits); });
    default:
      return DecodeAll<uint8_t>(in, out,
                                [from](uint8_t bits) { return Float8ToDouble(from, bits); });
  }
}

uint64_t EncodeFloats(DType to, std::span<const double> in, std::span<std::byte> out) {
  switch (to) {
    case DType::kF64:
      return EncodeAll<uint64_t>(in, out, uint64_t{0x7ff} << kDoubleMantissaBits,
                                 [](double value) { return std::bit_cast<uint64_t>(value); });
    case DType::kF32:
      return EncodeAll<uint32_t>(in, out, 0x7f800000, DoubleToSingle);
    case DType::kF16:
      return EncodeAll<uint16_t>(in, out, 0x7c00,
                                 [](double value) { return DoubleToIeee(kHalf, value); });
    default:
      return EncodeAll<uint16_t>(in, out, 0x7f80,
                                 [](double value) { return DoubleToIeee(kBrain, value); });
  }
}

}  // namespace modelhost::modelctl
