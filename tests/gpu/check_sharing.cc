// Several processes on one copy: importers, their rights, and a swap under readers.
#include <array>
#include <thread>

#include "proto/cuda/kernels.h"
#include "tests/gpu/gpu_check.h"

namespace modelhost::gpu {
namespace {

using cuda::Access;
using cuda::Rc;

constexpr int kImporters = 8;
constexpr int kReaders = 4;

struct Child {
  pid_t pid = -1;
  UniqueFd socket;
};

// `body` gets its end of a socket. What other children's ends it inherits ends with it.
Child SpawnTalking(const std::function<int(UniqueFd&)>& body) {
  auto ends = Must(MakeSeqpacketPair());
  const pid_t pid = Spawn([&] {
    ends.first.Reset();
    return body(ends.second);
  });
  return Child{pid, std::move(ends.first)};
}

// A kernel of ours, launched once.
Rc Launch(const Gpu& gpu, const char* name, std::array<cuda::DevicePtr, 2> arguments) {
  const cuda::DriverTable& call = gpu.driver->call();
  cuda::ModuleHandle loaded = nullptr;
  cuda::FunctionHandle function = nullptr;
  Rc rc = call.cuModuleLoadData(&loaded, cuda::kKernels);
  if (rc == Rc::kSuccess) rc = call.cuModuleGetFunction(&function, loaded, name);
  if (rc != Rc::kSuccess) Fail("a kernel: " + gpu.driver->Name(rc));
  const cuda::Stream stream = Must(cuda::CreateStream(*gpu.driver));
  std::array<void*, 2> pointers = {&arguments[0], &arguments[1]};
  rc = call.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.get(), pointers.data(), nullptr);
  return rc == Rc::kSuccess ? call.cuStreamSynchronize(stream.get()) : rc;
}

// Reads until told otherwise; 3 with a descriptor: another version to go on with.
int ReadAlong(UniqueFd& socket, UniqueFd& fd, uint64_t bytes) {
  const Gpu gpu;
  auto segment = Must(cuda::ImportSegment(*gpu.driver, fd, bytes, 0, Access::kRead));
  fd.Reset();  // An inherited descriptor keeps a whole version.
  uint64_t version = 0;
  double worst_gap = 0;
  double map_seconds = 0;
  std::vector<uint64_t> words(uint64_t{1} << 15);
  const uint64_t piece = words.size() * sizeof(uint64_t);
  double last = Seconds();
  uint64_t at = 0;
  for (uint64_t reads = 0;; ++reads) {
    std::array<std::byte, abi::kMaxFrameBytes> buffer;
    auto heard = ReceiveFrame(socket, buffer, ReceiveWait::kNo, std::chrono::steady_clock::now());
    if (heard.ok() && heard->fds.empty()) break;
    if (!heard.ok() && heard.error().code != Code::kDeadlineExceeded) return 4;
    if (heard.ok()) {
      const double before = Seconds();
      auto next =
          Must(cuda::ImportSegment(*gpu.driver, heard->fds.front(), bytes, 0, Access::kRead));
      map_seconds = Seconds() - before;
      segment = std::move(next);
      ++version;
    }
    const Rc rc = gpu.driver->call().cuMemcpyDtoH(words.data(), segment.range().at + at, piece);
    if (rc != Rc::kSuccess) Fail("a reader: " + gpu.driver->Name(rc));
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] != WordAt(at / sizeof(uint64_t) + i, version)) Fail("a reader: wrong bytes");
    }
    at = at + 2 * piece <= bytes ? at + piece : 0;
    const double now = Seconds();
    // From the second on: the first may wait for the device to wake up.
    if (reads > 0) worst_gap = std::max(worst_gap, now - last);
    last = now;
    if (reads == 0) Say(socket, 1);
    if (heard.ok()) Say(socket, 3);
  }
  Say(socket, static_cast<uint32_t>(worst_gap * 1e6) + 1);
  Say(socket, static_cast<uint32_t>(map_seconds * 1e6) + 1);
  return 0;
}

}  // namespace

void CheckImporters(const Machine& machine, const UniqueFd& fd) {
  // Contexts alone first: they cost some hundred MiB each, which is not the weights'.
  const auto used_with = [&](bool mapped, bool* all) {
    std::vector<Child> children;
    for (int i = 0; i < kImporters; ++i) {
      children.push_back(SpawnTalking([&, i](UniqueFd& socket) {
        if (!mapped) {
          const Gpu gpu;
          Say(socket, 1);
          (void)Hear(socket);
          return 0;
        }
        const Weights weights(fd, machine.bytes, Access::kRead);
        if (i == 0) Print("import_map_ms", weights.map_seconds * 1e3);
        Say(socket, weights.Holds(machine.bytes, 0, 64) ? 1 : 2);
        (void)Hear(socket);
        return 0;
      }));
    }
    *all = true;
    for (const Child& child : children) *all = Hear(child.socket) == 1 && *all;
    const uint64_t used = UsedBytes(machine);
    for (const Child& child : children) Say(child.socket, 1);
    for (const Child& child : children) (void)Good(child.pid);
    return used;
  };
  bool contexts = false;
  bool importers = false;
  const uint64_t one = UsedBytes(machine);
  const uint64_t idle = used_with(false, &contexts);
  const uint64_t shared = used_with(true, &importers);
  const auto mib = [&](uint64_t used) {
    return used < machine.base ? -1.0 : static_cast<double>((used - machine.base) >> 20);
  };
  Print("used_mib_1_holder", mib(one));
  Print("used_mib_8_contexts", mib(idle));
  Print("used_mib_8_importers", mib(shared));
  Verdict("importers_read_the_weights", contexts && importers);
  Verdict("importers_share_one_copy", shared < idle + machine.bytes / 2);
}

