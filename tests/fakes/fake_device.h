// GPUs in this process: their memory is memfds, so that it lives as long as the last descriptor, in
// whatever hands. Thread-safe.
//
//   gpus.FailCall("Upload", 2, status);    the second Upload from now, once, on whatever GPU
//   gpus.FailFrom("Check", 1, status);     all of them from now on
//   gpus.Before("Create", [&] { ... });    runs before each such call, in its thread
//   gpus.used(uuid)                        bytes of segments that somebody still holds
//
// A failed call does nothing. A call's name is that of the method of DeviceMemoryService, or
// "List".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/device.h"

namespace modelhost {

class FakeGpus final : public DeviceFinder {
 public:
  FakeGpus();
  ~FakeGpus() override;

  // Before List. `mode` as DeviceReport has it.
  void Add(const std::string& uuid, const std::string& mode, uint64_t total_bytes,
           uint64_t granularity = uint64_t{1} << 20);

  // As when a later agent finds another one than the first did.
  void ChangeMode(const std::string& uuid, const std::string& mode);

  void FailCall(const std::string& call, int nth, absl::Status with);
  void FailFrom(const std::string& call, int nth, absl::Status with);
  void Before(const std::string& call, std::function<void()> hook);
  void Heal();
  int calls(const std::string& call) const;

  // What is on it is gone; the GPU itself answers, as after a reset.
  void Reset(const std::string& uuid);
  // As when the agent of cuda_ipc copies dies.
  void KillAgent(const std::string& uuid);
  uint64_t used(const std::string& uuid) const;
  // Whether the last upload asked to pass the page cache by.
  bool last_direct() const;
  static std::string Read(const DeviceSegment& segment);
  // What Upload and Verify say of these bytes.
  static uint64_t Sum(const std::string& bytes);

  absl::StatusOr<std::vector<DeviceInfo>> List() override;
  std::unique_ptr<DeviceMemoryService> Open(const std::string& uuid) override;
  void End() override;

 private:
  class Service;
  struct Fault {
    int from = 0;
    bool once = false;
    absl::Status with;
  };
  struct Memory {
    std::string gpu;
    uint64_t inode = 0;
    uint64_t bytes = 0;
    bool gone = false;
  };
  struct Gpu {
    DeviceReport report;
    uint64_t incarnation = 1;
    std::map<uint64_t, UniqueFd> held;  // cuda_ipc
  };

  // The hook, the count and the fault of a call.
  absl::Status Enter(const std::string& call);
  uint64_t UsedLocked(const std::string& uuid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::vector<std::string> order_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Gpu> gpus_ ABSL_GUARDED_BY(mutex_);
  std::vector<Memory> memory_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<Fault>> faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::function<void()>> hooks_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool last_direct_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace modelhost
