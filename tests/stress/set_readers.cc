// Two models move together, again and again, while processes read both: does a reader ever see a
// page of another version, half of a set, a failure, or a step back in time?
//
//   set_readers --runtime-dir=D --models=A,B --swaps=N --readers=N --hz=N --idle-seconds=N
//
// Both models have the versions 1 and 2, of pages as models.write_paged makes them: every word of a
// page names version and place, the last one is a checksum over the page and its version. Half of
// the readers acquire the set and give it back each time, the others follow and adopt it. Each
// reads both models in full `hz` times a second, as a control loop does, first with nobody
// swapping, for comparison. A gap is how much later than planned a reader had read everything.
//
// Prints one JSON object; exits 1 when a read was bad.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/stress/stress_util.h"

namespace modelhost::bench {
namespace {

constexpr size_t kModels = 2;
constexpr uint64_t kPageWords = 512;
constexpr size_t kBuckets = 4096;  // Of gaps, of 50 us.
constexpr uint64_t kBucketNs = 50'000;

struct Shared {
  std::atomic<uint32_t> ready;
  std::atomic<uint32_t> phase;  // 0: idle, 1: swapping, 2: end.
  std::atomic<uint64_t> reads;
  std::atomic<uint64_t> pages;
  std::atomic<uint64_t> mixed;     // A page that is not of its version, or damaged.
  std::atomic<uint64_t> half;      // One model of the set is newer than the other.
  std::atomic<uint64_t> failed;    // An acquire that did not work.
  std::atomic<uint64_t> backward;  // A generation that is lower than one seen before.
  std::atomic<uint64_t> adopted;
  std::array<std::array<std::atomic<uint64_t>, kBuckets>, 2> gaps;  // By phase.
};

// How many pages of a model there are; 0 when one of them is not as its version says.
uint64_t GoodPages(const mh_handle* handle) {
  const uint64_t version = mh_handle_version(handle);
  uint64_t pages = 0;
  for (size_t t = 0; t < mh_tensor_count(handle); ++t) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor_at(handle, t, &view) != MH_OK) return 0;
    const auto* words = static_cast<const uint64_t*>(view.data);
    for (uint64_t page = 0; page < view.nbytes / (kPageWords * sizeof(uint64_t)); ++page) {
      uint64_t sum = version;
      for (uint64_t w = 0; w + 1 < kPageWords; ++w) {
        const uint64_t word = words[page * kPageWords + w];
        if (word != (version << 32 | (page * kPageWords + w))) return 0;
        sum = sum * 31 + word;
      }
      if (words[page * kPageWords + kPageWords - 1] != sum) return 0;
      ++pages;
    }
  }
  return pages;
}

class Reader {
 public:
  Reader(Shared& shared, const std::string& runtime_dir, const std::vector<std::string>& models,
         bool follow)
      : shared_(shared), client_(Connect(runtime_dir)) {
    for (const std::string& model : models) refs_.push_back(model.c_str());
    mh_error error = {};
    if (follow && mh_follow_set(client_, refs_.data(), kModels, nullptr, &live_, &error) != MH_OK) {
      Die("mh_follow_set", error.message);
    }
  }

