#include "proto/cuda/handles.h"

#include <fcntl.h>

#include <cerrno>
#include <string>

namespace modelhost::cuda {
namespace {

AllocationProp PropOf(Device device) {
  AllocationProp prop{};
  prop.type = AllocationType::kPinned;
  prop.handle_types = HandleType::kPosixFd;
  prop.location = {LocationType::kDevice, device};
  return prop;
}

std::string BytesText(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

Result<void> NeedVmm(const Driver& driver) {
  if (driver.no_vmm().empty()) return {};
  return Error{Code::kUnimplemented, "device memory by descriptor: " + driver.no_vmm(), 0};
}

Result<void> NeedIpc(const Driver& driver) {
  if (driver.has_ipc()) return {};
  return Error{Code::kUnimplemented, "the driver lacks the legacy CUDA IPC calls", 0};
}

}  // namespace

Rc GiveBack(const DriverTable& call, StreamHandle stream) { return call.cuStreamDestroy(stream); }
Rc GiveBack(const DriverTable& call, EventHandle event) { return call.cuEventDestroy(event); }
Rc GiveBack(const DriverTable& call, ModuleHandle module) { return call.cuModuleUnload(module); }
Rc GiveBack(const DriverTable& call, std::span<std::byte> pinned) {
  return call.cuMemFreeHost(pinned.data());
}
Rc GiveBack(const DriverTable& call, DeviceContext context) {
  ContextHandle current = nullptr;
  const bool is_current =
      call.cuCtxGetCurrent(&current) == Rc::kSuccess && current == context.context;
  const Rc released = call.cuDevicePrimaryCtxRelease(context.device);
  uint32_t flags = 0;
  int active = 0;
  if (is_current &&
      (call.cuDevicePrimaryCtxGetState(context.device, &flags, &active) != Rc::kSuccess ||
       active == 0)) {
    (void)call.cuCtxSetCurrent(nullptr);
  }
  return released;
}
Rc GiveBackAllocation(const DriverTable& call, AllocationHandle allocation) {
  return call.cuMemRelease(allocation);
}
Rc GiveBackReservation(const DriverTable& call, Range range) {
  return call.cuMemAddressFree(range.at, range.bytes);
}
Rc GiveBackMapping(const DriverTable& call, Range range) {
  return call.cuMemUnmap(range.at, range.bytes);
}
Rc GiveBackMemory(const DriverTable& call, DevicePtr memory) { return call.cuMemFree(memory); }
Rc GiveBackIpc(const DriverTable& call, DevicePtr memory) {
  return call.cuIpcCloseMemHandle(memory);
}
Rc GiveBackRegistration(const DriverTable& call, void* host) {
  return call.cuMemHostUnregister(host);
}

Result<PrimaryContext> PrimaryContext::Retain(const Driver& driver, Device device) {
  ContextHandle context = nullptr;
  if (const Rc rc = driver.call().cuDevicePrimaryCtxRetain(&context, device); rc != Rc::kSuccess) {
    return driver.ToError(rc, "the primary context of GPU " + std::to_string(device));
  }
  return PrimaryContext(driver, {device, context});
}

Result<void> PrimaryContext::MakeCurrent() const {
  return driver_->Check(driver_->call().cuCtxSetCurrent(context_.get().context),
                        "make a context current");
}

Result<ScopedContext> ScopedContext::Enter(const Driver& driver, const PrimaryContext& context) {
  ContextHandle before = nullptr;
  if (const Rc rc = driver.call().cuCtxGetCurrent(&before); rc != Rc::kSuccess) {
    return driver.ToError(rc, "ask for the current context");
  }
  if (auto made = context.MakeCurrent(); !made.ok()) return std::move(made).error();
  return ScopedContext(driver, before);
}

ScopedContext::~ScopedContext() {
  if (driver_ != nullptr) (void)driver_->call().cuCtxSetCurrent(before_);
}

Result<Allocation> CreateAllocation(const Driver& driver, Device device, uint64_t bytes) {
  if (auto can = NeedVmm(driver); !can.ok()) return std::move(can).error();
  const AllocationProp prop = PropOf(device);
  AllocationHandle handle = 0;
  if (const Rc rc = driver.call().cuMemCreate(&handle, bytes, &prop, 0); rc != Rc::kSuccess) {
    return driver.ToError(rc, "device memory of " + BytesText(bytes));
  }
  return Allocation(driver, handle);
}

Result<Allocation> ImportAllocation(const Driver& driver, const UniqueFd& fd) {
  if (auto can = NeedVmm(driver); !can.ok()) return std::move(can).error();
  AllocationHandle handle = 0;
  // By value, in the place of a pointer.
  void* const by_value = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
  const Rc rc =
      driver.call().cuMemImportFromShareableHandle(&handle, by_value, HandleType::kPosixFd);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "import a descriptor of device memory");
  return Allocation(driver, handle);
}

Result<UniqueFd> ExportAllocation(const Driver& driver, const Allocation& allocation) {
  int fd = -1;
  const Rc rc =
      driver.call().cuMemExportToShareableHandle(&fd, allocation.get(), HandleType::kPosixFd, 0);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "export device memory");
  UniqueFd exported(fd);
  // No driver promises it, and one inherited copy keeps the memory of a whole version.
  if (::fcntl(exported.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return ErrnoError(errno, "a descriptor of device memory");
  }
  return exported;
}

Result<uint64_t> MinimumGranularity(const Driver& driver, Device device) {
  if (auto can = NeedVmm(driver); !can.ok()) return std::move(can).error();
  const AllocationProp prop = PropOf(device);
  size_t bytes = 0;
  const Rc rc = driver.call().cuMemGetAllocationGranularity(&bytes, &prop, Granularity::kMinimum);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "the granularity of device memory");
  if (bytes == 0 || (bytes & (bytes - 1)) != 0) {
    return Error{Code::kInternal, "the granularity of device memory: " + BytesText(bytes), 0};
  }
  return bytes;
}

