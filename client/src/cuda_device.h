// One GPU as this process uses it: the driver, loaded when somebody first wants device memory, and
// the primary context, which the program's own CUDA code works in too.
//
// The library works without a driver. Whatever is missing is FAILED_PRECONDITION with the reason.
// A driver does not survive fork(): in a child of a process that used one, nothing here calls it,
// and what was made with it is left as it is. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "proto/cuda/driver.h"
#include "proto/cuda/handles.h"
#include "proto/handle/error.h"

namespace modelhost {

// The driver of this process; one of them is in Process. Takes no lock: a driver may fork a helper
// while it is being loaded.
class CudaLibrary {
 public:
  // `forks`: of this process. Tries again where an earlier try failed. FAILED_PRECONDITION.
  Result<std::shared_ptr<const cuda::Driver>> Load(uint64_t forks);

 private:
  // 1 + `forks` when the driver was first wanted; 0: never.
  std::atomic<uint64_t> used_in_{0};
  std::atomic<const std::shared_ptr<const cuda::Driver>*> driver_{nullptr};  // Never freed.
};

class CudaDevice {
 public:
  // `gpu`: a UUID. Null: the GPU of the context that is current on the calling thread, else the
  // first that this process sees. Retains its primary context. FAILED_PRECONDITION: no driver, no
  // such GPU, or a forked process; RESOURCE_EXHAUSTED: no memory for a context.
  static Result<std::shared_ptr<const CudaDevice>> Open(const char* gpu);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;

  const cuda::Driver& driver() const { return *driver_; }
  cuda::Device device() const { return device_; }
  const std::string& uuid() const { return uuid_; }
  // Makes the context current for a block. FAILED_PRECONDITION.
  Result<cuda::ScopedContext> Enter() const;
  // True in a child of the process that opened it: then nothing may be called or given back.
  bool forked() const;

 private:
  CudaDevice(std::shared_ptr<const cuda::Driver> driver, cuda::Device device, std::string uuid,
             cuda::PrimaryContext context, uint64_t forks);

  const std::shared_ptr<const cuda::Driver> driver_;
  const cuda::Device device_;
  const std::string uuid_;
  std::unique_ptr<cuda::PrimaryContext> context_;
  const uint64_t forks_;
};

// What a caller wants of GPUs, for the whole of one acquire or one live model.
struct DeviceRequest {
  enum class Want : uint8_t { kHost, kDevice, kDeviceIfAny };
  Want want = Want::kHost;
  bool same_addresses = false;               // Imported, and mapped by whoever adopts it.
  std::shared_ptr<const CudaDevice> device;  // Null: no GPU here, for the reason below.
  std::string why_not;

  bool asks() const { return device != nullptr; }
};

// A driver's error as the library's callers know errors. `foreign`: what the driver was given came
// from the daemon, so that what it finds wrong with it is DATA_LOSS.
Error AsCudaError(Error error, const std::string& what, bool foreign);

}  // namespace modelhost
