#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "daemon/device_agent/agent_server.h"
#include "tests/gpu/gpu_check.h"

namespace modelhost::gpu {
namespace {

int& Count() {
  static int failures = 0;
  return failures;
}

std::shared_ptr<const cuda::Driver> LoadDriver() {
  const cuda::DriverLoad load = cuda::Driver::Load();
  if (load.driver == nullptr) Fail(load.text);
  return load.driver;
}

}  // namespace

void Verdict(const std::string& promise, bool good) {
  Print("promise." + promise, std::string(good ? "PASS" : "FAIL"));
  if (!good) ++Count();
}
int Failures() { return Count(); }

void Print(const std::string& key, double value) {
  std::printf("%s %.3f\n", key.c_str(), value);
  std::fflush(stdout);
}
void Print(const std::string& key, const std::string& value) {
  std::printf("%s %s\n", key.c_str(), value.c_str());
  std::fflush(stdout);
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Fail(const std::string& why) {
  Print("error", why);
  std::_Exit(2);
}

pid_t Spawn(const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) std::_Exit(3);
    const int status = body();
    std::fflush(stdout);
    std::_Exit(status);
  }
  return pid;
}

bool Good(pid_t pid) {
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid && status == 0;
}

void Kill(pid_t pid) {
  ::kill(pid, SIGKILL);
  (void)Good(pid);
}

Gpu::Gpu() : driver(LoadDriver()), context(Must(cuda::PrimaryContext::Retain(*driver, 0))) {
  MustBe(context.MakeCurrent());
}

SealedRegion MakeWeights(uint64_t bytes, uint64_t version) {
  auto region = Must(WritableRegion::Create("weights", bytes, HugePages::kAuto));
  for (uint64_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    const uint64_t word = WordAt(i, version);
    std::memcpy(region.bytes().data() + i * sizeof(word), &word, sizeof(word));
  }
  return Must(std::move(region).Seal());
}

Weights::Weights(const UniqueFd& fd, uint64_t bytes, cuda::Access access) {
  const double before = Seconds();
  segment = Must(cuda::ImportSegment(*driver, fd, bytes, 0, access));
  map_seconds = Seconds() - before;
}

bool Weights::Holds(uint64_t bytes, uint64_t version, uint64_t step) const {
  std::vector<uint64_t> words(uint64_t{1} << 17);
  const uint64_t piece = words.size() * sizeof(uint64_t);
  for (uint64_t at = 0; at + piece <= bytes; at += step * piece) {
    if (driver->call().cuMemcpyDtoH(words.data(), segment.range().at + at, piece) !=
        cuda::Rc::kSuccess) {
      return false;
    }
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] != WordAt(at / sizeof(uint64_t) + i, version)) return false;
    }
  }
  return true;
}

Agent::Agent() {
  auto ends = Must(MakeSeqpacketPair());
  pid_ = Spawn([&ends] {
    ends.first.Reset();
    return RunDeviceAgent(std::move(ends.second));
  });
  link_ = AgentLink(std::move(ends.first));
}

Result<AgentAnswer> Agent::Ask(agent::Frame frame, const agent::Request& request,
                               std::vector<const UniqueFd*> fds) {
  return link_.Ask(frame, request, fds, AgentPatience{kPatience, kPatience});
}

void Agent::Kill() {
  if (pid_ > 0) gpu::Kill(std::exchange(pid_, -1));
}

agent::Request RequestFor(const Machine& machine, uint64_t bytes) {
  agent::Request request{};
  std::memcpy(request.uuid, machine.uuid.data(),
              std::min(machine.uuid.size(), sizeof(request.uuid) - 1));
  request.bytes = bytes;
  request.ring_bytes = uint64_t{256} << 20;
  request.threads = 8;
  return request;
}

uint64_t UsedBytes(const Machine& machine) {
  Agent agent;
  (void)Must(agent.Ask(agent::Frame::kOpen, RequestFor(machine, 0)));
  const auto memory = Must(agent.Ask(agent::Frame::kMemory, RequestFor(machine, 0)));
  return memory.reply.total_bytes - memory.reply.free_bytes;
}

Uploaded Upload(Agent& agent, const Machine& machine, const SealedRegion& weights) {
  auto plan = Must(WritableRegion::Create("plan", sizeof(agent::UploadItem), HugePages::kOff));
  const agent::UploadItem item{0, machine.bytes, 0, 0, 0};
  std::memcpy(plan.bytes().data(), &item, sizeof item);
  const SealedRegion sealed = Must(std::move(plan).Seal());
  agent::Request request = RequestFor(machine, machine.bytes);
  auto created = Must(agent.Ask(agent::Frame::kCreate, request));
  if (created.fds.empty()) Fail("a segment came without a descriptor");
  Uploaded uploaded;
  uploaded.fd = std::move(created.fds.front());
  request.items = 1;
  const double before = Seconds();
  const auto answer =
      Must(agent.Ask(agent::Frame::kUpload, request, {&uploaded.fd, &sealed.fd, &weights.fd}));
  uploaded.seconds = Seconds() - before;
  uploaded.checksum = answer.reply.checksum;
  return uploaded;
}

void Say(const UniqueFd& socket, uint32_t number, const UniqueFd* fd) {
  std::vector<const UniqueFd*> fds;
  if (fd != nullptr) fds.push_back(fd);
  const abi::FrameHeader said =
      MakeHeader(static_cast<abi::FrameType>(1), sizeof(abi::FrameHeader), number, fds.size());
  (void)SendFrame(socket, AsBytes(said), {}, fds);
}

uint32_t Hear(const UniqueFd& socket, UniqueFd* fd) {
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  auto heard = ReceiveFrame(socket, buffer, ReceiveWait::kUntilDeadline,
                            std::chrono::steady_clock::now() + kPatience);
  if (!heard.ok()) return 0;
  if (fd != nullptr && !heard->fds.empty()) *fd = std::move(heard->fds.front());
  return heard->header.request_id;
}

}  // namespace modelhost::gpu
