// Labels move while processes read: how long a flip takes, and whether a reader ever sees a mixture
// of two versions or a failure.
//
//   swap_bench --runtime-dir=D --model=M --first=A --second=B --swaps=N --readers=N
//
// Every 8-byte word of version V's tensors is (V << 32) | number. Half of the readers acquire and
// release again and again; the others follow the label and adopt. Prints one JSON object.
#include <grpcpp/grpcpp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "modelhost/modelhost.h"
#include "modelhost/v1/control.grpc.pb.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

// Shared between the readers and the one that swaps.
struct Shared {
  std::atomic<uint32_t> ready;
  std::atomic<bool> stop;
  std::atomic<uint64_t> reads;
  std::atomic<uint64_t> mixed;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> adopted;
};

// Whether all tensors of `handle` are those of its version.
bool Whole(const mh_handle* handle) {
  const uint64_t version = mh_handle_version(handle);
  for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor_at(handle, i, &view) != MH_OK) return false;
    const auto* words = static_cast<const uint64_t*>(view.data);
    for (uint64_t w = 0; w < view.nbytes / sizeof(uint64_t); ++w) {
      if (words[w] >> 32 != version) return false;
    }
  }
  return true;
}

void Read(Shared& shared, const std::string& runtime_dir, const std::string& model, bool follow) {
  mh_client* client = Connect(runtime_dir);
  mh_error error = {};
  mh_live* live = nullptr;
  if (follow && mh_follow(client, model.c_str(), nullptr, &live, &error) != MH_OK) {
    Die("mh_follow", error.message);
  }
  shared.ready.fetch_add(1);
  uint64_t before = 0;
  while (!shared.stop.load(std::memory_order_relaxed)) {
    mh_handle* handle = nullptr;
    if (follow) {
      const mh_handle* now = mh_live_adopt(live);
      if (mh_handle_version(now) != before) shared.adopted.fetch_add(1);
      before = mh_handle_version(now);
      if (!Whole(now)) shared.mixed.fetch_add(1);
    } else {
      if (mh_acquire(client, model.c_str(), nullptr, &handle, &error) != MH_OK) {
        if (shared.failed.fetch_add(1) == 0) std::fprintf(stderr, "a reader: %s\n", error.message);
        continue;
      }
      if (!Whole(handle)) shared.mixed.fetch_add(1);
      mh_release(handle);
    }
    shared.reads.fetch_add(1);
  }
  mh_live_release(live);
  mh_disconnect(client);
}

struct Swapped {
  std::vector<uint64_t> flip_ns;
  std::vector<uint64_t> whole_ns;  // As the caller sees it.
};

Swapped Swap(v1::Control::Stub& stub, const std::string& model, uint64_t first, uint64_t second,
             int swaps) {
  Swapped swapped;
  for (int i = 0; i < swaps; ++i) {
    v1::SwapRequest request;
    v1::SwapTarget* target = request.add_targets();
    target->set_model(model);
    target->set_version(i % 2 == 0 ? second : first);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    const uint64_t start = NowNs();
    const auto stream = stub.Swap(&context, request);
    v1::OperationEvent event;
    v1::Operation last;
    while (stream->Read(&event)) last = event.operation();
    const grpc::Status status = stream->Finish();
    if (!status.ok()) Die("swap", status.error_message());
    if (last.state() != v1::SUCCEEDED) Die("swap", last.failure().message());
    swapped.whole_ns.push_back(NowNs() - start);
    const auto& flip = last.result().flip();
    swapped.flip_ns.push_back(static_cast<uint64_t>(flip.seconds()) * 1000000000u +
                              static_cast<uint64_t>(flip.nanos()));
  }
  return swapped;
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string model = Flag(argc, argv, "model", "");
  const uint64_t first = std::stoull(Flag(argc, argv, "first", "1"));
  const uint64_t second = std::stoull(Flag(argc, argv, "second", "2"));
  const int swaps = std::stoi(Flag(argc, argv, "swaps", "1000"));
  const int readers = std::stoi(Flag(argc, argv, "readers", "16"));

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
      Read(*shared, runtime_dir, model, i % 2 == 1);
      ::_exit(0);
    }
    children.push_back(child);
  }
  int lost = 0;
  while (shared->ready.load() < static_cast<uint32_t>(readers)) {
    int status = 0;
    if (::waitpid(-1, &status, WNOHANG) > 0) Die("a reader", "ended before it began");
    ::sched_yield();
  }
  const auto stub = v1::Control::NewStub(grpc::CreateChannel(
      "unix:" + runtime_dir + "/control.sock", grpc::InsecureChannelCredentials()));
  const Swapped swapped = Swap(*stub, model, first, second, swaps);
  shared->stop.store(true);
  for (const pid_t child : children) {
    int status = 0;
    if (::waitpid(child, &status, 0) != child || status != 0) ++lost;
  }
  std::printf(
      "{\"flip_p50_us\": %.3f, \"flip_p99_us\": %.3f, \"swap_p50_us\": %.1f, \"bad_reads\": %llu, "
      "\"mixed\": %llu, \"failed\": %llu, \"lost_readers\": %d, \"reads\": %llu, \"adopted\": "
      "%llu, "
      "\"swaps\": %d, \"readers\": %d}\n",
      Percentile(swapped.flip_ns, 0.5) / 1e3, Percentile(swapped.flip_ns, 0.99) / 1e3,
      Percentile(swapped.whole_ns, 0.5) / 1e3,
      static_cast<unsigned long long>(shared->mixed.load() + shared->failed.load()) +
          static_cast<unsigned long long>(lost),
      static_cast<unsigned long long>(shared->mixed.load()),
      static_cast<unsigned long long>(shared->failed.load()), lost,
      static_cast<unsigned long long>(shared->reads.load()),
      static_cast<unsigned long long>(shared->adopted.load()), swaps, readers);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
