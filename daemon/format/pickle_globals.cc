#include "daemon/format/pickle_globals.h"

#include <array>

namespace modelhost {
namespace {

using abi::DType;

constexpr std::string_view kUtils = "torch._utils";

// As torch's own restricted reader has it.
constexpr auto kGlobals = std::to_array<PickleGlobal>({
    {"collections", "OrderedDict", GlobalRole::kOrderedDict},
    {"collections", "Counter", GlobalRole::kCounter},
    {"builtins", "set", GlobalRole::kSet},
    {"builtins", "bytearray", GlobalRole::kOpaque},
    {"builtins", "complex", GlobalRole::kOpaque},
    {"_codecs", "encode", GlobalRole::kOpaque},
    {"torch", "Size", GlobalRole::kSize},
    {"torch", "device", GlobalRole::kOpaque},
    {"torch.serialization", "_get_layout", GlobalRole::kOpaque},
    {"torch.nn.parameter", "Parameter", GlobalRole::kParameter},
    {"torch", "Tensor", GlobalRole::kTensorClass},

    {kUtils, "_rebuild_tensor", GlobalRole::kRebuildTensor},
    {kUtils, "_rebuild_tensor_v2", GlobalRole::kRebuildTensorV2},
    {kUtils, "_rebuild_tensor_v3", GlobalRole::kRebuildTensorV3},
    {kUtils, "_rebuild_parameter", GlobalRole::kRebuildParameter},
    {kUtils, "_rebuild_parameter_with_state", GlobalRole::kRebuildParameterState},
    {"torch._tensor", "_rebuild_from_type_v2", GlobalRole::kRebuildFromType},
    {kUtils, "_rebuild_qtensor", GlobalRole::kOtherTensor},
    {kUtils, "_rebuild_sparse_tensor", GlobalRole::kOtherTensor},
    {kUtils, "_rebuild_meta_tensor_no_storage", GlobalRole::kOtherTensor},
    {kUtils, "_rebuild_wrapper_subclass", GlobalRole::kOtherTensor},
    {kUtils, "_rebuild_device_tensor_from_numpy", GlobalRole::kOtherTensor},
    {kUtils, "_rebuild_device_tensor_from_cpu_tensor", GlobalRole::kOtherTensor},

    {"torch", "DoubleStorage", GlobalRole::kStorage, DType::kF64},
    {"torch", "FloatStorage", GlobalRole::kStorage, DType::kF32},
    {"torch", "HalfStorage", GlobalRole::kStorage, DType::kF16},
    {"torch", "BFloat16Storage", GlobalRole::kStorage, DType::kBF16},
    {"torch", "LongStorage", GlobalRole::kStorage, DType::kI64},
    {"torch", "IntStorage", GlobalRole::kStorage, DType::kI32},
    {"torch", "ShortStorage", GlobalRole::kStorage, DType::kI16},
    {"torch", "CharStorage", GlobalRole::kStorage, DType::kI8},
    {"torch", "ByteStorage", GlobalRole::kStorage, DType::kU8},
    {"torch", "BoolStorage", GlobalRole::kStorage, DType::kBool},
    {"torch", "ComplexDoubleStorage", GlobalRole::kStorage, DType::kC128},
    {"torch", "ComplexFloatStorage", GlobalRole::kStorage, DType::kC64},
    {"torch", "QInt8Storage", GlobalRole::kStorage},
    {"torch", "QUInt8Storage", GlobalRole::kStorage},
    {"torch", "QInt32Storage", GlobalRole::kStorage},
    {"torch", "QUInt4x2Storage", GlobalRole::kStorage},
    {"torch", "QUInt2x4Storage", GlobalRole::kStorage},
    {"torch.storage", "UntypedStorage", GlobalRole::kUntypedStorage},
    {"torch", "UntypedStorage", GlobalRole::kUntypedStorage},
    {"torch.storage", "TypedStorage", GlobalRole::kConstant},

    {"torch", "float64", GlobalRole::kDType, DType::kF64},
    {"torch", "double", GlobalRole::kDType, DType::kF64},
    {"torch", "float32", GlobalRole::kDType, DType::kF32},
    {"torch", "float", GlobalRole::kDType, DType::kF32},
    {"torch", "float16", GlobalRole::kDType, DType::kF16},
    {"torch", "half", GlobalRole::kDType, DType::kF16},
    {"torch", "bfloat16", GlobalRole::kDType, DType::kBF16},
    {"torch", "int64", GlobalRole::kDType, DType::kI64},
    {"torch", "long", GlobalRole::kDType, DType::kI64},
    {"torch", "int32", GlobalRole::kDType, DType::kI32},
    {"torch", "int", GlobalRole::kDType, DType::kI32},
    {"torch", "int16", GlobalRole::kDType, DType::kI16},
    {"torch", "short", GlobalRole::kDType, DType::kI16},
    {"torch", "int8", GlobalRole::kDType, DType::kI8},
    {"torch", "uint8", GlobalRole::kDType, DType::kU8},
    {"torch", "uint16", GlobalRole::kDType, DType::kU16},
    {"torch", "uint32", GlobalRole::kDType, DType::kU32},
    {"torch", "uint64", GlobalRole::kDType, DType::kU64},
    {"torch", "bool", GlobalRole::kDType, DType::kBool},
    {"torch", "complex64", GlobalRole::kDType, DType::kC64},
    {"torch", "cfloat", GlobalRole::kDType, DType::kC64},
    {"torch", "complex128", GlobalRole::kDType, DType::kC128},
    {"torch", "cdouble", GlobalRole::kDType, DType::kC128},
    {"torch", "float8_e4m3fn", GlobalRole::kDType, DType::kF8E4M3},
    {"torch", "float8_e4m3fnuz", GlobalRole::kDType, DType::kF8E4M3Fnuz},
    {"torch", "float8_e5m2", GlobalRole::kDType, DType::kF8E5M2},
    {"torch", "float8_e5m2fnuz", GlobalRole::kDType, DType::kF8E5M2Fnuz},
    {"torch", "float8_e8m0fnu", GlobalRole::kDType, DType::kF8E8M0},
    // An element of it is a pair, so its shapes are not those of F4.
    {"torch", "float4_e2m1fn_x2", GlobalRole::kDType},
    {"torch", "complex32", GlobalRole::kDType},
    {"torch", "chalf", GlobalRole::kDType},
    {"torch", "qint8", GlobalRole::kDType},
    {"torch", "quint8", GlobalRole::kDType},
    {"torch", "qint32", GlobalRole::kDType},
    {"torch", "quint4x2", GlobalRole::kDType},
    {"torch", "quint2x4", GlobalRole::kDType},
    {"torch", "bits1x8", GlobalRole::kDType},
    {"torch", "bits2x4", GlobalRole::kDType},
    {"torch", "bits4x2", GlobalRole::kDType},
    {"torch", "bits8", GlobalRole::kDType},
    {"torch", "bits16", GlobalRole::kDType},
    {"torch", "int1", GlobalRole::kDType},
    {"torch", "int2", GlobalRole::kDType},
    {"torch", "int3", GlobalRole::kDType},
    {"torch", "int4", GlobalRole::kDType},
    {"torch", "int5", GlobalRole::kDType},
    {"torch", "int6", GlobalRole::kDType},
    {"torch", "int7", GlobalRole::kDType},
    {"torch", "uint1", GlobalRole::kDType},
    {"torch", "uint2", GlobalRole::kDType},
    {"torch", "uint3", GlobalRole::kDType},
    {"torch", "uint4", GlobalRole::kDType},
    {"torch", "uint5", GlobalRole::kDType},
    {"torch", "uint6", GlobalRole::kDType},
    {"torch", "uint7", GlobalRole::kDType},

    {"torch", "per_tensor_affine", GlobalRole::kConstant},
    {"torch", "per_tensor_symmetric", GlobalRole::kConstant},
    {"torch", "per_channel_affine", GlobalRole::kConstant},
    {"torch", "per_channel_symmetric", GlobalRole::kConstant},
    {"torch", "per_channel_affine_float_qparams", GlobalRole::kConstant},

    {"torch", "DoubleTensor", GlobalRole::kTensorClass},
    {"torch", "FloatTensor", GlobalRole::kTensorClass},
    {"torch", "HalfTensor", GlobalRole::kTensorClass},
    {"torch", "BFloat16Tensor", GlobalRole::kTensorClass},
    {"torch", "LongTensor", GlobalRole::kTensorClass},
    {"torch", "IntTensor", GlobalRole::kTensorClass},
    {"torch", "ShortTensor", GlobalRole::kTensorClass},
    {"torch", "CharTensor", GlobalRole::kTensorClass},
    {"torch", "ByteTensor", GlobalRole::kTensorClass},
    {"torch", "BoolTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "DoubleTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "FloatTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "HalfTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "BFloat16Tensor", GlobalRole::kTensorClass},
    {"torch.cuda", "LongTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "IntTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "ShortTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "CharTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "ByteTensor", GlobalRole::kTensorClass},
    {"torch.cuda", "BoolTensor", GlobalRole::kTensorClass},
});

}  // namespace

const PickleGlobal* FindPickleGlobal(std::string_view module, std::string_view name) {
  if (module == "__builtin__") module = "builtins";
  for (const PickleGlobal& global : kGlobals) {
    if (global.name == name && global.module == module) return &global;
  }
  return nullptr;
}

}  // namespace modelhost
