// The daemon's end of a device agent's socket. Thread-compatible.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "daemon/device_agent/agent_wire.h"
#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct AgentAnswer {
  agent::Reply reply{};
  std::vector<UniqueFd> fds;
};

class AgentLink {
 public:
  AgentLink() = default;
  explicit AgentLink(UniqueFd socket) : socket_(std::move(socket)) {}
  bool valid() const { return socket_.valid(); }

  // Called with the bytes done; false cancels.
  using Progress = std::function<bool(uint64_t done)>;

  // One request and its reply. `stall`: how long the agent may be without any sign of progress.
  // Progress is asked before anything is sent, and every 50 ms or so also when nothing comes.
  //   the reply's own error
  //   UNAVAILABLE        the agent has ended
  //   INTERNAL           it answers what was not asked
  //   RESOURCE_EXHAUSTED no descriptor is left for what it sent
  //   DEADLINE_EXCEEDED  no sign of life for `stall`: it hangs
  //   CANCELLED          and the agent did not stop within `stall`
  // After any of these but the first, and after a reply that says `dead`, the agent is of no use:
  // broken().
  Result<AgentAnswer> Ask(agent::Frame frame, agent::Request request,
                          std::span<const UniqueFd* const> fds, std::chrono::milliseconds stall,
                          const Progress& progress = nullptr);
  bool broken() const { return broken_; }

 private:
  UniqueFd socket_;
  uint32_t next_request_ = 1;
  bool broken_ = false;
};

}  // namespace modelhost
