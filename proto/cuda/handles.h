// Owners of everything that the driver hands out: no naked handle exists outside this file.
//
// Every owner keeps a pointer to its Driver, which outlives it, and gives its handle back when it
// is destroyed; what the driver refuses to take back is counted there (Driver::lost_handles).
// Sizes are in bytes. Errors are those of Driver::Check. Thread-compatible. What needs a current
// context on the calling thread says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "proto/cuda/driver.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::cuda {

// A handle and the call that gives it back.
template <typename Handle, Rc (*kGiveBack)(const DriverTable&, Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const Driver& driver, Handle handle) : driver_(&driver), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)), handle_(other.handle_) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    driver_ = std::exchange(other.driver_, nullptr);
    handle_ = other.handle_;
    return *this;
  }
  ~Owned() { Reset(); }

  void Reset() {
    if (driver_ == nullptr) return;
    const Driver& driver = *std::exchange(driver_, nullptr);
    driver.GaveBack(kGiveBack(driver.call(), handle_));
  }
  bool valid() const { return driver_ != nullptr; }
  // For a call of the driver only.
  Handle get() const { return handle_; }

 private:
  const Driver* driver_ = nullptr;  // Null: owns nothing.
  Handle handle_{};
};

struct Range {
  DevicePtr at = 0;
  size_t bytes = 0;
};
struct DeviceContext {
  Device device = 0;
  ContextHandle context = nullptr;
};

Rc GiveBack(const DriverTable& call, StreamHandle stream);
Rc GiveBack(const DriverTable& call, EventHandle event);
Rc GiveBack(const DriverTable& call, ModuleHandle module);
Rc GiveBack(const DriverTable& call, std::span<std::byte> pinned);
Rc GiveBack(const DriverTable& call, DeviceContext context);
Rc GiveBackAllocation(const DriverTable& call, AllocationHandle allocation);
Rc GiveBackReservation(const DriverTable& call, Range range);
Rc GiveBackMapping(const DriverTable& call, Range range);
Rc GiveBackMemory(const DriverTable& call, DevicePtr memory);
Rc GiveBackIpc(const DriverTable& call, DevicePtr memory);
Rc GiveBackRegistration(const DriverTable& call, void* host);

using Stream = Owned<StreamHandle, GiveBack>;
using Event = Owned<EventHandle, GiveBack>;
using Module = Owned<ModuleHandle, GiveBack>;
using PinnedBuffer = Owned<std::span<std::byte>, GiveBack>;
using Allocation = Owned<AllocationHandle, GiveBackAllocation>;
using Reservation = Owned<Range, GiveBackReservation>;
using Mapping = Owned<Range, GiveBackMapping>;
using LegacyMemory = Owned<DevicePtr, GiveBackMemory>;  // cuMemAlloc, for cuIpcGetMemHandle.
using IpcMapping = Owned<DevicePtr, GiveBackIpc>;
using HostRegistration = Owned<void*, GiveBackRegistration>;

// The primary context of a device, which frameworks in the same process use too: device addresses
// mean the same to all of them. The last one who gives it back also takes it off the calling
// thread.
class PrimaryContext {
 public:
  static Result<PrimaryContext> Retain(const Driver& driver, Device device);
  // For the calling thread.
  Result<void> MakeCurrent() const;
  Device device() const { return context_.get().device; }

 private:
  PrimaryContext(const Driver& driver, DeviceContext context)
      : driver_(&driver), context_(driver, context) {}
  const Driver* driver_;
  Owned<DeviceContext, GiveBack> context_;
};

// Makes a context current for a block and puts back what was before: for a library inside a
// program that has contexts of its own.
class ScopedContext {
 public:
  static Result<ScopedContext> Enter(const Driver& driver, const PrimaryContext& context);
  ScopedContext(ScopedContext&& other) noexcept
      : driver_(std::exchange(other.driver_, nullptr)), before_(other.before_) {}
  ScopedContext& operator=(ScopedContext&&) = delete;
  ~ScopedContext();

 private:
  ScopedContext(const Driver& driver, ContextHandle before) : driver_(&driver), before_(before) {}
  const Driver* driver_;
  ContextHandle before_;
};

// Physical memory that can be exported; no context is needed. `bytes` is a multiple of
// MinimumGranularity.
Result<Allocation> CreateAllocation(const Driver& driver, Device device, uint64_t bytes);
// `fd` stays the caller's, who may close it at once.
Result<Allocation> ImportAllocation(const Driver& driver, const UniqueFd& fd);
// A descriptor that keeps the memory by itself, whoever dies; close-on-exec.
Result<UniqueFd> ExportAllocation(const Driver& driver, const Allocation& allocation);
Result<uint64_t> MinimumGranularity(const Driver& driver, Device device);
// The device that an allocation lies on.
Result<Device> DeviceOf(const Driver& driver, const Allocation& allocation);

// Addresses without memory.
Result<Reservation> ReserveAddresses(const Driver& driver, uint64_t bytes);
// Puts `allocation` at `at`, inside a reservation, for `device` with `access`. The allocation may
// be given back while it is mapped.
Result<Mapping> MapAllocation(const Driver& driver, const Allocation& allocation, Range at,
                              Device device, Access access);

// An imported segment at addresses of its own.
struct ImportedSegment {
  // In this order: the mapping goes first.
  Reservation reservation;
  Mapping mapping;
  Range range() const { return mapping.get(); }
};
Result<ImportedSegment> ImportSegment(const Driver& driver, const UniqueFd& fd, uint64_t bytes,
                                      Device device, Access access);

// These need a current context.
Result<Stream> CreateStream(const Driver& driver);
Result<Event> CreateEvent(const Driver& driver);
Result<PinnedBuffer> PinBuffer(const Driver& driver, uint64_t bytes);
Result<LegacyMemory> AllocateLegacy(const Driver& driver, uint64_t bytes);
Result<IpcHandle> ExportLegacy(const Driver& driver, const LegacyMemory& memory);
// Not in the process that made it. No protection: whoever opens it may write.
Result<IpcMapping> OpenLegacy(const Driver& driver, const IpcHandle& handle);
// Whole pages of host memory, lent, for devices to reach; no protection, and the pages must be
// writable here.
Result<HostRegistration> RegisterHost(const Driver& driver, std::span<std::byte> host);
Result<DevicePtr> DeviceAddressOf(const Driver& driver, const HostRegistration& host);
struct DeviceMemory {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};
Result<DeviceMemory> MemoryInfo(const Driver& driver);

}  // namespace modelhost::cuda
