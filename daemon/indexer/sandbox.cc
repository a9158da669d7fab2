#include "daemon/indexer/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/handle/unique_fd.h"

#ifndef MODELHOST_SANITIZED
#include <seccomp.h>
#endif

namespace modelhost {
namespace {

absl::Status SystemError(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::Status Limit(int resource, uint64_t soft, uint64_t hard) {
  const rlimit limit{.rlim_cur = soft, .rlim_max = hard};
  if (::setrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0) {
    return absl::OkStatus();
  }
  return SystemError("setrlimit");
}

absl::Status LimitCpu(uint64_t seconds) {
  // At the soft limit comes a signal of its own, which says what happened.
  return Limit(RLIMIT_CPU, seconds, seconds + 5);
}

}  // namespace

void BreakOut() { const UniqueFd root(::open("/", O_RDONLY | O_CLOEXEC)); }

#ifdef MODELHOST_SANITIZED
absl::Status EnterSandbox(const SandboxLimits& limits) {
  // Address space is the sanitizers' own business.
  if (auto status = LimitCpu(limits.cpu_seconds); !status.ok()) return status;
  return absl::UnimplementedError("no system call filter in a build under a sanitizer");
}
#else
namespace {

absl::StatusOr<uint64_t> AddressSpaceBytes() {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/statm", "re"),
                                                       &std::fclose);
  unsigned long pages = 0;  // NOLINT: as scanf wants it.
  if (file == nullptr || std::fscanf(file.get(), "%lu", &pages) != 1) {
    return SystemError("/proc/self/statm");
  }
  return uint64_t{pages} * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

absl::Status SetLimits(const SandboxLimits& limits) {
  const auto mapped = AddressSpaceBytes();
  if (!mapped.ok()) return mapped.status();
  const uint64_t space = *mapped + limits.memory_bytes;
  for (const auto& [resource, most] : {std::pair<int, uint64_t>{RLIMIT_AS, space},
                                       {RLIMIT_FSIZE, limits.file_bytes},
                                       {RLIMIT_CORE, 0},
                                       {RLIMIT_MEMLOCK, 0}}) {
    if (auto status = Limit(resource, most, most); !status.ok()) return status;
  }
  return LimitCpu(limits.cpu_seconds);
}

// As the macros of seccomp.h, which are C.
scmp_arg_cmp Argument(unsigned number, scmp_compare how, scmp_datum_t first,
                      scmp_datum_t second = 0) {
  scmp_arg_cmp wanted{};
  wanted.arg = number;
  wanted.op = how;
  wanted.datum_a = first;
  wanted.datum_b = second;
  return wanted;
}

absl::Status LeaveTheDaemonsThings() {
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null.valid()) return SystemError("/dev/null");
  for (const int standard : {0, 1, 2}) {
    if (::dup2(null.get(), standard) < 0) return SystemError("dup2");
  }
  // The daemon is spared when memory runs out; this is not. Not being able to say so is no reason
  // to stop.
  const UniqueFd score(::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC));
  if (score.valid()) (void)!::write(score.get(), "1000", 4);
  return absl::OkStatus();
}

}  // namespace

absl::Status EnterSandbox(const SandboxLimits& limits) {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return SystemError("PR_SET_NO_NEW_PRIVS");
  scmp_filter_ctx filter = ::seccomp_init(SCMP_ACT_KILL_PROCESS);
  if (filter == nullptr) {
    return absl::InternalError(
        "no system call filter is to be had (does the service's own filter allow seccomp?)");
  }
  int failed = 0;
  const auto allow = [&](int call) {
    const int error = ::seccomp_rule_add(filter, SCMP_ACT_ALLOW, call, 0);
    if (error != 0) failed = error;
  };
  for (const int call :
       {SCMP_SYS(write), SCMP_SYS(close), SCMP_SYS(brk), SCMP_SYS(munmap), SCMP_SYS(mremap),
        SCMP_SYS(madvise), SCMP_SYS(exit_group), SCMP_SYS(rt_sigreturn), SCMP_SYS(getrandom),
        SCMP_SYS(futex), SCMP_SYS(clock_gettime),
        // What abort() does, so that it ends as itself; tgkill below, to this process only.
        SCMP_SYS(rt_sigprocmask), SCMP_SYS(getpid), SCMP_SYS(gettid)}) {
    allow(call);
  }
  const scmp_arg_cmp own = Argument(0, SCMP_CMP_EQ, static_cast<scmp_datum_t>(::getpid()));
  const int self = ::seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, SCMP_SYS(tgkill), 1, &own);
  // Memory, but no file, nothing executable, locked or growing: flags are
  // MAP_PRIVATE|MAP_ANONYMOUS and nothing else.
  const std::array<scmp_arg_cmp, 2> wanted = {
      Argument(2, SCMP_CMP_MASKED_EQ, 4 /* PROT_EXEC */, 0),
      Argument(3, SCMP_CMP_EQ, 0x22),
  };
  const int memory = ::seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, SCMP_SYS(mmap), wanted.size(),
                                              wanted.data());
  if (self != 0) failed = self;
  if (memory != 0) failed = memory;
  absl::Status status;
  if (failed == 0) status = LeaveTheDaemonsThings();
  if (failed == 0 && status.ok()) status = SetLimits(limits);
  if (failed == 0 && status.ok()) failed = ::seccomp_load(filter);
  ::seccomp_release(filter);
  if (!status.ok()) return status;
  if (failed == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the system call filter: ", std::strerror(-failed)));
}
#endif

}  // namespace modelhost