  void Run(uint64_t hz) {
    shared_.ready.fetch_add(1);
    const uint64_t period = 1'000'000'000 / hz;
    uint64_t next = NowNs() + period * (static_cast<uint64_t>(::getpid()) % 16) / 16;
    while (true) {
      next += period;
      const timespec until{static_cast<time_t>(next / 1'000'000'000),
                           static_cast<long>(next % 1'000'000'000)};
      while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0) {
      }
      const uint32_t phase = shared_.phase.load();
      if (phase > 1) break;
      if (live_ != nullptr) {
        Adopt();
      } else {
        Acquire();
      }
      const uint64_t now = NowNs();
      const size_t bucket = std::min<size_t>((now - next) / kBucketNs, kBuckets - 1);
      shared_.gaps[phase][bucket].fetch_add(1, std::memory_order_relaxed);
      if (now > next + period) next = now;  // What is lost is lost.
    }
    mh_live_set_release(live_);
    mh_disconnect(client_);
  }

 private:
  void Adopt() {
    std::array<const mh_handle*, kModels> handles{};
    if (mh_live_set_adopt(live_, handles.data(), kModels) == 1) shared_.adopted.fetch_add(1);
    Look(handles);
  }

  void Acquire() {
    std::array<mh_handle*, kModels> handles{};
    mh_error error = {};
    if (mh_acquire_set(client_, refs_.data(), kModels, nullptr, handles.data(), &error) != MH_OK) {
      if (shared_.failed.fetch_add(1) == 0) std::fprintf(stderr, "a reader: %s\n", error.message);
      return;
    }
    Look({handles[0], handles[1]});
    for (mh_handle* handle : handles) mh_release(handle);
  }

  void Look(const std::array<const mh_handle*, kModels>& handles) {
    shared_.reads.fetch_add(1);
    if (mh_handle_version(handles[0]) != mh_handle_version(handles[1])) shared_.half.fetch_add(1);
    for (size_t i = 0; i < kModels; ++i) {
      const uint64_t generation = mh_handle_generation(handles[i]);
      if (generation < seen_[i]) shared_.backward.fetch_add(1);
      seen_[i] = generation;
      const uint64_t pages = GoodPages(handles[i]);
      if (pages == 0) shared_.mixed.fetch_add(1);
      shared_.pages.fetch_add(pages);
    }
  }

  Shared& shared_;
  mh_client* client_;
  mh_live_set* live_ = nullptr;
  std::vector<const char*> refs_;
  std::array<uint64_t, kModels> seen_{};
};

double GapUs(const Shared& shared, size_t phase, double share) {
  uint64_t all = 0;
  for (const auto& count : shared.gaps[phase]) all += count.load();
  const auto wanted = static_cast<uint64_t>(share * static_cast<double>(all));
  uint64_t below = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    below += shared.gaps[phase][i].load();
    if (below > wanted) return static_cast<double>((i + 1) * kBucketNs) / 1e3;
  }
  return static_cast<double>(kBuckets * kBucketNs) / 1e3;
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string names = Flag(argc, argv, "models", "a,b");
  const int swaps = std::stoi(Flag(argc, argv, "swaps", "1000"));
  const int readers = std::stoi(Flag(argc, argv, "readers", "64"));
  const uint64_t hz = std::stoull(Flag(argc, argv, "hz", "20"));
  const double idle_seconds = std::stod(Flag(argc, argv, "idle-seconds", "5"));
  const size_t comma = names.find(',');
  if (comma == std::string::npos) Die("--models", "names two");
  const std::vector<std::string> models = {names.substr(0, comma), names.substr(comma + 1)};

  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Die("mmap", "no memory");
  auto* shared = new (memory) Shared{};
  std::vector<pid_t> children;
  for (int i = 0; i < readers; ++i) {  // Before gRPC starts threads of its own.
    const pid_t child = ::fork();
    if (child < 0) Die("fork", "no more processes");
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      Reader(*shared, runtime_dir, models, i % 2 == 1).Run(hz);
      ::_exit(0);
    }
    children.push_back(child);
  }
  while (shared->ready.load() < static_cast<uint32_t>(readers)) {
    if (::waitpid(-1, nullptr, WNOHANG) > 0) Die("a reader", "ended before it began");
    Pause(1'000'000);
  }
  Pause(static_cast<uint64_t>(idle_seconds * 1e9));
  shared->phase.store(1);
  const auto stub = ControlStub(runtime_dir);
  std::vector<uint64_t> flips, whole;
  const uint64_t start = NowNs();
  for (int i = 0; i < swaps; ++i) {
    v1::SwapRequest request;
    for (const std::string& model : models) {
      v1::SwapTarget* target = request.add_targets();
      target->set_model(model);
      target->set_version(i % 2 == 0 ? 2 : 1);
    }
    grpc::ClientContext context;
    SetDeadline(context, 60);
    const uint64_t begin = NowNs();
    v1::Operation last;
    const grpc::Status status = LastOf(*stub->Swap(&context, request), &last);
    if (!status.ok()) Die("swap", status.error_message());
    if (last.state() != v1::SUCCEEDED) Die("swap", last.failure().message());
    whole.push_back(NowNs() - begin);
    const auto& flip = last.result().flip();
    flips.push_back(static_cast<uint64_t>(flip.seconds()) * 1'000'000'000u +
                    static_cast<uint64_t>(flip.nanos()));
  }
  const double seconds = static_cast<double>(NowNs() - start) / 1e9;
  shared->phase.store(2);
  int lost = 0;
  for (const pid_t child : children) {
    int status = 0;
    if (::waitpid(child, &status, 0) != child || status != 0) ++lost;
  }
  const auto number = [](const std::atomic<uint64_t>& value) {
    return static_cast<unsigned long long>(value.load());
  };
  const uint64_t bad = shared->mixed + shared->half + shared->failed + shared->backward +
                       static_cast<uint64_t>(lost);
  std::printf(
      "{\"swaps\": %d, \"readers\": %d, \"seconds\": %.1f, \"flip_p50_us\": %.3f, \"flip_p99_us\": "
      "%.3f, \"swap_p50_us\": %.1f, \"reads\": %llu, \"pages\": %llu, \"adopted\": %llu, \"bad\": "
      "%llu, \"mixed\": %llu, \"half\": %llu, \"failed\": %llu, \"backward\": %llu, "
      "\"lost_readers\": %d, \"idle_gap_p999_us\": %.0f, \"gap_p999_us\": %.0f, "
      "\"idle_gap_p50_us\": %.0f, \"gap_p50_us\": %.0f}\n",
      swaps, readers, seconds, Percentile(flips, 0.5) / 1e3, Percentile(flips, 0.99) / 1e3,
      Percentile(whole, 0.5) / 1e3, number(shared->reads), number(shared->pages),
      number(shared->adopted), static_cast<unsigned long long>(bad), number(shared->mixed),
      number(shared->half), number(shared->failed), number(shared->backward), lost,
      GapUs(*shared, 0, 0.999), GapUs(*shared, 1, 0.999), GapUs(*shared, 0, 0.5),
      GapUs(*shared, 1, 0.5));
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
