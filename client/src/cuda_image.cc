#include "client/src/cuda_image.h"

#include <cstring>
#include <utility>

namespace modelhost {
namespace {

Error NotAsSaid(const std::string& what, const std::string& why) {
  return Error{Code::kDataLoss, what + ": " + why, 0};
}

}  // namespace

const char* DeviceModeText(abi::DeviceMode mode) {
  switch (mode) {
    case abi::DeviceMode::kNone:
      return "none";
    case abi::DeviceMode::kVmmFd:
      return "vmm_fd";
    case abi::DeviceMode::kHostDirect:
      return "host_direct";
    case abi::DeviceMode::kHostRegistered:
      return "host_registered";
    case abi::DeviceMode::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

// --- Addresses
// -------------------------------------------------------------------------------------------------

Result<std::shared_ptr<const CudaPlaces>> CudaPlaces::Reserve(
    std::shared_ptr<const CudaDevice> device, const std::vector<uint64_t>& bytes) {
  // lint: allow(naked-new) private constructor
  const std::shared_ptr<CudaPlaces> places(new CudaPlaces(std::move(device)));
  for (const uint64_t each : bytes) {
    auto reserved = cuda::ReserveAddresses(places->device_->driver(), each);
    if (!reserved.ok()) {
      return AsCudaError(std::move(reserved).error(), "device memory", /*foreign=*/true);
    }
    places->reservations_->push_back(*std::move(reserved));
  }
  return std::shared_ptr<const CudaPlaces>(places);
}

CudaPlaces::~CudaPlaces() {
  // In a forked child the driver is dead: what it gave is left as it is.
  if (device_->forked()) (void)reservations_.release();
}

// --- An image
// -------------------------------------------------------------------------------------------------

std::string CudaImage::What(size_t segment) const {
  return name_ + ": device segment " + std::to_string(segment) + " of " +
         std::to_string(bytes_.size());
}

Result<std::unique_ptr<CudaImage>> CudaImage::Import(std::shared_ptr<const CudaDevice> device,
                                                     DeviceGrant grant, const IndexReader& index,
                                                     std::string name) {
  if (device->forked()) {
    return Error{Code::kFailedPrecondition,
                 name + ": device memory stays with the process that forked", 0};
  }
  // lint: allow(naked-new) private constructor
  std::unique_ptr<CudaImage> image(new CudaImage(std::move(device), grant.mode, std::move(name)));
  if (grant.mode != abi::DeviceMode::kHostDirect) {
    const auto segments = index.device_segments();
    if (grant.refs.size() != segments.size()) {
      return NotAsSaid(image->name_, std::to_string(grant.refs.size()) +
                                         " device segments came, but the index has " +
                                         std::to_string(segments.size()));
    }
    for (const abi::DeviceSegmentEntry& segment : segments) {
      image->bytes_.push_back(segment.bytes);
    }
    for (size_t i = 0; i < segments.size(); ++i) {
      if (grant.refs[i].bytes == segments[i].bytes) continue;
      return NotAsSaid(image->What(i), std::to_string(grant.refs[i].bytes) +
                                           " bytes came, but the index says " +
                                           std::to_string(segments[i].bytes));
    }
  }
  image->bases_ = std::make_unique<std::atomic<cuda::DevicePtr>[]>(image->bytes_.size());
  if (auto taken = image->Take(grant); !taken.ok()) return std::move(taken).error();
  return image;
}

CudaImage::~CudaImage() {
  if (device_->forked()) {
    (void)held_.release();
    return;
  }
  // Some of these calls want a context; where there is none any more, nothing is left to give back.
  const auto context = device_->Enter();
  held_.reset();
}

Result<void> CudaImage::Take(DeviceGrant& grant) {
  switch (mode_) {
    case abi::DeviceMode::kVmmFd:
      return ImportSegments(grant);
    case abi::DeviceMode::kHostRegistered:
      return RegisterSegments(grant);
    case abi::DeviceMode::kCudaIpc:
      return OpenSegments(grant);
    case abi::DeviceMode::kHostDirect: {
      const cuda::Driver& driver = device_->driver();
      const auto has = [&](cuda::Attribute attribute) {
        return driver.AttributeOf(device_->device(), attribute) == 1;
      };
      if (has(cuda::Attribute::kPageableMemoryAccess) &&
          has(cuda::Attribute::kPageableUsesHostPageTables)) {
        return {};
      }
      return Error{Code::kFailedPrecondition,
                   name_ + ": " + device_->uuid() + " cannot read host pages by itself", 0};
    }
    case abi::DeviceMode::kNone:
      break;
  }
  return Error{Code::kUnimplemented,
               name_ + ": device memory of mode " + std::to_string(static_cast<uint32_t>(mode_)) +
                   ", which this library does not know (update libmodelhost)",
               0};
}

Result<void> CudaImage::ImportSegments(DeviceGrant& grant) {
  const cuda::Driver& driver = device_->driver();
  for (size_t i = 0; i < bytes_.size(); ++i) {
    auto imported = cuda::ImportAllocation(driver, grant.fds[i]);
    if (!imported.ok()) return AsCudaError(std::move(imported).error(), What(i), true);
    const auto device = cuda::DeviceOf(driver, *imported);
    if (!device.ok()) return AsCudaError(device.error(), What(i), true);
    if (*device != device_->device()) {
      return NotAsSaid(What(i), "it is memory of another GPU than " + device_->uuid());
    }
    held_->allocations.push_back(*std::move(imported));
    grant.fds[i].Reset();  // It holds the memory of a whole version, and descriptors are few.
  }
  return {};
}

Result<void> CudaImage::RegisterSegments(DeviceGrant& grant) {
  const cuda::Driver& driver = device_->driver();
  const auto context = device_->Enter();
  if (!context.ok()) return context.error();
  for (size_t i = 0; i < bytes_.size(); ++i) {
    auto mapped = SharedMapping::Map(grant.fds[i], bytes_[i]);
    if (!mapped.ok()) {
      const bool short_of = mapped.error().code == Code::kResourceExhausted;
      return Error{short_of ? Code::kResourceExhausted : Code::kDataLoss,
                   What(i) + ": " + mapped.error().text, mapped.error().sys_errno};
    }
    grant.fds[i].Reset();
    held_->host.push_back(*std::move(mapped));
    auto registered = cuda::RegisterHost(driver, held_->host.back().bytes());
    if (!registered.ok()) return AsCudaError(std::move(registered).error(), What(i), false);
    held_->registrations.push_back(*std::move(registered));
    const auto at = cuda::DeviceAddressOf(driver, held_->registrations.back());
    if (!at.ok()) return AsCudaError(at.error(), What(i), false);
    bases_[i].store(*at, std::memory_order_release);
  }
  return {};
}

Result<void> CudaImage::OpenSegments(const DeviceGrant& grant) {
  const cuda::Driver& driver = device_->driver();
  const auto context = device_->Enter();
  if (!context.ok()) return context.error();
  for (size_t i = 0; i < bytes_.size(); ++i) {
    cuda::IpcHandle handle{};
    static_assert(sizeof(handle) == sizeof(abi::DeviceRef::ipc));
    std::memcpy(&handle, grant.refs[i].ipc, sizeof(handle));
    auto opened = cuda::OpenLegacy(driver, handle);
    if (!opened.ok()) {
      Error error = AsCudaError(std::move(opened).error(), What(i), true);
      error.text +=
          " (a legacy handle: its owner must live, and share this process's PID namespace)";
      return error;
    }
    bases_[i].store(opened->get(), std::memory_order_release);
    held_->opened.push_back(*std::move(opened));
  }
  return {};
}

Result<void> CudaImage::MapAll(const std::vector<cuda::Range>& at) {
  // Calls of this kind do without a context on the drivers that are known; not every driver is.
  const auto context = device_->Enter();
  if (!context.ok()) return context.error();
  std::vector<cuda::Mapping> mappings;
  for (size_t i = 0; i < at.size(); ++i) {
    auto mapped = cuda::MapAllocation(device_->driver(), held_->allocations[i], at[i],
                                      device_->device(), cuda::Access::kRead);
    if (!mapped.ok()) return AsCudaError(std::move(mapped).error(), What(i), true);
    mappings.push_back(*std::move(mapped));
  }
  held_->mappings = std::move(mappings);
  for (size_t i = 0; i < at.size(); ++i) bases_[i].store(at[i].at, std::memory_order_release);
  return {};
}

Result<void> CudaImage::Map() {
  if (mode_ == abi::DeviceMode::kVmmFd) {
    std::vector<cuda::Range> at;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      auto reserved = cuda::ReserveAddresses(device_->driver(), bytes_[i]);
      if (!reserved.ok()) return AsCudaError(std::move(reserved).error(), What(i), true);
      at.push_back(reserved->get());
      held_->reservations.push_back(*std::move(reserved));
    }
    if (auto mapped = MapAll(at); !mapped.ok()) return mapped;
    held_->allocations.clear();  // The mappings keep the memory.
  }
  mapped_.store(true, std::memory_order_release);
  return {};
}

Result<void> CudaImage::MapAt(std::shared_ptr<const CudaPlaces> places) {
  if (mode_ != abi::DeviceMode::kVmmFd) {
    return Error{Code::kUnimplemented,
                 name_ +
                     ": only device memory by descriptor (vmm_fd) can be had at the same "
                     "addresses, and this is " +
                     DeviceModeText(mode_),
                 0};
  }
  std::vector<cuda::Range> at;
  for (size_t i = 0; i < bytes_.size(); ++i) at.push_back(places->at(i));
  if (auto mapped = MapAll(at); !mapped.ok()) return mapped;
  held_->places = std::move(places);
  mapped_.store(true, std::memory_order_release);
  return {};
}

void CudaImage::Unmap() {
  mapped_.store(false, std::memory_order_release);
  for (size_t i = 0; i < bytes_.size(); ++i) bases_[i].store(0, std::memory_order_release);
  const auto context = device_->Enter();
  held_->mappings.clear();
  held_->places.reset();
}

}  // namespace modelhost
