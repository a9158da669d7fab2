// How long after a client's `kill -9` is its lease gone? And what of that is the kernel, which
// takes the client's memory apart before it closes its sockets?
//
//   lease_gone --runtime-dir=D --ref=R --rounds=N
//
// Each round a process acquires R, touches every page of it, and is killed; the daemon is asked
// without a pause until no lease is left. Nobody else may hold a lease meanwhile. Prints one JSON
// object of microseconds: from the signal to the end of the process (`death`), and from the signal
// to the first answer without the lease (`gone`).
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/stress/stress_util.h"

namespace modelhost::bench {
namespace {

[[noreturn]] void Hold(const std::string& runtime_dir, const std::string& ref, int ready) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  mh_handle* handle = Acquire(Connect(runtime_dir), ref);
  uint64_t sum = 0;
  for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor_at(handle, i, &view) != MH_OK) Die(ref, "has a broken index");
    const auto* bytes = static_cast<const volatile char*>(view.data);
    for (uint64_t at = 0; at < view.nbytes; at += 4096) sum += static_cast<uint64_t>(bytes[at]);
  }
  if (::write(ready, &sum, sizeof(sum)) != sizeof(sum)) ::_exit(1);
  while (true) ::pause();
}

uint64_t Leases(v1::Control::Stub& stub) {
  grpc::ClientContext context;
  SetDeadline(context, 10);
  v1::GetStatusResponse response;
  const grpc::Status status = stub.GetStatus(&context, v1::GetStatusRequest(), &response);
  if (!status.ok()) Die("GetStatus", status.error_message());
  return response.leases();
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string ref = Flag(argc, argv, "ref", "");
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "100"));
  // The clients are forked by a process that has no threads; gRPC makes some in this one.
  int orders[2], answers[2];
  if (::pipe(orders) != 0 || ::pipe(answers) != 0) Die("pipe", "no descriptors");
  const pid_t nursery = ::fork();
  if (nursery == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(orders[1]);
    char order = 0;
    while (::read(orders[0], &order, 1) == 1) {
      int ready[2];
      if (::pipe(ready) != 0) ::_exit(1);
      const pid_t child = ::fork();
      if (child == 0) Hold(runtime_dir, ref, ready[1]);
      ::close(ready[1]);
      uint64_t sum = 0;
      if (::read(ready[0], &sum, sizeof(sum)) != sizeof(sum)) ::_exit(1);
      ::close(ready[0]);
      if (::write(answers[1], &child, sizeof(child)) != sizeof(child)) ::_exit(1);
      if (::read(orders[0], &order, 1) != 1) ::_exit(1);  // Kill it.
      const uint64_t start = NowNs();
      ::kill(child, SIGKILL);
      if (::write(answers[1], &start, sizeof(start)) != sizeof(start)) ::_exit(1);
      ::waitpid(child, nullptr, 0);
      const uint64_t dead = NowNs();
      if (::write(answers[1], &dead, sizeof(dead)) != sizeof(dead)) ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(answers[1]);
  ::close(orders[0]);
  const auto order = [&] {
    if (::write(orders[1], "x", 1) != 1) Die("nursery", "is gone");
  };
  const auto answer = [&](auto* value) {
    if (::read(answers[0], value, sizeof(*value)) != sizeof(*value)) Die("nursery", "is gone");
  };
  const auto stub = ControlStub(runtime_dir);
  if (Leases(*stub) != 0) Die(ref, "somebody holds a lease");
  std::vector<uint64_t> gone, death;
  for (int i = 0; i < rounds; ++i) {
    order();
    pid_t child = 0;
    answer(&child);
    if (Leases(*stub) != 1) Die(ref, "the client has no lease");
    order();
    uint64_t start = 0, dead = 0;
    answer(&start);
    while (Leases(*stub) != 0) {
    }
    gone.push_back(NowNs() - start);
    answer(&dead);
    death.push_back(dead - start);
  }
  ::close(orders[1]);
  ::waitpid(nursery, nullptr, 0);
  std::printf(
      "{\"rounds\": %d, \"gone_p50_us\": %.1f, \"gone_p99_us\": %.1f, \"death_p50_us\": %.1f, "
      "\"death_p99_us\": %.1f}\n",
      rounds, Percentile(gone, 0.5) / 1e3, Percentile(gone, 0.99) / 1e3,
      Percentile(death, 0.5) / 1e3, Percentile(death, 0.99) / 1e3);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
