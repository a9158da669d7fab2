// The daemon's end of a device agent's socket. Thread-compatible.
#pragma once

#include <atomic>
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

// How long an agent is waited for.
struct AgentPatience {
  // Without any sign of progress.
  std::chrono::milliseconds stall;
  // After it was told to stop.
  std::chrono::milliseconds cancel;
  // When true it is not waited for at all. May be null.
  const std::atomic<bool>* ended = nullptr;
};

class AgentLink {
 public:
  AgentLink() = default;
  explicit AgentLink(UniqueFd socket) : socket_(std::move(socket)) {}
  bool valid() const { return socket_.valid(); }

  // Called with the bytes done; false cancels.
  using Progress = std::function<bool(uint64_t done)>;

  // One request and its reply. Progress is asked before anything is sent, and every 20 ms or so
  // also when nothing comes. Of the bytes that an agent says are done, no more count than twice
  // those of the request: they are written and read back.
  //   the reply's own error
  //   UNAVAILABLE        the agent has ended
  //   INTERNAL           it answers what was not asked
  //   RESOURCE_EXHAUSTED no descriptor is left for what it sent
  //   DEADLINE_EXCEEDED  no progress for `stall`: it hangs
  //   CANCELLED          and the agent did not stop within `cancel`, or all have `ended`
  // After any of these but the first, and after a reply that says `dead`, the agent is of no use:
  // broken().
  Result<AgentAnswer> Ask(agent::Frame frame, agent::Request request,
                          std::span<const UniqueFd* const> fds, const AgentPatience& patience,
                          const Progress& progress = nullptr);
  bool broken() const { return broken_; }
  // The last request was answered, with an error or without: the agent itself has spoken.
  bool answered() const { return answered_; }

 private:
  UniqueFd socket_;
  uint32_t next_request_ = 1;
  bool broken_ = false;
  bool answered_ = false;
};

}  // namespace modelhost
