#include "daemon/platform/probed_machine.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/machine_probe.h"
#include "proto/handle/unique_fd.h"

extern char** environ;

namespace modelhost {
namespace {

constexpr int kLookMs = 20;  // How long a wait goes on without a look at `cancelled`.
constexpr size_t kMaxProbeOutput = size_t{64} << 10;
constexpr int kReapTries = 50;

bool AllKnown(const MachineFacts& facts) {
  return facts.platform.known() && facts.tensorrt.known() && facts.compute_capability.known() &&
         facts.cuda_driver.known();
}

// A child with `out` as its stdout and nothing else of ours.
absl::StatusOr<pid_t> Spawn(std::vector<std::string> command, const UniqueFd& out) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out.get(), 1);
  ::posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  // Signals are blocked on the daemon's threads; the child must be as any program.
  sigset_t none;
  ::sigemptyset(&none);
  sigset_t pipe;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &pipe);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return ErrnoStatus(error, absl::StrCat("starting ", command[0]));
  return pid;
}

}  // namespace

std::vector<std::string> ProbedMachine::DefaultCommand() {
  return {"/proc/self/exe", "probe-machine"};
}

ProbedMachine::ProbedMachine(Clock& clock, std::vector<std::string> command,
                             absl::Duration deadline)
    : clock_(clock), command_(std::move(command)), deadline_(deadline) {}

ProbedMachine::~ProbedMachine() = default;

void ProbedMachine::SetOverrides(MachineFacts overrides) {
  absl::MutexLock lock(&mutex_);
  overrides_ = std::move(overrides);
}

void ProbedMachine::Forget() {
  absl::MutexLock lock(&mutex_);
  found_.reset();
}

MachineFacts ProbedMachine::WithOverrides(MachineFacts facts) const {
  for (MachineFact MachineFacts::*member :
       {&MachineFacts::platform, &MachineFacts::tensorrt, &MachineFacts::compute_capability,
        &MachineFacts::cuda_driver}) {
    if ((overrides_.*member).known()) facts.*member = overrides_.*member;
  }
  return facts;
}

absl::StatusOr<MachineFacts> ProbedMachine::Facts(bool only_platform,
                                                  const std::function<bool()>& cancelled) {
  if (only_platform) {
    MachineFacts facts;
    facts.platform = ProbePlatform();
    absl::MutexLock lock(&mutex_);
    return WithOverrides(std::move(facts));
  }
  {
    absl::MutexLock lock(&mutex_);
    if (AllKnown(overrides_)) return overrides_;
    // Whoever looks already looks for all.
    while (looking_) {
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](bool* looking) { return !*looking; }, &looking_),
                              absl::Milliseconds(kLookMs));
      if (cancelled()) return absl::CancelledError("probe-machine: cancelled");
    }
    const absl::Duration age = clock_.Monotonic() - looked_at_;
    if (found_.has_value() && (AllKnown(WithOverrides(*found_)) || age < kRetry)) {
      return WithOverrides(*found_);
    }
    looking_ = true;
  }
  auto facts = Look(cancelled);
  absl::MutexLock lock(&mutex_);
  looking_ = false;
  if (!facts.ok()) return facts.status();
  found_ = *facts;
  looked_at_ = clock_.Monotonic();
  return WithOverrides(*std::move(facts));
}

absl::StatusOr<MachineFacts> ProbedMachine::Look(const std::function<bool()>& cancelled) {
  std::string text;
  absl::Status ended = RunChild(cancelled, &text);
  if (absl::IsCancelled(ended)) return ended;
  // What it said before a driver made it crash or hang is good; a half line is none.
  text.resize(text.find_last_of('\n') + 1);
  auto said = ParseFacts(text);
  if (!said.ok()) ended = said.status();
  MachineFacts facts = said.ok() ? *std::move(said) : MachineFacts();
  facts.platform = ProbePlatform();
  for (MachineFact* fact : {&facts.tensorrt, &facts.compute_capability, &facts.cuda_driver}) {
    if (fact->known() || !fact->unknown.empty()) continue;
    fact->unknown = ended.ok() ? "probe-machine: does not say" : std::string(ended.message());
  }
  return facts;
}

absl::Status ProbedMachine::RunChild(const std::function<bool()>& cancelled, std::string* text) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "probe-machine: a pipe");
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  auto pid = Spawn(command_, out);
  out.Reset();
  if (!pid.ok()) return pid.status();

  const absl::Duration end = clock_.Monotonic() + deadline_;
  absl::Status status;
  while (true) {
    if (cancelled()) {
      status = absl::CancelledError("probe-machine: cancelled");
    } else if (clock_.Monotonic() >= end) {
      status = absl::DeadlineExceededError(absl::StrCat("probe-machine: no answer within ",
                                                        absl::FormatDuration(deadline_),
                                                        " (does the CUDA driver hang?)"));
    } else if (text->size() > kMaxProbeOutput) {
      status = absl::InvalidArgumentError("probe-machine: says more than there is to say");
    }
    if (!status.ok()) break;
    pollfd ready{in.get(), POLLIN, 0};
    if (::poll(&ready, 1, kLookMs) <= 0) continue;
    std::array<char, 4096> part;
    const ssize_t got = ::read(in.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text->append(part.data(), static_cast<size_t>(got));
  }
  if (!status.ok()) ::kill(*pid, SIGKILL);
  int how = 0;
  pid_t ended = 0;
  // One that hangs inside the driver dies when that lets go of it; nobody waits for that.
  for (int tries = 0; tries < kReapTries && ended == 0; ++tries) {
    ended = ::waitpid(*pid, &how, WNOHANG);
    if (ended == 0) absl::SleepFor(absl::Milliseconds(kLookMs));
  }
  Reap(ended == 0 ? *pid : 0);
  if (!status.ok()) return status;
  if (ended > 0 && WIFEXITED(how) && WEXITSTATUS(how) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      ended > 0 && WIFSIGNALED(how)
          ? absl::StrCat("probe-machine: ended by signal ", WTERMSIG(how))
          : absl::StrCat("probe-machine: ended with ", ended > 0 ? WEXITSTATUS(how) : -1));
}

void ProbedMachine::Reap(pid_t pid) {
  absl::MutexLock lock(&mutex_);
  if (pid > 0) {
    ::kill(pid, SIGKILL);
    unreaped_.push_back(pid);
  }
  std::erase_if(unreaped_, [](pid_t each) { return ::waitpid(each, nullptr, WNOHANG) != 0; });
}

}  // namespace modelhost
