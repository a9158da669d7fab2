// The device memory of one version in this process: its segments, mapped read-only.
//
//   vmm_fd           descriptors of device memory, mapped PROT_READ: a store faults
//   host_registered  descriptors of host memory, mapped and registered: nothing protects it
//   cuda_ipc         legacy handles, opened: nothing protects it
//   host_direct      no segments: the GPU reads the mapped host regions themselves
//
// Two ways to have segments mapped: at addresses of their own, for good (Map), or at addresses that
// outlive this image (MapAt), which another image takes over. Sizes in bytes. Segment() is for any
// thread; all else is for one thread at a time. Destroyed on any thread; in a forked child nothing
// is given back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/src/cuda_device.h"
#include "client/src/index_reader.h"
#include "proto/abi/handle_frame.h"
#include "proto/cuda/handles.h"
#include "proto/handle/error.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// What a grant brought, as it came.
struct DeviceGrant {
  abi::DeviceMode mode = abi::DeviceMode::kNone;
  std::vector<abi::DeviceRef> refs;  // In the order of their numbers, from 0.
  std::vector<UniqueFd> fds;         // kVmmFd, kHostRegistered: one for each.
};

// "vmm_fd", "none", ...
const char* DeviceModeText(abi::DeviceMode mode);

// Device addresses, reserved for segments of fixed sizes, that images take in turn.
class CudaPlaces {
 public:
  // RESOURCE_EXHAUSTED.
  static Result<std::shared_ptr<const CudaPlaces>> Reserve(std::shared_ptr<const CudaDevice> device,
                                                           const std::vector<uint64_t>& bytes);
  ~CudaPlaces();
  CudaPlaces(const CudaPlaces&) = delete;

  cuda::Range at(size_t segment) const { return (*reservations_)[segment].get(); }
  size_t size() const { return reservations_->size(); }

 private:
  explicit CudaPlaces(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}
  const std::shared_ptr<const CudaDevice> device_;
  std::unique_ptr<std::vector<cuda::Reservation>> reservations_ =
      std::make_unique<std::vector<cuda::Reservation>>();
};

class CudaImage {
 public:
  // Takes what came; nothing is mapped yet. `name` is for error texts: "planner@7".
  // DATA_LOSS: it is not what `index` says, or not memory of that GPU. FAILED_PRECONDITION: this
  // GPU or its driver cannot use memory of that kind. UNIMPLEMENTED: a mode that is newer than this
  // library. RESOURCE_EXHAUSTED. `grant.mode` is not kNone.
  static Result<std::unique_ptr<CudaImage>> Import(std::shared_ptr<const CudaDevice> device,
                                                   DeviceGrant grant, const IndexReader& index,
                                                   std::string name);
  ~CudaImage();
  CudaImage(const CudaImage&) = delete;

  // Errors as Import. Once.
  Result<void> Map();

  // UNIMPLEMENTED unless the mode is kVmmFd. On failure nothing of it is mapped. `places` fit.
  Result<void> MapAt(std::shared_ptr<const CudaPlaces> places);
  // Takes it off its places again; MapAt may put it back.
  void Unmap();

  abi::DeviceMode mode() const { return mode_; }
  const std::shared_ptr<const CudaDevice>& device() const { return device_; }
  const std::vector<uint64_t>& segment_bytes() const { return bytes_; }
  // 0: not mapped now.
  cuda::DevicePtr Segment(size_t number) const {
    return bases_[number].load(std::memory_order_acquire);
  }
  bool mapped() const { return mapped_.load(std::memory_order_acquire); }

 private:
  CudaImage(std::shared_ptr<const CudaDevice> device, abi::DeviceMode mode, std::string name)
      : device_(std::move(device)), mode_(mode), name_(std::move(name)) {}
  Result<void> Take(DeviceGrant& grant);
  Result<void> ImportSegments(DeviceGrant& grant);
  Result<void> RegisterSegments(DeviceGrant& grant);
  Result<void> OpenSegments(const DeviceGrant& grant);
  Result<void> MapAll(const std::vector<cuda::Range>& at);
  std::string What(size_t segment) const;

  // What the driver gave. Destroyed as a whole, or never.
  struct Held {
    std::vector<cuda::Allocation> allocations;  // kVmmFd, until they are mapped for good.
    std::vector<SharedMapping> host;            // kHostRegistered
    std::vector<cuda::HostRegistration> registrations;
    std::vector<cuda::IpcMapping> opened;         // kCudaIpc
    std::vector<cuda::Reservation> reservations;  // kVmmFd, of its own.
    std::shared_ptr<const CudaPlaces> places;     // kVmmFd, or of others too.
    std::vector<cuda::Mapping> mappings;
  };

  const std::shared_ptr<const CudaDevice> device_;
  const abi::DeviceMode mode_;
  const std::string name_;
  std::vector<uint64_t> bytes_;  // Of each segment.
  std::unique_ptr<std::atomic<cuda::DevicePtr>[]> bases_;
  std::atomic<bool> mapped_{false};
  std::unique_ptr<Held> held_ = std::make_unique<Held>();
};

}  // namespace modelhost
