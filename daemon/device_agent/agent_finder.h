// The GPUs of this machine, each behind a device agent of its own.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "daemon/device_agent/device_agent.h"

namespace modelhost {

class AgentFinder final : public DeviceFinder {
 public:
  // `program` is open, and runs as an agent with the options' arguments; `clock` outlives this.
  AgentFinder(UniqueFd program, Clock& clock, DeviceAgentOptions options)
      : program_(std::move(program)), clock_(clock), options_(std::move(options)) {
    options_.ended = &ended_;
  }

  absl::StatusOr<std::vector<DeviceInfo>> List() override {
    return DeviceAgent::List(program_, clock_, options_);
  }
  std::unique_ptr<DeviceMemoryService> Open(const std::string& uuid) override {
    return std::make_unique<DeviceAgent>(program_, clock_, uuid, options_);
  }
  void End() override { ended_ = true; }

 private:
  const UniqueFd program_;
  Clock& clock_;
  std::atomic<bool> ended_{false};
  DeviceAgentOptions options_;
};

}  // namespace modelhost
