// Whether converted values are what the arithmetic of their types says, without any of the code
// that converts: from the values on both sides and the distance that rounding may leave between
// them.
//
//   F64 F32 F16 BF16  half a unit in the last place of the target; what is beyond its largest value
//                     by that much is infinite, NaN is NaN, zeros and infinities keep their sign
//   Q8_0              half of the block's d = max/127, and 127 times what d may lose as an F16
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

// The number of the first of target's values that is too far from its source, if there is one.
// `from` is a float dtype. `to` is F64, F32, F16 or BF16.
std::optional<size_t> FirstWrongFloat(abi::DType from, std::span<const std::byte> source,
                                      abi::DType to, std::span<const std::byte> target);
// `blocks` are 34 bytes for each 32 values of `source`.
std::optional<size_t> FirstWrongQ8(abi::DType from, std::span<const std::byte> source,
                                   std::span<const std::byte> blocks);

}  // namespace modelhost::modelctl
