// The parent's side of a device agent: starts the process, asks it, and starts another when it has
// died, hung or lost its context.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/device_agent/agent_link.h"
#include "daemon/platform/child_process.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/device.h"

namespace modelhost {

struct DeviceAgentOptions {
  std::vector<std::string> arguments = {"device-agent"};  // Its descriptor's number follows them.
  uint64_t ring_bytes = uint64_t{128} << 20;
  uint32_t threads = 4;
  bool allow_registered = false;
  // Without a sign of progress for this long, it hangs and is killed.
  absl::Duration stall = absl::Seconds(30);
  // After a cancel it is killed unless it stops within this. One that holds segments of cuda_ipc
  // has `stall`: they would go with it.
  absl::Duration cancel = absl::Milliseconds(100);
  // Outlives the agent. When true all calls return CANCELLED, also those that wait, and what they
  // wait for is killed.
  const std::atomic<bool>* ended = nullptr;
};

class DeviceAgent final : public DeviceMemoryService {
 public:
  // `program` (lent) is an open program that calls RunDeviceAgent; `clock` outlives this.
  DeviceAgent(const UniqueFd& program, Clock& clock, std::string uuid, DeviceAgentOptions options);
  ~DeviceAgent() override;

  // The GPUs of this machine, by an agent that ends with it. UNAVAILABLE: why there is no driver.
  static absl::StatusOr<std::vector<DeviceInfo>> List(const UniqueFd& program, Clock& clock,
                                                      const DeviceAgentOptions& options);

  absl::StatusOr<DeviceReport> Report() override;
  absl::StatusOr<DeviceSegment> Create(uint64_t bytes, const Progress& progress) override;
  absl::StatusOr<uint64_t> Upload(const DeviceSegment& segment,
                                  const std::vector<DeviceCopy>& copies,
                                  const std::vector<const UniqueFd*>& sources, bool direct,
                                  const Progress& progress) override;
  absl::Status Verify(const DeviceSegment& segment, uint64_t checksum,
                      const Progress& progress) override;
  absl::Status Check(const DeviceSegment& segment) override;
  absl::Status Release(const DeviceSegment& segment) override;
  absl::StatusOr<DeviceMemoryUse> Memory() override;

  // How often a process was started; segments of cuda_ipc die with theirs.
  uint64_t incarnation() const;

 private:
  struct Running {
    ChildProcess child;
    AgentLink link;
  };
  static absl::StatusOr<Running> Start(const UniqueFd& program, const DeviceAgentOptions& options);

  absl::Status Ready(const Progress& progress) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes what a new process says of the device. UNAVAILABLE: it is not what all others work with.
  absl::Status Take(const agent::DeviceRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Kills the process; one that does not end for so long is left to late_.
  void Drop(absl::Duration patience) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the mode in `reply` promises and only another process can show: tries it there and notes
  // the result in `open`. False: there is nothing (more) to try.
  absl::StatusOr<bool> TryElsewhere(const agent::Reply& reply, agent::Request& open,
                                    const Progress& progress);
  absl::StatusOr<AgentAnswer> Ask(agent::Frame frame, const agent::Request& request,
                                  const std::vector<const UniqueFd*>& fds, const Progress& progress)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckHeld(const DeviceSegment& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Looks, and says what came of it: `refused_` tells the driver's word from an agent's end.
  absl::Status Look(const DeviceSegment& segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  agent::Request NewRequest() const;
  AgentPatience PatienceOf(uint64_t held) const;

  const UniqueFd& program_;
  Clock& clock_;
  const std::string uuid_;
  const DeviceAgentOptions options_;
  mutable absl::Mutex mutex_;
  std::optional<Running> running_ ABSL_GUARDED_BY(mutex_);
  std::optional<DeviceReport> report_ ABSL_GUARDED_BY(mutex_);
  uint64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t held_ ABSL_GUARDED_BY(mutex_) = 0;     // Segments of cuda_ipc in the process.
  bool refused_ ABSL_GUARDED_BY(mutex_) = false;  // The last question: by an agent that answers.
  LateChildren late_;
};

}  // namespace modelhost
