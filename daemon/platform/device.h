// One GPU, as the daemon asks for it: memory that can be handed on, filled and read back.
//
// The real one is daemon/device_agent, where a process of its own makes the calls: whatever happens
// to it fails one call here, with UNAVAILABLE or DEADLINE_EXCEEDED, and the next one starts a new
// process. Calls wait for the device: not for the control thread. Thread-safe; one at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct DeviceInfo {
  std::string uuid;  // "GPU-...": the only name of a GPU between processes.
  std::string name;
  int driver_version = 0;  // 12040 is 12.4.
  uint64_t total_bytes = 0;
};

struct DeviceReport {
  DeviceInfo info;
  std::string mode;          // vmm_fd, host_direct, host_registered, cuda_ipc, host_only
  std::string reason;        // Why this one.
  std::string limits;        // What it cannot do; empty for vmm_fd and host_direct.
  uint64_t granularity = 0;  // Of segments; 0 where there are none by descriptor.
};

// Device memory. vmm_fd: `fd` keeps it, whoever dies. cuda_ipc: the agent keeps it until Release.
struct DeviceSegment {
  UniqueFd fd;
  uint64_t bytes = 0;
  uint64_t id = 0;                     // cuda_ipc
  uint64_t incarnation = 0;            // cuda_ipc: of the agent that has it.
  std::array<std::byte, 64> handle{};  // cuda_ipc
};

struct DeviceCopy {
  uint64_t device_offset = 0;
  uint64_t bytes = 0;
  uint64_t source_offset = 0;
  uint32_t source = 0;  // Number of the file.
};

struct DeviceMemoryUse {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

class DeviceMemoryService {
 public:
  // With the bytes done, every 20 ms or so; false cancels: a process that does not stop within a
  // tenth of a second is ended, unless segments of cuda_ipc would go with it.
  using Progress = std::function<bool(uint64_t done)>;

  virtual ~DeviceMemoryService() = default;
  // Starts the process if there is none, and says what the device can do.
  virtual absl::StatusOr<DeviceReport> Report() = 0;
  // RESOURCE_EXHAUSTED: the device is full. `bytes`: a multiple of the granularity. `progress` may
  // be null.
  virtual absl::StatusOr<DeviceSegment> Create(uint64_t bytes, const Progress& progress) = 0;
  // Fills all of `segment` (zeros where there is no copy) and reads it back. `copies` are sorted by
  // device_offset and apart; `sources` are lent, at most 60. `direct`: past the page cache. Its
  // checksum. DATA_LOSS: a source is too short, or the device does not have what was sent.
  virtual absl::StatusOr<uint64_t> Upload(const DeviceSegment& segment,
                                          const std::vector<DeviceCopy>& copies,
                                          const std::vector<const UniqueFd*>& sources, bool direct,
                                          const Progress& progress) = 0;
  // DATA_LOSS: the segment no longer has that checksum.
  virtual absl::Status Verify(const DeviceSegment& segment, uint64_t checksum,
                              const Progress& progress) = 0;
  // Whether the segment is still there: imports it read-only and reads a few bytes at its start and
  // its end. Cheap, and no verification: what it finds is a GPU that was lost or reset.
  //   UNAVAILABLE         the driver says that the device is gone, or the context of the process
  //                       that was asked: ask again, another process answers
  //   ABORTED             the process that was asked ended, or could not be had: nothing is known
  //   DEADLINE_EXCEEDED   it hung: nothing is known
  //   DATA_LOSS           the device is there, the segment is not
  //   RESOURCE_EXHAUSTED  the device had no room for looking at it: nothing is known
  virtual absl::Status Check(const DeviceSegment& segment) = 0;
  // cuda_ipc: the memory is freed. A descriptor is closed by its owner.
  virtual absl::Status Release(const DeviceSegment& segment) = 0;
  virtual absl::StatusOr<DeviceMemoryUse> Memory() = 0;
};

// Finds the GPUs of this machine. Waits for the driver; thread-safe.
class DeviceFinder {
 public:
  virtual ~DeviceFinder() = default;
  // In the driver's order. UNAVAILABLE: why there is none.
  virtual absl::StatusOr<std::vector<DeviceInfo>> List() = 0;
  // Of one that List has told of; does not wait yet. May not outlive the finder.
  virtual std::unique_ptr<DeviceMemoryService> Open(const std::string& uuid) = 0;
  // The daemon ends: all calls, here and of what was opened, return CANCELLED from now on, also
  // those that wait for a device just now. Does not wait.
  virtual void End() = 0;
};

}  // namespace modelhost