void CheckReadOnly(const Machine& machine, const UniqueFd& fd) {
  // Each in a process that may lose its context, and so gives nothing back.
  const auto in_sacrifice = [&](const std::string& promise,
                                const std::function<bool(Weights&)>& attempt) {
    Verdict(promise, Good(Spawn([&] {
              Weights weights(fd, machine.bytes, Access::kRead);
              const bool good = attempt(weights);
              std::_Exit(good ? 0 : 1);
              return 0;
            })));
  };
  const auto refused = [&](const std::string& promise, const std::function<Rc(Weights&)>& store) {
    in_sacrifice(promise, [&](Weights& weights) {
      const Rc rc = store(weights);
      const Rc later = weights.driver->call().cuCtxSynchronize();
      Print("rc." + promise, std::to_string(static_cast<int>(rc)) + " then " +
                                 std::to_string(static_cast<int>(later)));
      return rc != Rc::kSuccess || later != Rc::kSuccess;
    });
  };
  refused("copy_into_read_only_is_refused", [](Weights& weights) {
    const uint64_t word = 0;
    return weights.driver->call().cuMemcpyHtoD(weights.segment.range().at, &word, sizeof word);
  });
  refused("memset_of_read_only_is_refused", [](Weights& weights) {
    const cuda::DriverTable& call = weights.driver->call();
    if (call.cuMemsetD8 == nullptr) Fail("the driver lacks cuMemsetD8");
    return call.cuMemsetD8(weights.segment.range().at, 0, 64);
  });
  refused("kernel_store_into_read_only_is_refused", [](Weights& weights) {
    return Launch(weights, cuda::kPokeKernel, {weights.segment.range().at, 0});
  });
  // The positive control: without it a kernel that does not run would look like one that is
  // refused.
  in_sacrifice("kernel_load_from_read_only_works", [](Weights& weights) {
    const auto granularity = Must(cuda::MinimumGranularity(*weights.driver, 0));
    const auto made = Must(cuda::CreateAllocation(*weights.driver, 0, granularity));
    const auto at = Must(cuda::ReserveAddresses(*weights.driver, granularity));
    const auto out =
        Must(cuda::MapAllocation(*weights.driver, made, at.get(), 0, Access::kReadWrite));
    const cuda::DevicePtr from = weights.segment.range().at + 8 * sizeof(uint64_t);
    Rc rc = Launch(weights, cuda::kPeekKernel, {from, out.get().at});
    uint64_t word = 0;
    if (rc == Rc::kSuccess) {
      rc = weights.driver->call().cuMemcpyDtoH(&word, out.get().at, sizeof word);
    }
    Print("rc.kernel_load_from_read_only", std::to_string(static_cast<int>(rc)));
    return rc == Rc::kSuccess && word == WordAt(8, 0);
  });
  Verdict("weights_are_intact_after_every_attempt", Good(Spawn([&] {
            return Weights(fd, machine.bytes, Access::kRead).Holds(machine.bytes, 0, 1) ? 0 : 1;
          })));
}

void CheckSwap(const Machine& machine, Uploaded first) {
  std::vector<Child> readers;
  for (int i = 0; i < kReaders; ++i) {
    readers.push_back(
        SpawnTalking([&](UniqueFd& socket) { return ReadAlong(socket, first.fd, machine.bytes); }));
  }
  bool all = true;
  for (const Child& reader : readers) all = Hear(reader.socket) == 1 && all;
  Uploaded second;
  {
    Agent agent;
    (void)Must(agent.Ask(agent::Frame::kOpen, RequestFor(machine, 0)));
    second = Upload(agent, machine, MakeWeights(machine.bytes, 1));
  }  // The agent is killed while they read.
  const uint64_t both = UsedBytes(machine);
  for (const Child& reader : readers) Say(reader.socket, 3, &second.fd);
  for (const Child& reader : readers) all = Hear(reader.socket) == 3 && all;
  Verdict("readers_survive_the_killed_agent_and_the_swap", all);
  // Nobody maps the old version now; with its descriptor its memory goes.
  first.fd.Reset();
  const double closed = Seconds();
  uint64_t used = UsedBytes(machine);
  while (used + machine.bytes / 2 > both && Seconds() - closed < 5) used = UsedBytes(machine);
  Print("old_version_back_after_s", Seconds() - closed);
  Verdict("the_old_version_is_returned_after_a_swap", used + machine.bytes / 2 <= both);
  double gap = 0;
  double map = 0;
  for (const Child& reader : readers) Say(reader.socket, 9);
  for (const Child& reader : readers) {
    gap = std::max(gap, (Hear(reader.socket) - 1) / 1e3);
    map = std::max(map, (Hear(reader.socket) - 1) / 1e3);
    all = Good(reader.pid) && all;
  }
  Print("swap_worst_gap_between_reads_ms", gap);
  Print("swap_map_ms", map);
  Verdict("no_reader_saw_a_wrong_byte", all);
}

}  // namespace modelhost::gpu
