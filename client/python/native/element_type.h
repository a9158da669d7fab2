// How the element types of the C API are called in the world of Python: PEP 3118 formats, array
// interface, DLPack. A type that one of them does not have has no entry there: it is refused by
// name, and never shown as another. Block types (Q4_K, ...) and types of less than a byte are in
// none of them.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "client/python/native/dlpack_abi.h"

namespace modelhost::python {

struct ElementType {
  std::string_view name;
  uint8_t size;         // Bytes of an element.
  const char* format;   // PEP 3118; null: numpy has no such type.
  const char* typestr;  // Of the array interface; null likewise.
  uint8_t dl_code;
  // 0: every consumer of DLPack knows it; otherwise the minor version of DLPack 1 that has it.
  uint8_t dl_minor;
};

// 'l' is 8 bytes here, and is what numpy takes for int64 itself.
static_assert(sizeof(long) == 8);

inline constexpr auto kElementTypes = std::to_array<ElementType>({
    {"F32", 4, "f", "<f4", kDLFloat, 0},
    {"BF16", 2, nullptr, nullptr, kDLBfloat, 0},
    {"F16", 2, "e", "<f2", kDLFloat, 0},
    {"F64", 8, "d", "<f8", kDLFloat, 0},
    {"I8", 1, "b", "|i1", kDLInt, 0},
    {"U8", 1, "B", "|u1", kDLUInt, 0},
    {"I16", 2, "h", "<i2", kDLInt, 0},
    {"U16", 2, "H", "<u2", kDLUInt, 0},
    {"I32", 4, "i", "<i4", kDLInt, 0},
    {"U32", 4, "I", "<u4", kDLUInt, 0},
    {"I64", 8, "l", "<i8", kDLInt, 0},
    {"U64", 8, "L", "<u8", kDLUInt, 0},
    {"BOOL", 1, "?", "|b1", kDLBool, 0},
    {"C64", 8, "Zf", "<c8", kDLComplex, 0},
    {"C128", 16, "Zd", "<c16", kDLComplex, 0},
    {"F8_E4M3", 1, nullptr, nullptr, kDLFloat8_e4m3fn, 1},
    {"F8_E5M2", 1, nullptr, nullptr, kDLFloat8_e5m2, 1},
    {"F8_E8M0", 1, nullptr, nullptr, kDLFloat8_e8m0fnu, 1},
    {"F8_E4M3FNUZ", 1, nullptr, nullptr, kDLFloat8_e4m3fnuz, 1},
    {"F8_E5M2FNUZ", 1, nullptr, nullptr, kDLFloat8_e5m2fnuz, 1},
});

// Null for a block type, one of less than a byte, and what this build does not know.
constexpr const ElementType* FindElementType(std::string_view name) {
  for (const ElementType& type : kElementTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

}  // namespace modelhost::python
