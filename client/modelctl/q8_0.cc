#include "client/modelctl/q8_0.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "client/modelctl/tensor_convert.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {
namespace {

constexpr uint64_t kHalfInfinity = 0x7c00;

bool QuantizeBlock(std::span<const double> values, std::span<std::byte> out) {
  std::array<float, kQ8BlockValues> x;
  float largest = 0;
  for (size_t i = 0; i < kQ8BlockValues; ++i) {
    x[i] = static_cast<float>(values[i]);
    if (!std::isfinite(x[i])) return false;
    largest = std::max(largest, std::fabs(x[i]));
  }
  const float scale = largest / 127.0F;
  float inverse = scale == 0 ? 0 : 1.0F / scale;
  // Of a scale near F32's smallest values; in F16 it is 0, and so is the whole block.
  if (!std::isfinite(inverse)) inverse = 0;
  const auto half = static_cast<uint16_t>(FromDouble(abi::DType::kF16, scale));
  if (half == kHalfInfinity) return false;
  std::memcpy(out.data(), &half, sizeof(half));
  for (size_t i = 0; i < kQ8BlockValues; ++i) {
    out[sizeof(half) + i] = static_cast<std::byte>(static_cast<int>(std::round(x[i] * inverse)));
  }
  return true;
}

}  // namespace

bool QuantizeQ8(std::span<const double> values, std::span<std::byte> out) {
  for (size_t block = 0; block < values.size() / kQ8BlockValues; ++block) {
    if (!QuantizeBlock(values.subspan(block * kQ8BlockValues, kQ8BlockValues),
                       out.subspan(block * kQ8BlockBytes, kQ8BlockBytes))) {
      return false;
    }
  }
  return true;
}

void DequantizeQ8(std::span<const std::byte> blocks, std::span<double> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    const auto block = blocks.subspan(i / kQ8BlockValues * kQ8BlockBytes, kQ8BlockBytes);
    uint16_t half = 0;
    std::memcpy(&half, block.data(), sizeof(half));
    const auto q = static_cast<int8_t>(block[sizeof(half) + i % kQ8BlockValues]);
    out[i] = ToDouble(abi::DType::kF16, half) * q;
  }
}

}  // namespace modelhost::modelctl
