// Memory that crosses processes as a descriptor: cuMemCreate and what belongs to it.
#include <fcntl.h>

#include <cstring>

#include "tests/fakes/fakecuda/fake_state.h"

using namespace fakecuda;  // lint: allow(using-std) the whole file is that interface
using modelhost::cuda::AccessDesc;
using modelhost::cuda::AllocationHandle;
using modelhost::cuda::AllocationProp;
using modelhost::cuda::AllocationType;
using modelhost::cuda::Flags64;
using modelhost::cuda::Granularity;
using modelhost::cuda::HandleType;
using modelhost::cuda::Location;
using modelhost::cuda::LocationType;

namespace {

bool GoodProp(const AllocationProp* prop) {
  static constexpr uint8_t kZero[4] = {};
  return prop != nullptr && prop->type == AllocationType::kPinned &&
         prop->location.type == LocationType::kDevice && GpuOf(prop->location.id) >= 0 &&
         prop->win32_metadata == nullptr && prop->flags.compression == 0 &&
         prop->flags.gpu_direct_rdma == 0 && prop->flags.usage == 0 &&
         std::memcmp(prop->flags.reserved, kZero, sizeof kZero) == 0 &&
         (static_cast<uint32_t>(prop->handle_types) & ~1U) == 0;
}

bool Can(Device device) {
  return AttributeOf(GpuOf(device), Attribute::kVirtualMemoryManagement) == 1;
}

bool CanShare(int gpu) { return AttributeOf(gpu, Attribute::kPosixFdHandles) == 1; }

bool Multiple(uint64_t bytes) { return bytes != 0 && bytes % GranularityBytes() == 0; }

}  // namespace

