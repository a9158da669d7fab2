#include "client/modelctl/value_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "client/modelctl/tensor_convert.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;

constexpr size_t kBlockValues = 32;
constexpr size_t kBlockBytes = 34;

// Digits behind the point, and the exponents of the smallest and the largest normal value.
struct Precision {
  int digits, smallest, largest;
};

Precision PrecisionOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {10, -14, 15};
    case DType::kBF16:
      return {7, -126, 127};
    case DType::kF32:
      return {23, -126, 127};
    default:
      return {52, -1022, 1023};
  }
}

template <typename T>
T LoadAs(std::span<const std::byte> bytes, size_t i) {
  T value;
  std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
  return value;
}

double HalfPrecision(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 1023;
  double value =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) value = mantissa == 0 ? INFINITY : NAN;
  return (bits & 0x8000) != 0 ? -value : value;
}

double ValueAt(DType dtype, std::span<const std::byte> bytes, size_t i) {
  switch (dtype) {
    case DType::kF64:
      return LoadAs<double>(bytes, i);
    case DType::kF32:
      return LoadAs<float>(bytes, i);
    case DType::kBF16:
      return std::bit_cast<float>(uint32_t{LoadAs<uint16_t>(bytes, i)} << 16);
    case DType::kF16:
      return HalfPrecision(LoadAs<uint16_t>(bytes, i));
    default:  // 8 bits: 256 values, which a table in the tests has.
      return ToDouble(dtype, LoadAs<uint8_t>(bytes, i));
  }
}

size_t WidthOf(DType dtype) { return abi::FindDType(dtype)->bits / 8; }

// Half a unit in the last place where `value` is.
double HalfUnit(const Precision& target, double value) {
  int exponent = target.smallest;
  if (value != 0) exponent = std::max(exponent, std::ilogb(value));
  return std::ldexp(1, exponent - target.digits - 1);
}

bool IsRounded(const Precision& target, double value, double result) {
  if (std::isnan(value)) return std::isnan(result);
  if (std::signbit(value) != std::signbit(result)) return false;
  if (std::isinf(value)) return std::isinf(result);
  // (2 - 2^-digits-1) * 2^largest is the first that is nearer to what would come next.
  const double limit =
      std::ldexp(2, target.largest) - std::ldexp(1, target.largest - target.digits - 1);
  if (std::fabs(value) >= limit) return std::isinf(result);
  if (!std::isfinite(result)) return false;
  // Below a power of two the units are half as large.
  const double smaller = std::min(std::fabs(value), std::fabs(result));
  return std::fabs(value - result) <= HalfUnit(target, smaller);
}

}  // namespace

std::optional<size_t> FirstWrongFloat(DType from, std::span<const std::byte> source, DType to,
                                      std::span<const std::byte> target) {
  const Precision precision = PrecisionOf(to);
  const size_t count = source.size() / WidthOf(from);
  if (target.size() != count * WidthOf(to)) return std::min(count, target.size() / WidthOf(to));
  for (size_t i = 0; i < count; ++i) {
    if (!IsRounded(precision, ValueAt(from, source, i), ValueAt(to, target, i))) return i;
  }
  return std::nullopt;
}

std::optional<size_t> FirstWrongQ8(DType from, std::span<const std::byte> source,
                                   std::span<const std::byte> blocks) {
  // Values, step and quotients are F32's: so far may a quotient of up to 127 be off, in steps.
  constexpr double kSlackSteps = 127 * 0x1p-21;
  const size_t count = source.size() / WidthOf(from);
  if (blocks.size() / kBlockBytes * kBlockValues != count) return 0;
  for (size_t block = 0; block < count / kBlockValues; ++block) {
    std::array<double, kBlockValues> values;
    double largest = 0;
    for (size_t i = 0; i < kBlockValues; ++i) {
      values[i] = ValueAt(from, source, block * kBlockValues + i);
      largest = std::max(largest, std::fabs(values[i]));
    }
    const double step = largest / 127;
    const double allowed =
        step / 2 + 127 * HalfUnit(PrecisionOf(DType::kF16), step) + step * kSlackSteps;
    const std::span<const std::byte> bytes = blocks.subspan(block * kBlockBytes, kBlockBytes);
    const double scale = HalfPrecision(LoadAs<uint16_t>(bytes, 0));
    for (size_t i = 0; i < kBlockValues; ++i) {
      const double result = scale * static_cast<int8_t>(bytes[2 + i]);
      if (!(std::fabs(values[i] - result) <= allowed)) return block * kBlockValues + i;
    }
  }
  return std::nullopt;
}

}  // namespace modelhost::modelctl
