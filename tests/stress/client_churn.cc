// Clients that are started, killed at some moment of their short life, and started again.
//
//   client_churn --runtime-dir=D --ref=R --rounds=N --parallel=N --seed=N
//
// Each life connects, acquires, follows, reads, releases, in an order and to a point that the dice
// decide, and ends by SIGKILL: its own, or one that comes from outside after a random while. Prints
// one JSON object. A life that failed in another way (the daemon refused it, it read a wrong word)
// is counted as bad; exits 1 then.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <map>
#include <random>
#include <string>

#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

constexpr int kSteps = 7;

[[noreturn]] void KillMyself() {
  ::kill(::getpid(), SIGKILL);
  while (true) ::pause();
}

void ReadAll(const mh_handle* handle) {
  const uint64_t version = mh_handle_version(handle);
  for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor_at(handle, i, &view) != MH_OK) Die("index", "it is broken");
    const auto* words = static_cast<const uint64_t*>(view.data);
    for (uint64_t w = 0; w < view.nbytes / sizeof(uint64_t); w += 512) {
      if (words[w] >> 32 != version) Die("tensor", "it is of another version");
    }
  }
}

// `steps`: how far it gets before it kills itself; more than there are: it waits to be killed.
[[noreturn]] void Live(const std::string& runtime_dir, const std::string& ref, int steps) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  mh_client* client = nullptr;
  mh_handle* handle = nullptr;
  mh_live* live = nullptr;
  mh_error error = {};
  for (int step = 0; step < kSteps && step < steps; ++step) {
    switch (step) {
      case 0:
        client = Connect(runtime_dir);
        break;
      case 1:
        handle = Acquire(client, ref);
        break;
      case 2:
        ReadAll(handle);
        break;
      case 3:
        (void)mh_event_fd(client);
        break;
      case 4:
        if (mh_follow(client, ref.c_str(), nullptr, &live, &error) != MH_OK) {
          Die("mh_follow", error.message);
        }
        break;
      case 5: {
        mh_file_view view = MH_FILE_VIEW_INIT;
        if (mh_file_at(handle, 0, &view) != MH_OK) Die("mh_file_at", "0");
        if (mh_file(handle, view.path, &view) != MH_OK) Die("mh_file", view.path);
        break;
      }
      default:
        mh_release(handle);
    }
  }
  if (steps <= kSteps) KillMyself();
  while (true) ::pause();
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string ref = Flag(argc, argv, "ref", "");
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "500"));
  const int parallel = std::stoi(Flag(argc, argv, "parallel", "16"));
  std::mt19937_64 random(std::stoull(Flag(argc, argv, "seed", "1")));
  std::map<pid_t, uint64_t> alive;  // Until when; 0: it ends by itself.
  int begun = 0, killed = 0, bad = 0;
  const uint64_t start = NowNs();
  while (begun < rounds || !alive.empty()) {
    while (begun < rounds && alive.size() < static_cast<size_t>(parallel)) {
      const bool from_outside = random() % 2 == 0;
      const int steps = from_outside ? kSteps + 1 : static_cast<int>(random() % (kSteps + 1));
      const uint64_t until = from_outside ? NowNs() + random() % 5'000'000 : 0;
      const pid_t child = ::fork();
      if (child < 0) Die("fork", "no more processes");
      if (child == 0) Live(runtime_dir, ref, steps);
      alive[child] = until;
      ++begun;
    }
    const uint64_t now = NowNs();
    for (auto& [child, until] : alive) {
      if (until == 0 || until > now) continue;
      ::kill(child, SIGKILL);
      until = 0;
    }
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended <= 0) {
      Pause(100'000);
      continue;
    }
    alive.erase(ended);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
      ++killed;
    } else {
      ++bad;
    }
  }
  std::printf("{\"rounds\": %d, \"killed\": %d, \"bad\": %d, \"seconds\": %.1f}\n", begun, killed,
              bad, static_cast<double>(NowNs() - start) / 1e9);
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