Result<Device> DeviceOf(const Driver& driver, const Allocation& allocation) {
  AllocationProp prop{};
  const Rc rc = driver.call().cuMemGetAllocationPropertiesFromHandle(&prop, allocation.get());
  if (rc != Rc::kSuccess) return driver.ToError(rc, "the device of imported memory");
  return prop.location.id;
}

Result<Reservation> ReserveAddresses(const Driver& driver, uint64_t bytes) {
  if (auto can = NeedVmm(driver); !can.ok()) return std::move(can).error();
  DevicePtr at = 0;
  const Rc rc = driver.call().cuMemAddressReserve(&at, bytes, 0, 0, 0);
  if (rc != Rc::kSuccess)
    return driver.ToError(rc, "reserve device addresses of " + BytesText(bytes));
  return Reservation(driver, Range{at, bytes});
}

Result<Mapping> MapAllocation(const Driver& driver, const Allocation& allocation, Range at,
                              Device device, Access access) {
  Rc rc = driver.call().cuMemMap(at.at, at.bytes, 0, allocation.get(), 0);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "map device memory of " + BytesText(at.bytes));
  Mapping mapping(driver, at);
  const AccessDesc desc{{LocationType::kDevice, device}, access};
  rc = driver.call().cuMemSetAccess(at.at, at.bytes, &desc, 1);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "allow access to device memory");
  return mapping;
}

Result<ImportedSegment> ImportSegment(const Driver& driver, const UniqueFd& fd, uint64_t bytes,
                                      Device device, Access access) {
  auto allocation = ImportAllocation(driver, fd);
  if (!allocation.ok()) return std::move(allocation).error();
  auto reservation = ReserveAddresses(driver, bytes);
  if (!reservation.ok()) return std::move(reservation).error();
  auto mapping = MapAllocation(driver, *allocation, reservation->get(), device, access);
  if (!mapping.ok()) return std::move(mapping).error();
  return ImportedSegment{*std::move(reservation), *std::move(mapping)};
}

Result<Stream> CreateStream(const Driver& driver) {
  StreamHandle stream = nullptr;
  const Rc rc = driver.call().cuStreamCreate(&stream, kStreamNonBlocking);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "create a stream");
  return Stream(driver, stream);
}

Result<Event> CreateEvent(const Driver& driver) {
  EventHandle event = nullptr;
  const Rc rc = driver.call().cuEventCreate(&event, kEventDisableTiming);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "create an event");
  return Event(driver, event);
}

Result<PinnedBuffer> PinBuffer(const Driver& driver, uint64_t bytes) {
  void* at = nullptr;
  const Rc rc = driver.call().cuMemHostAlloc(&at, bytes, 0);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "pinned host memory of " + BytesText(bytes));
  return PinnedBuffer(driver, std::span<std::byte>(static_cast<std::byte*>(at), bytes));
}

Result<LegacyMemory> AllocateLegacy(const Driver& driver, uint64_t bytes) {
  if (auto can = NeedIpc(driver); !can.ok()) return std::move(can).error();
  DevicePtr at = 0;
  const Rc rc = driver.call().cuMemAlloc(&at, bytes);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "device memory of " + BytesText(bytes));
  return LegacyMemory(driver, at);
}

Result<IpcHandle> ExportLegacy(const Driver& driver, const LegacyMemory& memory) {
  IpcHandle handle{};
  const Rc rc = driver.call().cuIpcGetMemHandle(&handle, memory.get());
  if (rc != Rc::kSuccess) return driver.ToError(rc, "export device memory as a CUDA IPC handle");
  return handle;
}

Result<IpcMapping> OpenLegacy(const Driver& driver, const IpcHandle& handle) {
  if (auto can = NeedIpc(driver); !can.ok()) return std::move(can).error();
  DevicePtr at = 0;
  const Rc rc = driver.call().cuIpcOpenMemHandle(&at, handle, kIpcLazyPeerAccess);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "open a CUDA IPC handle");
  return IpcMapping(driver, at);
}

Result<HostRegistration> RegisterHost(const Driver& driver, std::span<std::byte> host) {
  const Rc rc = driver.call().cuMemHostRegister(host.data(), host.size(), kHostRegisterDeviceMap);
  if (rc != Rc::kSuccess) {
    return driver.ToError(rc, "register host memory of " + BytesText(host.size()));
  }
  return HostRegistration(driver, host.data());
}

Result<DevicePtr> DeviceAddressOf(const Driver& driver, const HostRegistration& host) {
  DevicePtr at = 0;
  const Rc rc = driver.call().cuMemHostGetDevicePointer(&at, host.get(), 0);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "the device's address of host memory");
  return at;
}

Result<DeviceMemory> MemoryInfo(const Driver& driver) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  const Rc rc = driver.call().cuMemGetInfo(&free_bytes, &total_bytes);
  if (rc != Rc::kSuccess) return driver.ToError(rc, "ask for the free device memory");
  return DeviceMemory{free_bytes, total_bytes};
}

}  // namespace modelhost::cuda
