// ggml's block type Q8_0: 32 values are an F16 scale d and 32 signed bytes q, the values d * q.
//
// As ggml quantises: in F32, d = max|x| / 127, q = x * (1 / d) rounded to nearest, halves away from
// zero, and d is then rounded to F16. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace modelhost::modelctl {

inline constexpr size_t kQ8BlockValues = 32;
inline constexpr size_t kQ8BlockBytes = 34;

// `values` are a multiple of 32; `out` is 34 bytes for each 32. False, with `out` not filled to its
// end, when a value is not finite or a block's scale is more than F16 can hold.
bool QuantizeQ8(std::span<const double> values, std::span<std::byte> out);

// The inverse: 32 values for each 34 bytes.
void DequantizeQ8(std::span<const std::byte> blocks, std::span<double> out);

}  // namespace modelhost::modelctl