FAKE_CUDA_API cuMemGetAllocationGranularity(size_t* bytes, const AllocationProp* prop,
                                            Granularity option) {
  FAKE_CUDA_CALL("cuMemGetAllocationGranularity", Need::kInit);
  FAKE_CUDA_NEED(bytes != nullptr && GoodProp(prop), Rc::kInvalidValue, "properties");
  FAKE_CUDA_NEED(option == Granularity::kMinimum || option == Granularity::kRecommended,
                 Rc::kInvalidValue, "option");
  FAKE_CUDA_NEED(Can(prop->location.id), Rc::kNotSupported, "attribute 102 is 0");
  *bytes = GranularityBytes();
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemCreate(AllocationHandle* handle, size_t bytes, const AllocationProp* prop,
                          Flags64 flags) {
  FAKE_CUDA_CALL("cuMemCreate", Need::kInit);
  FAKE_CUDA_NEED(handle != nullptr && flags == 0, Rc::kInvalidValue, "null, or flags");
  FAKE_CUDA_NEED(GoodProp(prop), Rc::kInvalidValue, "properties");
  FAKE_CUDA_NEED(Can(prop->location.id), Rc::kNotSupported, "attribute 102 is 0");
  const int gpu = GpuOf(prop->location.id);
  FAKE_CUDA_NEED(prop->handle_types == HandleType::kNone || CanShare(gpu), Rc::kNotSupported,
                 "attribute 103 is 0");
  FAKE_CUDA_NEED(Multiple(bytes), Rc::kInvalidValue, "not a multiple of the granularity");
  Rc rc = Rc::kSuccess;
  auto memory =
      MakeMemory(gpu, bytes, static_cast<uint32_t>(prop->handle_types), /*legacy=*/false, &rc);
  FAKE_CUDA_NEED(memory != nullptr, rc, "the device is full");
  *handle = Driver().next_allocation++;
  Driver().allocations[*handle] = std::move(memory);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemRelease(AllocationHandle handle) {
  FAKE_CUDA_CALL("cuMemRelease", Need::kInit);
  FAKE_CUDA_NEED(Driver().allocations.erase(handle) == 1, Rc::kInvalidValue,
                 "no such handle; released twice?");
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemGetAllocationPropertiesFromHandle(AllocationProp* prop,
                                                     AllocationHandle handle) {
  FAKE_CUDA_CALL("cuMemGetAllocationPropertiesFromHandle", Need::kInit);
  const auto found = Driver().allocations.find(handle);
  FAKE_CUDA_NEED(prop != nullptr && found != Driver().allocations.end(), Rc::kInvalidValue,
                 "handle");
  *prop = {};
  prop->type = AllocationType::kPinned;
  prop->handle_types = static_cast<HandleType>(found->second->handle_types);
  prop->location = {LocationType::kDevice, DeviceOf(found->second->gpu)};
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemExportToShareableHandle(void* out, AllocationHandle handle, HandleType type,
                                           Flags64 flags) {
  FAKE_CUDA_CALL("cuMemExportToShareableHandle", Need::kInit);
  const auto found = Driver().allocations.find(handle);
  FAKE_CUDA_NEED(out != nullptr && flags == 0 && found != Driver().allocations.end(),
                 Rc::kInvalidValue, "null, handle or flags");
  FAKE_CUDA_NEED(type == HandleType::kPosixFd, Rc::kNotSupported, "type of handle");
  FAKE_CUDA_NEED((found->second->handle_types & 1U) != 0, Rc::kInvalidValue,
                 "descriptors were not asked for at cuMemCreate");
  // Not close-on-exec: nobody has seen that a real one is.
  const int fd = ::fcntl(found->second->fd, F_DUPFD, 3);
  FAKE_CUDA_NEED(fd >= 0, Rc::kOutOfMemory, "no descriptor is left");
  std::memcpy(out, &fd, sizeof fd);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemImportFromShareableHandle(AllocationHandle* handle, void* by_value,
                                             HandleType type) {
  FAKE_CUDA_CALL("cuMemImportFromShareableHandle", Need::kInit);
  FAKE_CUDA_NEED(handle != nullptr, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(type == HandleType::kPosixFd, Rc::kNotSupported, "type of handle");
  const auto value = reinterpret_cast<intptr_t>(by_value);
  FAKE_CUDA_NEED(value >= 0 && value < (1 << 20), Rc::kInvalidValue,
                 "not a descriptor; was its address given?");
  auto memory = OpenMemory(static_cast<int>(value));
  FAKE_CUDA_NEED(memory != nullptr && !memory->legacy, Rc::kInvalidValue,
                 "not a descriptor of device memory");
  FAKE_CUDA_NEED(DeviceOf(memory->gpu) >= 0, Rc::kInvalidDevice,
                 "memory of a GPU that this process does not see");
  FAKE_CUDA_NEED(CanShare(memory->gpu), Rc::kNotSupported, "attribute 103 is 0");
  *handle = Driver().next_allocation++;
  Driver().allocations[*handle] = std::move(memory);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemAddressReserve(DevicePtr* at, size_t bytes, size_t alignment, DevicePtr hint,
                                  Flags64 flags) {
  FAKE_CUDA_CALL("cuMemAddressReserve", Need::kInit);
  FAKE_CUDA_NEED(at != nullptr && Multiple(bytes) && flags == 0, Rc::kInvalidValue,
                 "null, size or flags");
  FAKE_CUDA_NEED((alignment & (alignment - 1)) == 0, Rc::kInvalidValue, "alignment");
  FAKE_CUDA_NEED(hint == 0, Rc::kInvalidValue, "hints are not modelled");
  const uintptr_t got = TakeAddresses(bytes, std::max<uint64_t>(alignment, GranularityBytes()));
  FAKE_CUDA_NEED(got != 0, Rc::kOutOfMemory, "no addresses are left");
  *at = got;
  Driver().reservations[got] = bytes;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemAddressFree(DevicePtr at, size_t bytes) {
  FAKE_CUDA_CALL("cuMemAddressFree", Need::kInit);
  State& state = Driver();
  const auto found = state.reservations.find(at);
  FAKE_CUDA_NEED(found != state.reservations.end() && found->second == bytes, Rc::kInvalidValue,
                 "not a whole reservation");
  const auto mapped = state.mappings.lower_bound(at);
  FAKE_CUDA_NEED(mapped == state.mappings.end() || mapped->first >= at + bytes, Rc::kInvalidValue,
                 "something is still mapped there");
  state.reservations.erase(found);
  FreeAddresses(at, bytes);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemMap(DevicePtr at, size_t bytes, size_t offset, AllocationHandle handle,
                       Flags64 flags) {
  FAKE_CUDA_CALL("cuMemMap", Need::kInit);
  State& state = Driver();
  const auto found = state.allocations.find(handle);
  FAKE_CUDA_NEED(found != state.allocations.end(), Rc::kInvalidValue, "handle");
  FAKE_CUDA_NEED(offset == 0 && flags == 0, Rc::kInvalidValue, "offset and flags must be 0");
  FAKE_CUDA_NEED(Multiple(bytes) && at % GranularityBytes() == 0 && bytes <= found->second->bytes,
                 Rc::kInvalidValue, "size or alignment");
  auto reserved = state.reservations.upper_bound(at);
  FAKE_CUDA_NEED(reserved != state.reservations.begin(), Rc::kInvalidValue, "not reserved");
  --reserved;
  FAKE_CUDA_NEED(at + bytes <= reserved->first + reserved->second, Rc::kInvalidValue,
                 "not inside one reservation");
  const auto next = state.mappings.lower_bound(at);
  DevicePtr base = 0;
  FAKE_CUDA_NEED((next == state.mappings.end() || next->first >= at + bytes) &&
                     FindMapping(at, &base) == nullptr,
                 Rc::kInvalidValue, "something is mapped there");
  FAKE_CUDA_NEED(MapAt(at, bytes, found->second->fd), Rc::kOutOfMemory, "mmap");
  state.mappings[at] = Mapped{bytes, found->second, {}, 0};
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemUnmap(DevicePtr at, size_t bytes) {
  FAKE_CUDA_CALL("cuMemUnmap", Need::kInit);
  State& state = Driver();
  const auto found = state.mappings.find(at);
  FAKE_CUDA_NEED(found != state.mappings.end() && found->second.bytes == bytes &&
                     !found->second.memory->legacy,
                 Rc::kInvalidValue, "not exactly what was mapped");
  FAKE_CUDA_NEED(!CopiesInFlight(at, bytes), Rc::kInvalidValue, "copies to it are in flight");
  UnmapAt(at, bytes);
  state.mappings.erase(found);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemSetAccess(DevicePtr at, size_t bytes, const AccessDesc* desc, size_t count) {
  FAKE_CUDA_CALL("cuMemSetAccess", Need::kInit);
  State& state = Driver();
  FAKE_CUDA_NEED(desc != nullptr && count == 1 && desc->location.type == LocationType::kDevice,
                 Rc::kInvalidValue, "description");
  const int gpu = GpuOf(desc->location.id);
  FAKE_CUDA_NEED(gpu >= 0, Rc::kInvalidDevice, "device");
  const auto access = static_cast<uint32_t>(desc->access);
  FAKE_CUDA_NEED(access == 0 || access == 1 || access == 3, Rc::kInvalidValue, "access");
  uint64_t covered = 0;
  for (auto it = state.mappings.find(at);
       it != state.mappings.end() && it->first == at + covered && covered < bytes; ++it) {
    covered += it->second.bytes;
    FAKE_CUDA_NEED(it->second.memory->gpu == gpu, Rc::kInvalidDevice,
                   "peer access is not modelled");
    FAKE_CUDA_NEED(
        access != 3 || !it->second.memory->imported || Number("FAKECUDA_DENY_IMPORT_RW", 0) == 0,
        Rc::kNotPermitted, "who imports may only read");
  }
  FAKE_CUDA_NEED(bytes != 0 && covered == bytes, Rc::kInvalidValue, "not whole mappings");
  for (auto it = state.mappings.find(at); it != state.mappings.end() && it->first < at + bytes;
       ++it) {
    it->second.access[gpu] = access;
  }
  ProtectAt(at, bytes, access);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemGetAccess(Flags64* access, const Location* location, DevicePtr at) {
  FAKE_CUDA_CALL("cuMemGetAccess", Need::kInit);
  DevicePtr base = 0;
  Mapped* const mapped = FindMapping(at, &base);
  FAKE_CUDA_NEED(
      access != nullptr && location != nullptr && mapped != nullptr && GpuOf(location->id) >= 0,
      Rc::kInvalidValue, "null, or an address that is not mapped");
  const auto found = mapped->access.find(GpuOf(location->id));
  *access = found == mapped->access.end() ? 0 : found->second;
  return Rc::kSuccess;
}
