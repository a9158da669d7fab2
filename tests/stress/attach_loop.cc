// What the others notice: one process attaches again and again, another one reads tensors in a loop
// of a fixed rate, as a controller does. tests/bench/run has both do so with and without a load.
//
//   attach_loop --runtime-dir=D --ref=R --seconds=N --hz=N [--slow-us=N]
//
// What takes longer than --slow-us is told on stderr, with its moment (CLOCK_MONOTONIC). Prints one
// JSON object of microseconds: how long an attach takes (connect, acquire, first byte),
// and how much later than planned the reader had read 64 KiB (its gap).
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

constexpr size_t kMostGaps = size_t{1} << 20;
constexpr uint64_t kReadBytes = uint64_t{64} << 10;

struct Shared {
  std::atomic<bool> stop;
  std::atomic<bool> ready;
  std::atomic<size_t> count;
  std::atomic<uint64_t> sum;
  std::atomic<uint64_t> gaps[kMostGaps];
};

void Slow(const char* what, uint64_t when, uint64_t took) {
  std::fprintf(stderr, "slow %s %llu %.1f\n", what, static_cast<unsigned long long>(when),
               static_cast<double>(took) / 1e3);
}

[[noreturn]] void ReadLoop(Shared& shared, const std::string& runtime_dir, const std::string& ref,
                           uint64_t hz, uint64_t slow_ns) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  mh_handle* handle = Acquire(Connect(runtime_dir), ref);
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  if (mh_tensor_at(handle, 0, &view) != MH_OK) Die(ref, "has no tensor");
  const uint64_t nbytes = std::min(view.nbytes, kReadBytes);
  const uint64_t period = 1'000'000'000 / hz;
  shared.ready.store(true);
  uint64_t next = NowNs();
  while (!shared.stop.load()) {
    next += period;
    const timespec until{static_cast<time_t>(next / 1'000'000'000),
                         static_cast<long>(next % 1'000'000'000)};
    while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0) {
    }
    shared.sum.fetch_add(SumWords(view.data, nbytes));
    const uint64_t now = NowNs();
    if (now - next > slow_ns) Slow("read", next, now - next);
    const size_t number = shared.count.load();
    if (number < kMostGaps) {
      shared.gaps[number].store(now - next);
      shared.count.store(number + 1);
    }
    if (now > next + period) next = now;
  }
  ::_exit(0);
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string ref = Flag(argc, argv, "ref", "");
  const double seconds = std::stod(Flag(argc, argv, "seconds", "5"));
  const uint64_t hz = std::stoull(Flag(argc, argv, "hz", "500"));
  const uint64_t slow_ns = std::stoull(Flag(argc, argv, "slow-us", "1000000000")) * 1000;
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Die("mmap", "no memory");
  auto* shared = new (memory) Shared{};
  const pid_t reader = ::fork();
  if (reader == 0) ReadLoop(*shared, runtime_dir, ref, hz, slow_ns);
  while (!shared->ready.load()) {
    if (::waitpid(-1, nullptr, WNOHANG) > 0) Die("the reader", "ended before it began");
    Pause(500'000);
  }
  std::vector<uint64_t> attaches;
  const uint64_t end = NowNs() + static_cast<uint64_t>(seconds * 1e9);
  while (NowNs() < end) {
    const uint64_t start = NowNs();
    mh_client* client = Connect(runtime_dir);
    mh_handle* handle = Acquire(client, ref);
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor_at(handle, 0, &view) != MH_OK) Die(ref, "has no tensor");
    (void)*static_cast<const volatile unsigned char*>(view.data);
    attaches.push_back(NowNs() - start);
    if (attaches.back() > slow_ns) Slow("attach", start, attaches.back());
    mh_release(handle);
    mh_disconnect(client);
    Pause(1'000'000);  // Nodes start now and then; they do not use up a core with it.
  }
  shared->stop.store(true);
  ::waitpid(reader, nullptr, 0);
  std::vector<uint64_t> gaps;
  for (size_t i = 0; i < shared->count.load(); ++i) gaps.push_back(shared->gaps[i].load());
  std::printf(
      "{\"attaches\": %zu, \"attach_p50_us\": %.1f, \"attach_p99_us\": %.1f, \"attach_max_us\": "
      "%.1f, \"reads\": %zu, \"gap_p50_us\": %.1f, \"gap_p99_us\": %.1f, \"gap_p999_us\": %.1f}\n",
      attaches.size(), Percentile(attaches, 0.5) / 1e3, Percentile(attaches, 0.99) / 1e3,
      Percentile(attaches, 1) / 1e3, gaps.size(), Percentile(gaps, 0.5) / 1e3,
      Percentile(gaps, 0.99) / 1e3, Percentile(gaps, 0.999) / 1e3);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
