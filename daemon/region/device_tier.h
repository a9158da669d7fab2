// The GPUs of this machine: what they can do, their budgets, and the copies on them.
//
// What there is, is found once, on a pool thread (Discover); who needs to know waits for it. A
// machine without a GPU or a driver is host-only, with the reason, and nothing fails for it.
// Thread-safe. Calls that wait for a device say so: not for the control thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/device.h"
#include "daemon/region/cancel_token.h"
#include "daemon/region/device_cache.h"
#include "daemon/region/device_gpu.h"
#include "daemon/region/device_plan.h"
#include "daemon/region/device_region.h"
#include "daemon/region/memory_budget.h"
#include "daemon/region/resident_version.h"

namespace modelhost {

struct DeviceTierOptions {
  bool enabled = true;                           // [device] enabled
  std::optional<uint64_t> budget_bytes = {};     // Of each GPU; unset: nine tenths of its memory.
  uint64_t segment_bytes = UINT64_MAX;           // A segment is no larger (DeviceLayoutLimits).
  uint64_t ring_bytes = uint64_t{128} << 20;     // Pinned while a copy is made; host memory.
  absl::Duration discovery = absl::Seconds(30);  // How long a load waits to know what there is.
};

struct DeviceTierSnapshot {
  bool known = false;  // False: still looking.
  std::string reason;  // Why there is no GPU to use; empty when there is one.
  struct Gpu {
    DeviceReport report;
    abi::DeviceMode mode = abi::DeviceMode::kNone;
    uint64_t limit_bytes = 0;     // Of its budget.
    uint64_t reserved_bytes = 0;  // Of it.
    uint64_t copies = 0;          // Regions on it now, without lost ones.
    uint64_t copied_bytes = 0;
    bool usable = true;   // False: it does not answer now, see `problem`.
    std::string problem;  // Why not.
    uint64_t lost = 0;    // Copies lost since the start.
  };
  std::vector<Gpu> gpus;  // In the driver's order.
};

class DeviceTier {
 public:
  // All outlive it.
  DeviceTier(DeviceFinder& finder, Clock& clock, BudgetPool& host, DeviceTierOptions options);
  ~DeviceTier();
  DeviceTier(const DeviceTier&) = delete;

  // Looks for GPUs, once. Waits for the driver.
  void Discover();
  // The daemon ends: no device is waited for any more. Calls that do return soon, with CANCELLED.
  void Stop();
  DeviceTierSnapshot Snapshot() const;
  // One per GPU that holds copies of its own, named by its UUID; none until they are known, and the
  // same ones from then on.
  std::vector<BudgetPool*> Pools() const;
  // Host memory that is pinned while a copy is made.
  uint64_t ring_bytes() const { return options_.ring_bytes; }
  // The GPUs (UUIDs) that `policy` names and that can be used now, in whatever mode.
  std::vector<std::string> UsableGpus(const DevicePolicy& policy) const;
  // Whether there is one that does not answer now.
  bool AnyUnusable() const;
  // The GPUs (UUIDs) whose memory a copy by `policy` takes: what is known now, without waiting.
  std::vector<std::string> GpusOf(const DevicePolicy& policy) const;

  // What a plan needs to know of the GPUs that `policy` names. Waits for Discover.
  struct Targets {
    std::vector<std::string> gpus;  // Usable ones. Empty: the version stays on the host.
    bool segments = false;          // At least one of them holds segments.
    DeviceLayoutLimits limits;      // That suit all of them.
    std::vector<std::string> warnings;
  };
  absl::StatusOr<Targets> Choose(const DevicePolicy& policy, const CancelToken& cancel) const;

  // Books and makes the copies, each once over all versions. `regions` are the version's.
  // RESOURCE_EXHAUSTED (budget, or the device is full), UNAVAILABLE, DEADLINE_EXCEEDED (the agent
  // died or hangs), DATA_LOSS, CANCELLED; what was made goes with a failure.
  struct Work {
    std::string name;  // "planner@8"
    const DevicePolicy& policy;
    const DevicePlan& plan;
    const std::vector<std::string>& gpus;
    const std::vector<std::shared_ptr<const HostRegion>>& regions;
    const CancelToken& cancel;
    uint64_t host_held_bytes = 0;  // What this load has booked of the host's budget so far.
    // All on the calling thread; may be empty. A phase is "device_create", "device_upload" (what
    // is read back then is "device_verify" in the report) or "device_verify".
    std::function<void(const std::string& phase, uint64_t total)> begin = nullptr;
    std::function<void(uint64_t done)> progress = nullptr;
    // Of all phases that there were, at the end.
    std::function<void(const std::string& phase, absl::Duration took, uint64_t bytes)> phase =
        nullptr;
    std::function<void(std::string warning)> warn = nullptr;
  };
  absl::StatusOr<std::vector<DeviceImage>> Make(const Work& work);

  // A copy that an earlier daemon made. Taken once it reads back as its checksums say, and once a
  // plan asks for it. After DropOffered it is let go of at once. Waits for the device.
  void Offer(DeviceRegionKey key, DeviceRegion::Parts parts);
  void DropOffered();

  // Looks whether the copies can still be had: those that cannot are marked lost. True when one was
  // lost that was not before. Waits for the devices, each on its own; for one that hangs only
  // `kCheckWait`: what is found of it then is told by a later call.
  static constexpr absl::Duration kCheckWait = absl::Seconds(5);
  bool CheckCopies();

 private:
  friend class DeviceCopyJob;  // One call of Make (device_copy_job.h).

  // Those that `policy` names, answer now, and have a mode that `fits`.
  std::vector<std::string> NamedGpus(const DevicePolicy& policy,
                                     absl::FunctionRef<bool(abi::DeviceMode)> fits) const;
  // Null: there is none of that name, or it is not known yet.
  DeviceGpu* Find(const std::string& uuid) const;
  std::vector<DeviceGpu*> Gpus() const;
  // What an earlier daemon left of `key`; nothing when there is none.
  std::optional<DeviceRegion::Parts> TakeOffered(const DeviceRegionKey& key);
  // True when there was some.
  bool DropOfferedOn(const std::string& gpu);

  DeviceFinder& finder_;
  Clock& clock_;
  BudgetPool& host_;
  const DeviceTierOptions options_;
  DeviceCache cache_;
  mutable absl::Mutex mutex_;
  bool known_ ABSL_GUARDED_BY(mutex_) = false;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
  // None is added or removed once they are known.
  std::vector<std::unique_ptr<DeviceGpu>> gpus_ ABSL_GUARDED_BY(mutex_);
  std::map<DeviceRegionKey, DeviceRegion::Parts> offered_ ABSL_GUARDED_BY(mutex_);
  bool offers_over_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace modelhost
