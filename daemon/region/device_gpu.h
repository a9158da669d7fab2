// What the device tier knows of one GPU, and whose turn it is to ask it. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/device.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/region/cancel_token.h"
#include "daemon/region/device_cache.h"
#include "daemon/region/memory_budget.h"
#include "proto/abi/handle_frame.h"

namespace modelhost {

// kNone for "host_only" and for what this build does not know.
abi::DeviceMode DeviceModeOf(const std::string& name);
// Copies of this mode take device memory.
bool TakesDeviceMemory(abi::DeviceMode mode);
// Copies of this mode are laid out in segments.
bool HasSegments(abi::DeviceMode mode);

class DeviceGpu final : public DeviceReleaser {
 public:
  struct State {
    DeviceReport report;
    abi::DeviceMode mode = abi::DeviceMode::kNone;
    bool usable = false;
    std::string problem = "it was not asked yet";
    uint64_t lost = 0;
  };

  DeviceGpu(DeviceInfo info, std::unique_ptr<DeviceMemoryService> service);
  DeviceGpu(const DeviceGpu&) = delete;

  const std::string& uuid() const { return info_.uuid; }
  DeviceMemoryService& service() { return *service_; }
  State state() const;
  // Null: its copies take no device memory. Set once, before others see this object.
  BudgetPool* pool() const { return pool_.get(); }
  void MakePool(std::optional<uint64_t> budget_bytes);

  // Asks what it can do. Waits for the device.
  void Look();

  // Who asks the device waits for his turn, so that a load can be cancelled meanwhile. A turn is
  // one call, or an upload with the ring that it takes. Memory that is to be released goes first.
  class Turn {
   public:
    ~Turn();
    Turn(Turn&& other) noexcept : gpu_(std::exchange(other.gpu_, nullptr)) {}
    Turn& operator=(Turn&&) = delete;

   private:
    friend class DeviceGpu;
    explicit Turn(DeviceGpu* gpu) : gpu_(gpu) {}
    DeviceGpu* gpu_;
  };
  // Nothing: cancelled.
  std::optional<Turn> TakeTurn(const CancelToken& cancel);

  // On a thread of this object, with a turn.
  void ReleaseLater(std::vector<DeviceSegment> segments, Reservation booked) override;

  // Looks whether the copies are still there, on a thread of this object, unless that is going on
  // already. Lost is what the driver says is lost. An agent that dies or hangs proves nothing: the
  // copies stay, and after `kSilentChecks` in a row the GPU is not usable until it answers.
  static constexpr int kSilentChecks = 3;
  void StartCheck(DeviceCache& cache);
  // Waits for the check, at most `patience`. True when a copy was lost since the last call.
  bool AwaitCheck(absl::Duration patience);

 private:
  void Check(DeviceCache& cache);
  absl::Status CheckCopy(const DeviceRegion& copy);
  void MarkLost(DeviceCache& cache, const DeviceRegion& copy);
  void SetUsable(const absl::Status& status);
  // `first`: before what is to be released, too.
  std::optional<Turn> TakeTurnWithin(absl::Duration patience, bool first);
  void Release(std::vector<DeviceSegment> segments, Reservation booked);

  const DeviceInfo info_;
  const std::unique_ptr<DeviceMemoryService> service_;
  std::unique_ptr<BudgetPool> pool_;
  mutable absl::Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool checking_ ABSL_GUARDED_BY(mutex_) = false;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t releases_ ABSL_GUARDED_BY(mutex_) = 0;  // To come.
  int silent_checks_ = 0;                          // In a row. Only the thread's.
  ThreadPool thread_;                              // Last: its tasks use the others.
};

}  // namespace modelhost
