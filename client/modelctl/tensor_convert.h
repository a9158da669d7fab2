// Floating point values from one dtype to another.
//
// Rounding is to nearest, ties to even, once: F64 to BF16 does not go through F32. What is too
// large for the target becomes infinity, as IEEE 754 and PyTorch have it, and is counted; nothing
// saturates. Infinities stay, NaN stays NaN (quiet; the sign and the upper payload bits are kept),
// -0 stays -0, values below the smallest subnormal become 0 with their sign.
//
// 8-bit floats are read as OCP and ONNX define them (E4M3: no infinity, S.1111.111 is NaN; FNUZ:
// 0x80 is NaN and there is no -0; E8M0: 2^(x-127), 0xff is NaN) and never written.
//
// Values are little-endian and need no alignment. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

// F64 F32 F16 BF16 and the five 8-bit kinds: ToDouble takes them.
bool IsFloat(abi::DType dtype);
// F64 F32 F16 BF16: FromDouble makes them.
bool IsWideFloat(abi::DType dtype);

// Every value of a dtype that IsFloat is a double. `bits` has the value in its low bits.
double ToDouble(abi::DType from, uint64_t bits);
// The bits of the nearest value of a dtype that IsWideFloat.
uint64_t FromDouble(abi::DType to, double value);

// Decodes out.size() values.
void DecodeFloats(abi::DType from, std::span<const std::byte> in, std::span<double> out);
// Encodes in.size() values into as many elements of `to`. Returns how many finite ones became
// infinite.
uint64_t EncodeFloats(abi::DType to, std::span<const double> in, std::span<std::byte> out);

}  // namespace modelhost::modelctl
