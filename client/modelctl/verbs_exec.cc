// exec: an unmodified program on the files of a leased version.
//
//   modelctl   takes the lease, forks, forwards signals, waits, removes the folder of links
//      '--> CMD     inherits every file's descriptor under the same number
//
// The lease is modelctl's, so it lasts exactly as long as the command.
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/modelctl/exec_plan.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/verbs.h"
#include "client/modelctl/worker_lease.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {
namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

// Holds back the signals to forward, and SIGCHLD. Made before any thread.
class HeldSignals {
 public:
  HeldSignals() {
    sigemptyset(&held_);
    for (const int signal : kForwarded) {
      // What nohup and a shell's background jobs ignore is ignored on, here and in the command.
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      if (action.sa_handler != SIG_IGN) sigaddset(&held_, signal);
    }
    sigaddset(&held_, SIGCHLD);
    // Ignored, it would take the end of the command from who waits for it.
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &child_before_);
    pthread_sigmask(SIG_BLOCK, &held_, &before_);
  }
  // What is still waiting was meant for a command that has ended; modelctl ends anyway.
  ~HeldSignals() {
    const timespec now{};
    while (sigtimedwait(&held_, nullptr, &now) > 0) {
    }
    PutBack();
  }
  // As this program found them. Async-signal-safe.
  void PutBack() const {
    ::sigaction(SIGCHLD, &child_before_, nullptr);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;

  // Whether one that ends a program is waiting. It is taken.
  bool TakeEnding() const {
    sigset_t ending;
    sigemptyset(&ending);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
      if (sigismember(&held_, signal) == 1) sigaddset(&ending, signal);
    }
    const timespec now{};
    return sigtimedwait(&ending, nullptr, &now) > 0;
  }
  siginfo_t Wait() const {
    siginfo_t info{};
    while (sigwaitinfo(&held_, &info) < 0) {
    }
    return info;
  }

 private:
  sigset_t held_, before_;
  struct sigaction child_before_ {};
};

// A version may have more files than the soft limit allows. Put back in the command.
rlimit RaiseFileLimit() {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit raised = before;
  raised.rlim_cur = raised.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &raised);
  return before;
}

// A program opens files at numbers below its soft limit; the version's descriptors move above it,
// or to the end where there is nothing above. So a program has its low numbers, and a path in a
// child that has closed them names nothing, not what came to have the number. Gives the owners of
// the moved ones.
std::vector<UniqueFd> MoveUp(std::vector<LeasedFile>& files, const rlimit& limit) {
  // The kernel's table goes up to the highest number: no megabytes for it.
  constexpr rlim_t kHighEnough = 16384;
  std::vector<UniqueFd> moved;
  if (limit.rlim_max <= files.size()) return moved;
  const rlim_t from =
      std::min({limit.rlim_cur, rlim_t{limit.rlim_max - files.size()}, kHighEnough});
  for (LeasedFile& file : files) {
    UniqueFd above(::fcntl(file.fd, F_DUPFD_CLOEXEC, static_cast<int>(from)));
    if (!above.valid()) return moved;
    file.fd = above.get();
    moved.push_back(std::move(above));
  }
  return moved;
}

struct Child {
  pid_t pid = -1;
  UniqueFd failure;  // Yields the errno of a failed exec, or nothing.
};

