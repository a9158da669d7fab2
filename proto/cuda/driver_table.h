// Every function of the driver that is called, by its exact symbol.
//
// The suffix matters: a bare "cuMemcpyHtoD" is the interface of 2009, with 32-bit device addresses.
// Lists of X(member, symbol, type of the function); the member is the name without the suffix.
#pragma once

#include "proto/cuda/cuda_abi.h"

// Every driver since CUDA 10.
#define MODELHOST_CUDA_REQUIRED(X)                                                               \
  X(cuInit, "cuInit", Rc(uint32_t))                                                              \
  X(cuDriverGetVersion, "cuDriverGetVersion", Rc(int*))                                          \
  X(cuGetErrorName, "cuGetErrorName", Rc(Rc, const char**))                                      \
  X(cuGetErrorString, "cuGetErrorString", Rc(Rc, const char**))                                  \
  X(cuDeviceGetCount, "cuDeviceGetCount", Rc(int*))                                              \
  X(cuDeviceGet, "cuDeviceGet", Rc(Device*, int))                                                \
  X(cuDeviceGetName, "cuDeviceGetName", Rc(char*, int, Device))                                  \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", Rc(size_t*, Device))                                \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", Rc(int*, Attribute, Device))                   \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", Rc(ContextHandle*, Device))            \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", Rc(Device))                       \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", Rc(ContextHandle))                                       \
  X(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", Rc(Device, uint32_t*, int*))       \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", Rc(ContextHandle*))                                      \
  X(cuCtxGetDevice, "cuCtxGetDevice", Rc(Device*))                                               \
  X(cuCtxSynchronize, "cuCtxSynchronize", Rc())                                                  \
  X(cuMemGetInfo, "cuMemGetInfo_v2", Rc(size_t*, size_t*))                                       \
  X(cuMemHostAlloc, "cuMemHostAlloc", Rc(void**, size_t, uint32_t))                              \
  X(cuMemFreeHost, "cuMemFreeHost", Rc(void*))                                                   \
  X(cuMemHostRegister, "cuMemHostRegister_v2", Rc(void*, size_t, uint32_t))                      \
  X(cuMemHostUnregister, "cuMemHostUnregister", Rc(void*))                                       \
  X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", Rc(DevicePtr*, void*, uint32_t))  \
  X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", Rc(DevicePtr, const void*, size_t))                         \
  X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", Rc(void*, DevicePtr, size_t))                               \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", Rc(DevicePtr, const void*, size_t, StreamHandle)) \
  X(cuStreamCreate, "cuStreamCreate", Rc(StreamHandle*, uint32_t))                               \
  X(cuStreamDestroy, "cuStreamDestroy_v2", Rc(StreamHandle))                                     \
  X(cuStreamSynchronize, "cuStreamSynchronize", Rc(StreamHandle))                                \
  X(cuEventCreate, "cuEventCreate", Rc(EventHandle*, uint32_t))                                  \
  X(cuEventDestroy, "cuEventDestroy_v2", Rc(EventHandle))                                        \
  X(cuEventRecord, "cuEventRecord", Rc(EventHandle, StreamHandle))                               \
  X(cuEventQuery, "cuEventQuery", Rc(EventHandle))                                               \
  X(cuEventSynchronize, "cuEventSynchronize", Rc(EventHandle))

// Memory that crosses processes as a descriptor. All or none of them are used.
#define MODELHOST_CUDA_VMM(X)                                                                  \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                            \
    Rc(size_t*, const AllocationProp*, Granularity))                                           \
  X(cuMemCreate, "cuMemCreate", Rc(AllocationHandle*, size_t, const AllocationProp*, Flags64)) \
  X(cuMemRelease, "cuMemRelease", Rc(AllocationHandle))                                        \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                              \
    Rc(void*, AllocationHandle, HandleType, Flags64))                                          \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                          \
    Rc(AllocationHandle*, void*, HandleType))                                                  \
  X(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle",          \
    Rc(AllocationProp*, AllocationHandle))                                                     \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                \
    Rc(DevicePtr*, size_t, size_t, DevicePtr, Flags64))                                        \
  X(cuMemAddressFree, "cuMemAddressFree", Rc(DevicePtr, size_t))                               \
  X(cuMemMap, "cuMemMap", Rc(DevicePtr, size_t, size_t, AllocationHandle, Flags64))            \
  X(cuMemUnmap, "cuMemUnmap", Rc(DevicePtr, size_t))                                           \
  X(cuMemSetAccess, "cuMemSetAccess", Rc(DevicePtr, size_t, const AccessDesc*, size_t))        \
  X(cuMemGetAccess, "cuMemGetAccess", Rc(Flags64*, const Location*, DevicePtr))                \
  X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", Rc(Uuid*, Device))

// The legacy handles of drivers that lack the above.
#define MODELHOST_CUDA_IPC(X)                                                         \
  X(cuMemAlloc, "cuMemAlloc_v2", Rc(DevicePtr*, size_t))                              \
  X(cuMemFree, "cuMemFree_v2", Rc(DevicePtr))                                         \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", Rc(IpcHandle*, DevicePtr))                \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", Rc(DevicePtr*, IpcHandle, uint32_t)) \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", Rc(DevicePtr))

// For checks that store through a kernel, and the identity of GPUs on old drivers.
#define MODELHOST_CUDA_EXTRA(X)                                                                 \
  X(cuDeviceGetUuidV1, "cuDeviceGetUuid", Rc(Uuid*, Device))                                    \
  X(cuMemsetD8, "cuMemsetD8_v2", Rc(DevicePtr, unsigned char, size_t))                          \
  X(cuModuleLoadData, "cuModuleLoadData", Rc(ModuleHandle*, const void*))                       \
  X(cuModuleUnload, "cuModuleUnload", Rc(ModuleHandle))                                         \
  X(cuModuleGetFunction, "cuModuleGetFunction", Rc(FunctionHandle*, ModuleHandle, const char*)) \
  X(cuLaunchKernel, "cuLaunchKernel",                                                           \
    Rc(FunctionHandle, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,    \
       StreamHandle, void**, void**))

#define MODELHOST_CUDA_ALL(X) \
  MODELHOST_CUDA_REQUIRED(X)  \
  MODELHOST_CUDA_VMM(X)       \
  MODELHOST_CUDA_IPC(X)       \
  MODELHOST_CUDA_EXTRA(X)

namespace modelhost::cuda {

// Null: the driver does not have it.
struct DriverTable {
  template <typename Function>
  using Entry = Function*;
#define MODELHOST_CUDA_MEMBER(name, symbol, ...) Entry<__VA_ARGS__> name = nullptr;
  MODELHOST_CUDA_ALL(MODELHOST_CUDA_MEMBER)
#undef MODELHOST_CUDA_MEMBER
};

}  // namespace modelhost::cuda
