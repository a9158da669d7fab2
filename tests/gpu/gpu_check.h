// What the checks of tests/gpu share: verdicts, children, agents, weights.
//
// The program itself never loads the driver: every step runs in a child, as it will in use. A
// child prints its lines itself.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/device_agent/agent_link.h"
#include "proto/cuda/handles.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/region.h"

namespace modelhost::gpu {

inline constexpr std::chrono::seconds kPatience{60};

// Prints "promise PASS" or "promise FAIL".
void Verdict(const std::string& promise, bool good);
int Failures();
void Print(const std::string& key, double value);
void Print(const std::string& key, const std::string& value);
double Seconds();
inline double GbPerSecond(uint64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

// Ends this process with status 2 when there is no value.
[[noreturn]] void Fail(const std::string& why);
template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) Fail(result.error().text);
  return *std::move(result);
}
inline void MustBe(const Result<void>& result) {
  if (!result.ok()) Fail(result.error().text);
}

// A child that ends with this process. `body`'s value is its exit status.
pid_t Spawn(const std::function<int()>& body);
// Waits. Whether its status is 0.
bool Good(pid_t pid);
void Kill(pid_t pid);

// The driver and a context on its first device, in a child.
struct Gpu {
  Gpu();
  std::shared_ptr<const cuda::Driver> driver;
  cuda::PrimaryContext context;
};

// Weights of a version: word i.
inline uint64_t WordAt(uint64_t i, uint64_t version) {
  return (i + 1) * 0x9e3779b97f4a7c15ULL + version;
}
SealedRegion MakeWeights(uint64_t bytes, uint64_t version);
// A read-only or writable import of them.
struct Weights : Gpu {
  Weights(const UniqueFd& fd, uint64_t bytes, cuda::Access access);
  // Every `step`-th MiB of it holds that version.
  bool Holds(uint64_t bytes, uint64_t version, uint64_t step) const;
  cuda::ImportedSegment segment;
  double map_seconds = 0;
};

class Agent {
 public:
  Agent();
  Agent(const Agent&) = delete;
  ~Agent() { Kill(); }
  Result<AgentAnswer> Ask(agent::Frame frame, const agent::Request& request,
                          std::vector<const UniqueFd*> fds = {});
  void Kill();

 private:
  pid_t pid_ = -1;
  AgentLink link_;
};

struct Machine {
  std::string uuid;
  uint64_t bytes = 0;  // Of the weights.
  bool fake = false;
  uint64_t base = 0;  // Used before anything was made.
};
agent::Request RequestFor(const Machine& machine, uint64_t bytes);
// Of the device, with the context of the process that asks.
uint64_t UsedBytes(const Machine& machine);
// Makes a segment and uploads `weights` into it, through `agent`.
struct Uploaded {
  UniqueFd fd;
  uint64_t checksum = 0;
  double seconds = 0;
};
Uploaded Upload(Agent& agent, const Machine& machine, const SealedRegion& weights);

// Two-way talk with a child: a number, perhaps with a descriptor. 0 when the other end is gone.
void Say(const UniqueFd& socket, uint32_t number, const UniqueFd* fd = nullptr);
uint32_t Hear(const UniqueFd& socket, UniqueFd* fd = nullptr);

// The checks, by theme.
void CheckFacts(const Machine& machine);
void CheckUploadSpeed(const Machine& machine, const SealedRegion& weights);
void CheckOwner(const Machine& machine);
void CheckImporters(const Machine& machine, const UniqueFd& fd);
void CheckReadOnly(const Machine& machine, const UniqueFd& fd);
void CheckSwap(const Machine& machine, Uploaded first);
void CheckOtherWays();

}  // namespace modelhost::gpu
