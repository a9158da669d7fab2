// Compares cuda_abi.h and driver_table.h with the toolkit's cuda.h, at compile time. Built where
// there is one; exits 0.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "proto/cuda/driver_table.h"

namespace modelhost::cuda {
namespace {

// What a parameter is to the machine: its size, and whether it is an address.
template <typename A, typename B>
constexpr bool kSame =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>&& std::is_class_v<A> ==
                                  std::is_class_v<B>;
template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct SameCall<R(A...), S(B...)>
    : std::bool_constant<sizeof...(A) == sizeof...(B) && kSame<R, S> && (kSame<A, B> && ...)> {};
template <typename R, typename... A>
constexpr size_t CountOf(R (*)(A...)) {
  return sizeof...(A);
}
template <typename Ours, typename Theirs>
constexpr bool kSameCall = [] {
  if constexpr (CountOf(static_cast<Ours*>(nullptr)) != CountOf(static_cast<Theirs*>(nullptr))) {
    return false;
  } else {
    return SameCall<Ours, Theirs>::value;
  }
}();

// cuda.h's macros give the current suffix; driver_table.h spells it.
#define MODELHOST_CHECK(name, symbol, ...) \
  static_assert(kSameCall<__VA_ARGS__, decltype(::name)>, symbol);
MODELHOST_CUDA_REQUIRED(MODELHOST_CHECK)
MODELHOST_CUDA_VMM(MODELHOST_CHECK)
MODELHOST_CUDA_IPC(MODELHOST_CHECK)
#undef MODELHOST_CHECK

#define MODELHOST_RC(ours, theirs) static_assert(static_cast<int>(Rc::ours) == theirs)
MODELHOST_RC(kSuccess, CUDA_SUCCESS);
MODELHOST_RC(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
MODELHOST_RC(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
MODELHOST_RC(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
MODELHOST_RC(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
MODELHOST_RC(kStubLibrary, CUDA_ERROR_STUB_LIBRARY);
MODELHOST_RC(kNoDevice, CUDA_ERROR_NO_DEVICE);
MODELHOST_RC(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
MODELHOST_RC(kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
MODELHOST_RC(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
MODELHOST_RC(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
MODELHOST_RC(kNotFound, CUDA_ERROR_NOT_FOUND);
MODELHOST_RC(kNotReady, CUDA_ERROR_NOT_READY);
MODELHOST_RC(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
MODELHOST_RC(kHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
MODELHOST_RC(kHostMemoryNotRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
MODELHOST_RC(kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
MODELHOST_RC(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
MODELHOST_RC(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
MODELHOST_RC(kCompatNotSupportedOnDevice, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE);
MODELHOST_RC(kUnknown, CUDA_ERROR_UNKNOWN);
#undef MODELHOST_RC

#define MODELHOST_ATTRIBUTE(ours, theirs) \
  static_assert(static_cast<int>(Attribute::ours) == CU_DEVICE_ATTRIBUTE_##theirs)
MODELHOST_ATTRIBUTE(kIntegrated, INTEGRATED);
MODELHOST_ATTRIBUTE(kUnifiedAddressing, UNIFIED_ADDRESSING);
MODELHOST_ATTRIBUTE(kCapabilityMajor, COMPUTE_CAPABILITY_MAJOR);
MODELHOST_ATTRIBUTE(kCapabilityMinor, COMPUTE_CAPABILITY_MINOR);
MODELHOST_ATTRIBUTE(kPageableMemoryAccess, PAGEABLE_MEMORY_ACCESS);
MODELHOST_ATTRIBUTE(kHostRegister, HOST_REGISTER_SUPPORTED);
MODELHOST_ATTRIBUTE(kPageableUsesHostPageTables, PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
MODELHOST_ATTRIBUTE(kVirtualMemoryManagement, VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
MODELHOST_ATTRIBUTE(kPosixFdHandles, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
MODELHOST_ATTRIBUTE(kReadOnlyHostRegister, READ_ONLY_HOST_REGISTER_SUPPORTED);
#undef MODELHOST_ATTRIBUTE

static_assert(static_cast<int>(AllocationType::kPinned) == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(static_cast<int>(LocationType::kDevice) == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(static_cast<int>(HandleType::kPosixFd) == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(static_cast<int>(Granularity::kMinimum) == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(static_cast<int>(Granularity::kRecommended) == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(static_cast<int>(Access::kRead) == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(static_cast<int>(Access::kReadWrite) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kHostRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY);
static_assert(kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

static_assert(sizeof(AllocationProp) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProp, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProp, win32_metadata) ==
              offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(AllocationProp, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(offsetof(AllocationProp, flags.usage) ==
              offsetof(CUmemAllocationProp, allocFlags.usage));
static_assert(sizeof(AccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDesc, access) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(Location) == sizeof(CUmemLocation));
static_assert(offsetof(Location, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle) && sizeof(Uuid) == sizeof(CUuuid));
static_assert(sizeof(DevicePtr) == sizeof(CUdeviceptr) && sizeof(Device) == sizeof(CUdevice));

}  // namespace
}  // namespace modelhost::cuda

int main() { return 0; }
