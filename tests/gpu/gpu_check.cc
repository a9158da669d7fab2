// What device sharing rests on, checked through our code on whatever driver is found: the real one,
// or the fake with LD_LIBRARY_PATH. Prints `key value` lines and a verdict for each promise.
//
//   gpu_check [MIB]      of the weights (1024)
//
// This process never loads the driver: every step runs in a child, as it will in use.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "daemon/device_agent/agent_link.h"
#include "daemon/device_agent/agent_server.h"
#include "daemon/device_agent/device_mode.h"
#include "proto/cuda/handles.h"
#include "proto/handle/region.h"

namespace modelhost {
namespace {

using cuda::Access;
using cuda::Rc;

constexpr std::chrono::seconds kPatience{60};
constexpr char kPtx[] =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .entry modelhost_poke(.param .u64 p){ .reg .u64 %a<3>; .reg .u32 %v; "
    "ld.param.u64 %a1,[p]; cvta.to.global.u64 %a2,%a1; mov.u32 %v,0xDEADBEEF; "
    "st.global.u32 [%a2],%v; ret; }\n";
int failures = 0;

void Verdict(const char* promise, bool good) {
  std::printf("%s %s\n", promise, good ? "PASS" : "FAIL");
  std::fflush(stdout);
  if (!good) ++failures;
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    std::printf("error %s\n", result.error().text.c_str());
    std::fflush(stdout);
    std::_Exit(2);
  }
  return *std::move(result);
}

pid_t Spawn(const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
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

uint64_t WordAt(uint64_t i) { return (i + 1) * 0x9e3779b97f4a7c15ULL; }

// A process with the weights mapped read-only.
struct Reader {
  Reader(const UniqueFd& fd, uint64_t bytes, Access access)
      : driver(cuda::Driver::Load().driver),
        context(Must(cuda::PrimaryContext::Retain(*driver, 0))) {
    if (!context.MakeCurrent().ok()) std::_Exit(2);
    const double before = Seconds();
    segment = Must(cuda::ImportSegment(*driver, fd, bytes, 0, access));
    map_seconds = Seconds() - before;
  }
  bool Holds(uint64_t bytes) const {
    std::vector<uint64_t> words(uint64_t{1} << 17);
    for (uint64_t at = 0; at + 8 * words.size() <= bytes; at += 64 * 8 * words.size()) {
      if (driver->call().cuMemcpyDtoH(words.data(), segment.range().at + at, 8 * words.size()) !=
          Rc::kSuccess) {
        return false;
      }
      for (size_t i = 0; i < words.size(); ++i) {
        if (words[i] != WordAt(at / 8 + i)) return false;
      }
    }
    return true;
  }
  std::shared_ptr<const cuda::Driver> driver;
  cuda::PrimaryContext context;
  cuda::ImportedSegment segment;
  double map_seconds = 0;
};

class Agent {
 public:
  Agent() {
    auto ends = Must(MakeSeqpacketPair());
    const int theirs = ends.second.get();
    pid_ = Spawn([&] {
      ends.first.Reset();
      return RunDeviceAgent(UniqueFd(::fcntl(theirs, F_DUPFD_CLOEXEC, 3)));
    });
    link_ = AgentLink(std::move(ends.first));
  }
  Result<AgentAnswer> Ask(agent::Frame frame, const agent::Request& request,
                          std::vector<const UniqueFd*> fds = {}) {
    return link_.Ask(frame, request, fds, kPatience);
  }
  void Kill() {
    ::kill(pid_, SIGKILL);
    (void)::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  AgentLink link_;
};

agent::Request RequestFor(const std::string& uuid, uint64_t bytes) {
  agent::Request request{};
  std::memcpy(request.uuid, uuid.data(), uuid.size());
  request.bytes = bytes;
  request.ring_bytes = uint64_t{128} << 20;
  request.threads = 4;
  return request;
}

uint64_t UsedBytes(const std::string& uuid) {
  Agent agent;
  (void)Must(agent.Ask(agent::Frame::kOpen, RequestFor(uuid, 0)));
  const auto memory = Must(agent.Ask(agent::Frame::kMemory, RequestFor(uuid, 0)));
  agent.Kill();
  return memory.reply.total_bytes - memory.reply.free_bytes;
}

void Check(uint64_t bytes) {
  UniqueFd fd;
  std::string uuid;
  uint64_t checksum = 0;
  Agent agent;
  const auto listed = Must(agent.Ask(agent::Frame::kList, agent::Request{}));
  if (listed.reply.devices == 0) {
    std::printf("skipped %s\n", listed.reply.text);
    std::exit(77);
  }
  uuid = listed.reply.device.uuid;
  std::printf("gpu %s %s\ndriver %d\n", uuid.c_str(), listed.reply.device.name,
              listed.reply.device.driver_version);
  const auto opened = Must(agent.Ask(agent::Frame::kOpen, RequestFor(uuid, 0)));
  std::printf("mode %s\nreason %s\n",
              DeviceModeName(static_cast<DeviceMode>(opened.reply.device.mode)),
              opened.reply.device.reason);
  Verdict("promise.self_test",
          opened.reply.device.mode == static_cast<uint32_t>(DeviceMode::kVmmFd));
  if (failures > 0) return;
  const uint64_t base = UsedBytes(uuid);

  auto host = Must(WritableRegion::Create("weights", bytes, HugePages::kAuto));
  auto* words = reinterpret_cast<uint64_t*>(host.bytes().data());
  for (uint64_t i = 0; i < bytes / 8; ++i) words[i] = WordAt(i);
  auto plan = Must(WritableRegion::Create("plan", sizeof(agent::UploadItem), HugePages::kOff));
  const agent::UploadItem item{0, bytes, 0, 0, 0};
  std::memcpy(plan.bytes().data(), &item, sizeof item);
  const SealedRegion weights = Must(std::move(host).Seal());
  const SealedRegion sealed_plan = Must(std::move(plan).Seal());

  agent::Request request = RequestFor(uuid, bytes);
  auto created = Must(agent.Ask(agent::Frame::kCreate, request));
  fd = std::move(created.fds.at(0));
  request.items = 1;
  const double before = Seconds();
  const auto uploaded =
      Must(agent.Ask(agent::Frame::kUpload, request, {&fd, &sealed_plan.fd, &weights.fd}));
  checksum = uploaded.reply.checksum;
  std::printf("upload_and_verify_gb_per_s %.2f\n",
              static_cast<double>(bytes) / (Seconds() - before) / 1e9);
  Verdict("promise.uploaded_bytes_are_read_back", true);
  agent.Kill();
  const uint64_t one = UsedBytes(uuid);
  Verdict("promise.memory_outlives_a_killed_agent", one >= base + bytes / 2);

  std::vector<std::pair<pid_t, UniqueFd>> readers;
  bool all = true;
  for (int i = 0; i < 8; ++i) {
    auto ends = Must(MakeSeqpacketPair());
    const pid_t pid = Spawn([&] {
      ends.first.Reset();
      const Reader reader(fd, bytes, Access::kRead);
      const char holds = reader.Holds(bytes) ? 1 : 0;
      if (i == 0) std::printf("import_map_ms %.2f\n", reader.map_seconds * 1e3);
      const abi::FrameHeader said =
          MakeHeader(static_cast<abi::FrameType>(1), sizeof(abi::FrameHeader),
                     static_cast<uint32_t>(holds), 0);
      (void)SendFrame(ends.second, AsBytes(said), {}, {});
      std::array<std::byte, abi::kMaxFrameBytes> buffer;
      (void)ReceiveFrame(ends.second, buffer, ReceiveWait::kUntilDeadline,
                         std::chrono::steady_clock::now() + kPatience);
      return 0;
    });
    ends.second.Reset();
    std::array<std::byte, abi::kMaxFrameBytes> buffer;
    const auto said = ReceiveFrame(ends.first, buffer, ReceiveWait::kUntilDeadline,
                                   std::chrono::steady_clock::now() + kPatience);
    all = all && said.ok() && said->header.request_id == 1;
    readers.emplace_back(pid, std::move(ends.first));
  }
  Verdict("promise.importers_read_the_weights", all);
  // With the contexts of the importers, some hundred MiB each on a real GPU.
  const uint64_t shared = UsedBytes(uuid);
  std::printf("used_mib_1_holder %llu\nused_mib_8_importers %llu\n",
              static_cast<unsigned long long>((one - base) >> 20),      // NOLINT(runtime/int)
              static_cast<unsigned long long>((shared - base) >> 20));  // NOLINT(runtime/int)
  for (auto& [pid, socket] : readers) socket.Reset();
  for (auto& [pid, socket] : readers) (void)Good(pid);
  Verdict("promise.importers_share_one_copy", shared < one + 6 * bytes);

  const auto write = [&](const char* key, const std::function<Rc(Reader&)>& attempt) {
    const bool refused = Good(Spawn([&] {
      Reader reader(fd, bytes, Access::kRead);
      const Rc rc = attempt(reader);
      const Rc later = reader.driver->call().cuCtxSynchronize();
      std::printf("%s_rc %d then %d\n", key, static_cast<int>(rc), static_cast<int>(later));
      std::fflush(stdout);
      // The context may be dead: its owners have nothing to give back to.
      std::_Exit(rc != Rc::kSuccess || later != Rc::kSuccess ? 0 : 1);
      return 0;
    }));
    Verdict(key, refused);
  };
  write("promise.copy_into_read_only_is_refused", [](Reader& reader) {
    const uint64_t word = 0;
    return reader.driver->call().cuMemcpyHtoD(reader.segment.range().at, &word, sizeof word);
  });
  write("promise.kernel_store_into_read_only_is_refused", [](Reader& reader) {
    const cuda::DriverTable& call = reader.driver->call();
    cuda::ModuleHandle module = nullptr;
    cuda::FunctionHandle function = nullptr;
    if (call.cuModuleLoadData(&module, kPtx) != Rc::kSuccess ||
        call.cuModuleGetFunction(&function, module, "modelhost_poke") != Rc::kSuccess) {
      return Rc::kSuccess;  // Not an answer: a failure of the check.
    }
    const cuda::Stream stream = Must(cuda::CreateStream(*reader.driver));
    cuda::DevicePtr at = reader.segment.range().at;
    void* arguments[] = {&at};
    const Rc rc =
        call.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.get(), arguments, nullptr);
    return rc == Rc::kSuccess ? call.cuStreamSynchronize(stream.get()) : rc;
  });
  {
    Agent fresh;  // No process but this one, which has a descriptor, held the weights meanwhile.
    (void)Must(fresh.Ask(agent::Frame::kOpen, RequestFor(uuid, 0)));
    request.expected = checksum;
    Verdict("promise.a_descriptor_alone_keeps_the_weights_unchanged",
            fresh.Ask(agent::Frame::kVerify, request, {&fd}).ok());
    fresh.Kill();
  }
  fd.Reset();
  Verdict("promise.all_is_returned_with_the_last_descriptor", UsedBytes(uuid) < base + bytes / 2);
}

}  // namespace
}  // namespace modelhost

int main(int argc, char** argv) {
  ::alarm(150);
  const uint64_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024;
  modelhost::Check((mib / 2 * 2) << 20);
  std::printf("verdict %s\n", modelhost::failures == 0 ? "PASS" : "FAIL");
  return modelhost::failures == 0 ? 0 : 1;
}
