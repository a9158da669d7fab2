#include "daemon/indexer/sandbox.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <cstring>

#include "absl/strings/str_cat.h"

#ifndef MODELHOST_SANITIZED
#include <seccomp.h>
#endif

namespace modelhost {
namespace {

absl::Status Limit(int resource, uint64_t most) {
  const rlimit limit{.rlim_cur = most, .rlim_max = most};
  if (::setrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("setrlimit: ", std::strerror(errno)));
}

}  // namespace

#ifdef MODELHOST_SANITIZED
absl::Status EnterSandbox(const SandboxLimits& limits) {
  // Address space is the sanitizers' own business.
  if (auto status = Limit(RLIMIT_CPU, limits.cpu_seconds); !status.ok()) return status;
  return absl::UnimplementedError("no system call filter in a build under a sanitizer");
}
#else
absl::Status EnterSandbox(const SandboxLimits& limits) {
  if (auto status = Limit(RLIMIT_DATA, limits.memory_bytes); !status.ok()) return status;
  if (auto status = Limit(RLIMIT_CPU, limits.cpu_seconds); !status.ok()) return status;
  if (auto status = Limit(RLIMIT_FSIZE, limits.memory_bytes); !status.ok()) return status;
  if (auto status = Limit(RLIMIT_CORE, 0); !status.ok()) return status;
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
    return absl::InternalError(absl::StrCat("PR_SET_NO_NEW_PRIVS: ", std::strerror(errno)));
  }
  scmp_filter_ctx filter = ::seccomp_init(SCMP_ACT_KILL_PROCESS);
  if (filter == nullptr) return absl::ResourceExhaustedError("seccomp_init");
  int failed = 0;
  const auto allow = [&](int call) {
    const int error = ::seccomp_rule_add(filter, SCMP_ACT_ALLOW, call, 0);
    if (error != 0) failed = error;
  };
  for (const int call :
       {SCMP_SYS(write), SCMP_SYS(close), SCMP_SYS(brk), SCMP_SYS(munmap), SCMP_SYS(mremap),
        SCMP_SYS(madvise), SCMP_SYS(exit_group), SCMP_SYS(rt_sigreturn), SCMP_SYS(getrandom),
        SCMP_SYS(futex), SCMP_SYS(clock_gettime)}) {
    allow(call);
  }
  // Memory, but no file and nothing executable: flags are MAP_PRIVATE|MAP_ANONYMOUS.
  const int error = ::seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(mmap), 2,
                                       SCMP_A2(SCMP_CMP_MASKED_EQ, 4 /* PROT_EXEC */, 0),
                                       SCMP_A3(SCMP_CMP_MASKED_EQ, 0x22, 0x22));
  if (error != 0) failed = error;
  if (failed == 0) failed = ::seccomp_load(filter);
  ::seccomp_release(filter);
  if (failed == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the system call filter: ", std::strerror(-failed)));
}
#endif

}  // namespace modelhost