// Only async-signal-safe calls: other threads may have held any lock at the fork.
[[noreturn]] void Become(char* const* argv, char* const* environment,
                         const std::vector<LeasedFile>& files, const rlimit& file_limit,
                         const HeldSignals& signals, int failure_fd) {
  for (const LeasedFile& file : files) ::fcntl(file.fd, F_SETFD, 0);
  ::setrlimit(RLIMIT_NOFILE, &file_limit);
  ::signal(SIGPIPE, SIG_DFL);
  signals.PutBack();
  ::execvpe(argv[0], argv, environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t told = ::write(failure_fd, &error, sizeof(error));
  ::_exit(127);
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// An empty `environment` means this program's own.
Outcome<Child> Start(std::vector<std::string> command, std::vector<std::string> environment,
                     const std::vector<LeasedFile>& files, const rlimit& file_limit,
                     const HeldSignals& signals) {
  const std::vector<char*> argv = Pointers(command), changed = Pointers(environment);
  char* const* const variables = environment.empty() ? environ : changed.data();
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return FromError(ErrnoError(errno, "exec: make a pipe"), "");
  Child child;
  child.failure = UniqueFd(ends[0]);
  const UniqueFd failure_write(ends[1]);
  child.pid = ::fork();
  if (child.pid < 0) return FromError(ErrnoError(errno, "exec: start a process"), "");
  if (child.pid == 0) {
    Become(argv.data(), variables, files, file_limit, signals, failure_write.get());
  }
  return child;
}

// Forwards signals until the command has ended; the code that a shell would show for it.
int Supervise(pid_t pid, const HeldSignals& signals) {
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    if (ended == pid && WIFEXITED(status)) return WEXITSTATUS(status);
    if (ended == pid && WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    if (ended < 0 && errno != EINTR) return 1;
    const siginfo_t info = signals.Wait();
    // What the terminal sends, it has sent to the command too, unless that has a process group of
    // its own (timeout, setsid); but that it hangs up, to the leader of its session alone.
    const bool for_us_alone =
        ::getpgid(pid) != ::getpgrp() || (info.si_signo == SIGHUP && ::getsid(0) == ::getpid());
    if (info.si_signo != SIGCHLD && (info.si_code != SI_KERNEL || for_us_alone)) {
      ::kill(pid, info.si_signo);
    }
  }
}

}  // namespace

Exit Exec(Context& context, const ExecFlags& flags) {
  const Outcome<Ref> ref = ParseRef(flags.ref);
  if (!ref.ok()) return ref.exit();
  if (flags.command.empty()) {
    return Fail(ExitCode::kUsage, "exec: no command given (write modelctl exec MODEL -- CMD ARGS)");
  }
  const HeldSignals signals;
  const rlimit file_limit = RaiseFileLimit();
  bool ending = false;
  const auto interrupted = [&] { return ending = ending || signals.TakeEnding(); };
  const auto lease = WorkerLease::Take(context, *ref, interrupted);
  if (!lease.ok()) return lease.exit();
  auto files = lease->Files();
  if (!files.ok()) return files.exit();
  const std::vector<UniqueFd> moved = MoveUp(*files, file_limit);

  std::optional<LinkFolder> folder;
  if (NeedsFolder(flags.command, *files, flags.fd_paths)) {
    Outcome<LinkFolder> made = LinkFolder::Make(*files);
    if (!made.ok()) return made.exit();
    folder.emplace(*std::move(made));
  }
  const auto command =
      Substitute(flags.command, *files, folder ? folder->path() : "", flags.fd_paths);
  if (!command.ok()) return command.exit();
  std::vector<std::string> environment;
  if (flags.keep_names) {
    auto keeping = KeepingNames();
    if (!keeping.ok()) return keeping.exit();
    environment = *std::move(keeping);
  }
  if (interrupted()) return Exit{ExitCode::kInterrupted, ""};
  const auto child = Start(*command, std::move(environment), *files, file_limit, signals);
  if (!child.ok()) return child.exit();
  const int code = Supervise(child->pid, signals);
  int error = 0;
  if (::read(child->failure.get(), &error, sizeof(error)) == sizeof(error)) {
    Exit exit = FromError(ErrnoError(error, absl::StrCat("exec: ", (*command)[0])), "");
    absl::StrAppend(&exit.error, " (give a program's path, or a name that is in PATH)");
    return exit;
  }
  return Exit{static_cast<ExitCode>(code), ""};
}

}  // namespace modelhost::modelctl
