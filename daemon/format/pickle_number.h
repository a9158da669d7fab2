// The digits of Python's integers, which have no upper end.
//
// Thread-safe: no state.
#pragma once

#include <string>
#include <string_view>

namespace modelhost {

// Without the bytes at the end that only repeat the sign; of 0 nothing is left.
std::string_view TrimSignBytes(std::string_view number);

// In decimal, with a minus where it is negative. `number` is little-endian in two's complement, as
// the opcode LONG1 has it: at most 255 bytes, since the work is the square of them.
std::string DecimalDigits(std::string_view number);

}  // namespace modelhost
