// Element types of tensors, by number.
//
// The numbers are shared bytes (version_index.h) and never change. Plain types are below 0x100; a
// ggml block type is 0x100 + its ggml id, so that new ones need no table of their own. Names are
// those of safetensors for plain types and of ggml for block types.
//
// Sizes: a plain type has `bits` per element; the bytes of n elements are ceil(n * bits / 8). A
// block type stores `block_elements` consecutive elements of a row in `block_bytes` bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace modelhost::abi {

enum class DType : uint16_t {
  kInvalid = 0,
  kBool = 1,
  kU8 = 2,
  kI8 = 3,
  kU16 = 4,
  kI16 = 5,
  kU32 = 6,
  kI32 = 7,
  kU64 = 8,
  kI64 = 9,
  kF16 = 10,
  kBF16 = 11,
  kF32 = 12,
  kF64 = 13,
  kC64 = 14,
  kC128 = 15,
  kF8E4M3 = 16,
  kF8E5M2 = 17,
  kF8E8M0 = 18,
  kF8E4M3Fnuz = 19,
  kF8E5M2Fnuz = 20,
  kF4 = 21,
  kF6E2M3 = 22,
  kF6E3M2 = 23,
  kU4 = 24,
  kI4 = 25,
  kU2 = 26,
  kI2 = 27,
  kString = 28,  // Never mappable.
  kQ4_0 = 0x102,
  kQ4_1 = 0x103,
  kQ5_0 = 0x106,
  kQ5_1 = 0x107,
  kQ8_0 = 0x108,
  kQ8_1 = 0x109,
  kQ2_K = 0x10a,
  kQ3_K = 0x10b,
  kQ4_K = 0x10c,
  kQ5_K = 0x10d,
  kQ6_K = 0x10e,
  kQ8_K = 0x10f,
  kIQ2_XXS = 0x110,
  kIQ2_XS = 0x111,
  kIQ3_XXS = 0x112,
  kIQ1_S = 0x113,
  kIQ4_NL = 0x114,
  kIQ3_S = 0x115,
  kIQ2_S = 0x116,
  kIQ4_XS = 0x117,
  kIQ1_M = 0x11d,
  kTQ1_0 = 0x122,
  kTQ2_0 = 0x123,
  kMXFP4 = 0x127,
  kNVFP4 = 0x128,
  kQ1_0 = 0x129,
  kQ2_0 = 0x12a,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  uint16_t bits;            // Per element; 0 for block types and STRING.
  uint16_t block_elements;  // 1 for plain types.
  uint16_t block_bytes;     // 0 for plain types.
};

inline constexpr auto kDTypes = std::to_array<DTypeInfo>({
    {DType::kBool, "BOOL", 8, 1, 0},
    {DType::kU8, "U8", 8, 1, 0},
    {DType::kI8, "I8", 8, 1, 0},
    {DType::kU16, "U16", 16, 1, 0},
    {DType::kI16, "I16", 16, 1, 0},
    {DType::kU32, "U32", 32, 1, 0},
    {DType::kI32, "I32", 32, 1, 0},
    {DType::kU64, "U64", 64, 1, 0},
    {DType::kI64, "I64", 64, 1, 0},
    {DType::kF16, "F16", 16, 1, 0},
    {DType::kBF16, "BF16", 16, 1, 0},
    {DType::kF32, "F32", 32, 1, 0},
    {DType::kF64, "F64", 64, 1, 0},
    {DType::kC64, "C64", 64, 1, 0},
    {DType::kC128, "C128", 128, 1, 0},
    {DType::kF8E4M3, "F8_E4M3", 8, 1, 0},
    {DType::kF8E5M2, "F8_E5M2", 8, 1, 0},
    {DType::kF8E8M0, "F8_E8M0", 8, 1, 0},
    {DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, 1, 0},
    {DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, 1, 0},
    {DType::kF4, "F4", 4, 1, 0},
    {DType::kF6E2M3, "F6_E2M3", 6, 1, 0},
    {DType::kF6E3M2, "F6_E3M2", 6, 1, 0},
    {DType::kU4, "U4", 4, 1, 0},
    {DType::kI4, "I4", 4, 1, 0},
    {DType::kU2, "U2", 2, 1, 0},
    {DType::kI2, "I2", 2, 1, 0},
    {DType::kString, "STRING", 0, 1, 0},
    {DType::kQ4_0, "Q4_0", 0, 32, 18},
    {DType::kQ4_1, "Q4_1", 0, 32, 20},
    {DType::kQ5_0, "Q5_0", 0, 32, 22},
    {DType::kQ5_1, "Q5_1", 0, 32, 24},
    {DType::kQ8_0, "Q8_0", 0, 32, 34},
    {DType::kQ8_1, "Q8_1", 0, 32, 36},
    {DType::kQ2_K, "Q2_K", 0, 256, 84},
    {DType::kQ3_K, "Q3_K", 0, 256, 110},
    {DType::kQ4_K, "Q4_K", 0, 256, 144},
    {DType::kQ5_K, "Q5_K", 0, 256, 176},
    {DType::kQ6_K, "Q6_K", 0, 256, 210},
    {DType::kQ8_K, "Q8_K", 0, 256, 292},
    {DType::kIQ2_XXS, "IQ2_XXS", 0, 256, 66},
    {DType::kIQ2_XS, "IQ2_XS", 0, 256, 74},
    {DType::kIQ3_XXS, "IQ3_XXS", 0, 256, 98},
    {DType::kIQ1_S, "IQ1_S", 0, 256, 50},
    {DType::kIQ4_NL, "IQ4_NL", 0, 32, 18},
    {DType::kIQ3_S, "IQ3_S", 0, 256, 110},
    {DType::kIQ2_S, "IQ2_S", 0, 256, 82},
    {DType::kIQ4_XS, "IQ4_XS", 0, 256, 136},
    {DType::kIQ1_M, "IQ1_M", 0, 256, 56},
    {DType::kTQ1_0, "TQ1_0", 0, 256, 54},
    {DType::kTQ2_0, "TQ2_0", 0, 256, 66},
    {DType::kMXFP4, "MXFP4", 0, 32, 17},
    {DType::kNVFP4, "NVFP4", 0, 64, 36},
    {DType::kQ1_0, "Q1_0", 0, 128, 18},
    {DType::kQ2_0, "Q2_0", 0, 64, 18},
});

// Null for a number that this build does not know (a newer daemon).
constexpr const DTypeInfo* FindDType(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return &info;
  }
  return nullptr;
}

constexpr const DTypeInfo* FindDType(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

constexpr std::string_view DTypeName(DType dtype) {
  const DTypeInfo* info = FindDType(dtype);
  return info == nullptr ? std::string_view("INVALID") : info->name;
}

static_assert(FindDType(DType::kQ4_K)->block_bytes == 144);
static_assert(FindDType("BF16")->dtype == DType::kBF16);

}  // namespace modelhost::abi
