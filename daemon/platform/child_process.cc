#include "daemon/platform/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

extern char** environ;

namespace modelhost {
namespace {

constexpr absl::Duration kGoOnInterval = absl::Milliseconds(20);
constexpr int kIdOfPidfd = 3;  // P_PIDFD, Linux 5.4.

// What posix_spawn is told, freed at the end.
class SpawnPlan {
 public:
  explicit SpawnPlan(bool quiet) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    // A group of its own: what a terminal sends to the daemon's is not for it.
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    ::posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    error_ = ::posix_spawn_file_actions_addopen(&actions_, 0, "/dev/null", O_RDWR, 0);
    Give(0, 1);
    // What a program of ours says on stderr is for the daemon's log; libraries of others talk more.
    if (quiet) Give(0, 2);
  }
  ~SpawnPlan() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnPlan(const SpawnPlan&) = delete;

  void Give(int fd, int as) {
    if (error_ == 0) error_ = ::posix_spawn_file_actions_adddup2(&actions_, fd, as);
  }
  int Spawn(const std::string& path, std::vector<std::string> words, char** environment,
            pid_t* pid) {
    if (error_ != 0) return error_;
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    return ::posix_spawn(pid, path.c_str(), &actions_, &attributes_, arguments.data(), environment);
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
  int error_ = 0;
};

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const UniqueFd& file, const ChildProgram& program,
                                                 const std::vector<const UniqueFd*>& descriptors) {
  // Numbers above all that are copied from: a copy must not cover the next one's source.
  int first = std::max(file.get(), 2) + 1;
  for (const UniqueFd* fd : descriptors) first = std::max(first, fd->get() + 1);
  const std::string& name = program.name;
  SpawnPlan plan(program.quiet);
  for (size_t i = 0; i < descriptors.size(); ++i) {
    plan.Give(descriptors[i]->get(), first + static_cast<int>(i));
  }
  pid_t pid = -1;
  std::vector<std::string> words = {name};
  words.insert(words.end(), program.arguments.begin(), program.arguments.end());
  words.push_back(absl::StrCat(first));
  char* none[] = {nullptr};
  const int error = plan.Spawn(absl::StrCat("/proc/self/fd/", file.get()), std::move(words),
                               program.keep_environment ? environ : none, &pid);
  if (error == EBADF) {  // A number at or above RLIMIT_NOFILE.
    return absl::ResourceExhaustedError(
        absl::StrCat(name, ": ", descriptors.size(), " descriptors from number ", first,
                     " on are more than a process may have (raise LimitNOFILE)"));
  }
  if (error != 0) return ErrnoStatus(error, absl::StrCat("cannot start ", name));
  // No race: a child that has ended keeps its number until it is waited for, and only here is it.
  UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  ChildProcess child(pid, std::move(pidfd));
  if (!child.pidfd_.valid()) {
    const int why = errno;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    child.pid_ = -1;
    return ErrnoStatus(why, absl::StrCat("cannot watch ", name));
  }
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pidfd_(std::move(other.pidfd_)),
      killed_(other.killed_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  Kill();
  pid_ = std::exchange(other.pid_, -1);
  pidfd_ = std::move(other.pidfd_);
  killed_ = other.killed_;
  return *this;
}

ChildProcess::~ChildProcess() { Kill(); }

void ChildProcess::Kill(absl::Duration patience) {
  if (Gone()) return;
  if (std::exchange(killed_, true)) return;
  ::syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0);
  // It ends at once, unless it waits for a device that does not answer.
  pollfd wanted{pidfd_.get(), POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(absl::ToInt64Milliseconds(patience))) > 0) (void)Reap();
}

bool ChildProcess::Gone() {
  if (pid_ >= 0) (void)Reap();
  return pid_ < 0;
}

absl::StatusOr<std::optional<ChildEnd>> ChildProcess::Reap() {
  siginfo_t info{};
  int result = 0;
  do {
    result = ::waitid(static_cast<idtype_t>(kIdOfPidfd), static_cast<id_t>(pidfd_.get()), &info,
                      WEXITED | WNOHANG);
  } while (result != 0 && errno == EINTR);
  if (result == 0 && info.si_pid == 0) return std::nullopt;
  pid_ = -1;
  if (result != 0) return ErrnoStatus(errno, "the end of a child");
  return ChildEnd{.signalled = info.si_code != CLD_EXITED, .code = info.si_status};
}

absl::StatusOr<ChildEnd> ChildProcess::Wait(Clock& clock, absl::Duration most,
                                            const std::function<bool()>& go_on) {
  const absl::Duration end = clock.Monotonic() + most;
  while (true) {
    const absl::Duration left = end - clock.Monotonic();
    pollfd wanted{pidfd_.get(), POLLIN, 0};
    const absl::Duration now = std::clamp(left, absl::ZeroDuration(), kGoOnInterval);
    const int ready = ::poll(&wanted, 1, static_cast<int>(absl::ToInt64Milliseconds(now)));
    if (ready > 0) {
      auto ended = Reap();
      if (!ended.ok()) return ended.status();
      if (ended->has_value()) return **ended;
      return absl::InternalError("a child that has ended cannot be taken away (is it debugged?)");
    }
    if (ready < 0 && errno != EINTR) {
      const int error = errno;
      Kill();
      return ErrnoStatus(error, "waiting for a child");
    }
    if (go_on && !go_on()) {
      Kill();
      return absl::CancelledError("cancelled");
    }
    if (left <= absl::ZeroDuration()) {
      Kill();
      return absl::DeadlineExceededError(
          absl::StrCat("no answer for ", absl::FormatDuration(most)));
    }
  }
}

void LateChildren::Keep(ChildProcess child) {
  if (child.Gone()) return;
  const absl::MutexLock lock(&mutex_);
  children_.push_back(std::move(child));
}

size_t LateChildren::Reap() {
  const absl::MutexLock lock(&mutex_);
  std::erase_if(children_, [](ChildProcess& child) { return child.Gone(); });
  return children_.size();
}

}  // namespace modelhost
