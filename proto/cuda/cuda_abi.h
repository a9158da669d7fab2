// The part of the CUDA driver's binary interface that this project calls: types, numbers, layouts.
//
// Written by hand so that everything builds on a machine without the toolkit. What NVIDIA's cuda.h
// says is compared with it where there is one (cuda_abi_check). The driver keeps these for good:
// a changed interface gets a new suffix, and driver_table.h names every symbol with its suffix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace modelhost::cuda {

// CUresult. Others than these occur: treat the type as open.
enum class Rc : int32_t {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kStubLibrary = 34,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemDriverMismatch = 803,
  kCompatNotSupportedOnDevice = 804,
  kUnknown = 999,
};

// CUdevice_attribute.
enum class Attribute : int32_t {
  kIntegrated = 18,
  kUnifiedAddressing = 41,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kPageableMemoryAccess = 88,
  kHostRegister = 99,
  kPageableUsesHostPageTables = 100,
  kVirtualMemoryManagement = 102,
  kPosixFdHandles = 103,
  kReadOnlyHostRegister = 113,
};

using Device = int32_t;
using DevicePtr = unsigned long long;         // NOLINT(runtime/int): as in cuda.h
using AllocationHandle = unsigned long long;  // NOLINT(runtime/int)
using Flags64 = unsigned long long;           // NOLINT(runtime/int)

// Opaque objects of the driver.
struct ContextObject;
struct StreamObject;
struct EventObject;
struct ModuleObject;
struct FunctionObject;
using ContextHandle = ContextObject*;
using StreamHandle = StreamObject*;
using EventHandle = EventObject*;
using ModuleHandle = ModuleObject*;
using FunctionHandle = FunctionObject*;

enum class AllocationType : uint32_t { kPinned = 1 };
enum class LocationType : uint32_t { kDevice = 1 };
enum class HandleType : uint32_t { kNone = 0, kPosixFd = 1 };
enum class Granularity : uint32_t { kMinimum = 0, kRecommended = 1 };
enum class Access : uint32_t { kNone = 0, kRead = 1, kReadWrite = 3 };

struct Uuid {
  uint8_t bytes[16];
};

struct Location {
  LocationType type;
  Device id;
};

struct AllocationProp {
  AllocationType type;
  HandleType handle_types;
  Location location;
  void* win32_metadata;
  struct {
    uint8_t compression;
    uint8_t gpu_direct_rdma;
    uint16_t usage;
    uint8_t reserved[4];
  } flags;
};

struct AccessDesc {
  Location location;
  Access access;
};

inline constexpr size_t kIpcHandleBytes = 64;
struct IpcHandle {
  uint8_t bytes[kIpcHandleBytes];
};

inline constexpr uint32_t kStreamNonBlocking = 1;
inline constexpr uint32_t kEventDisableTiming = 2;
inline constexpr uint32_t kHostRegisterDeviceMap = 2;
inline constexpr uint32_t kHostRegisterReadOnly = 8;
inline constexpr uint32_t kIpcLazyPeerAccess = 1;

// VMM descriptors work from this driver on: before it, CUDA_VISIBLE_DEVICES breaks imports.
inline constexpr int kVmmDriverVersion = 12000;

static_assert(sizeof(Uuid) == 16 && std::is_trivially_copyable_v<Uuid>);
static_assert(sizeof(Location) == 8 && offsetof(Location, id) == 4);
static_assert(sizeof(AllocationProp) == 32 && offsetof(AllocationProp, handle_types) == 4);
static_assert(offsetof(AllocationProp, location) == 8);
static_assert(offsetof(AllocationProp, win32_metadata) == 16);
static_assert(offsetof(AllocationProp, flags) == 24);
static_assert(sizeof(AccessDesc) == 12 && offsetof(AccessDesc, access) == 8);
static_assert(sizeof(IpcHandle) == 64);
static_assert(sizeof(DevicePtr) == 8 && sizeof(AllocationHandle) == 8);

}  // namespace modelhost::cuda
