// The part of DLPack's C interface (version 1.1) that an exporter needs: numbers and layouts as
// https://dmlc.github.io/dlpack/latest/c_api.html has them. They are fixed.
#pragma once

#include <cstdint>

namespace modelhost::python {

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2 };

enum DLTypeCode : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e4m3fnuz = 11,
  kDLFloat8_e5m2 = 12,
  kDLFloat8_e5m2fnuz = 13,
  kDLFloat8_e8m0fnu = 14,
};

struct DLDevice {
  DLDeviceType type;
  int32_t id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // In elements.
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor* self);
};

inline constexpr uint64_t kDLReadOnly = uint64_t{1} << 0;
inline constexpr uint64_t kDLIsCopied = uint64_t{1} << 1;

struct DLVersion {
  uint32_t major;
  uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLVersion version;
  void* context;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor tensor;
};

}  // namespace modelhost::python
