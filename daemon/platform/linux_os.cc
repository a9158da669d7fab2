#include "daemon/platform/linux_os.h"

#include <linux/ioprio.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"

namespace modelhost {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
constexpr int kCapIpcLock = 14;  // linux/capability.h
constexpr int kBackgroundNice = 10;
constexpr int kHighestNice = 19;
constexpr uint64_t kBackgroundSliceNs = 100'000;  // The least that the kernel takes.

// What sched_setattr takes (sched_setattr(2), SCHED_ATTR_SIZE_VER0): linux/sched/types.h cannot be
// included beside sched.h.
struct SchedAttributes {
  uint32_t size = sizeof(SchedAttributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0;  // Nanoseconds, as the next two.
  uint64_t deadline = 0;
  uint64_t period = 0;
};
static_assert(sizeof(SchedAttributes) == 48);

uint64_t PageBytes() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

// The whole pages that hold `bytes`.
std::pair<void*, size_t> Pages(std::span<const std::byte> bytes) {
  const uintptr_t mask = PageBytes() - 1;
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = begin & ~mask;
  const uintptr_t end = (begin + bytes.size() + mask) & ~mask;
  return {reinterpret_cast<void*>(first), end - first};
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return file ? text.str() : std::string();
}

absl::Status PopulateError(int sys_errno, size_t bytes) {
  const std::string what = absl::StrCat("read ", bytes, " mapped bytes");
  if (sys_errno == EFAULT || sys_errno == EHWPOISON) {
    return ErrnoStatus(EIO, what + " (the file failed, or was truncated, under its mapping)");
  }
  return ErrnoStatus(sys_errno, what);
}

// Kernels before 5.14 cannot populate: touch each page.
absl::Status TouchPages(void* first, size_t bytes) {
  (void)::madvise(first, bytes, MADV_WILLNEED);
  const auto* at = static_cast<const volatile std::byte*>(first);
  SigbusGuard guard(std::span(static_cast<const std::byte*>(first), bytes));
  for (size_t i = 0; i < bytes; i += PageBytes()) (void)at[i];
  return guard.hit() ? PopulateError(EFAULT, bytes) : absl::OkStatus();
}

// The least memory.max from this process's control group up to the root.
uint64_t CgroupBytes() {
  uint64_t least = kUnlimited;
  const auto look = [&](const std::string& base, absl::string_view group, const char* file) {
    std::string path(absl::StripSuffix(group, "/"));
    while (true) {
      uint64_t value = 0;
      const std::string text = ReadText(absl::StrCat(base, path, "/", file));
      if (absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &value)) {
        least = std::min(least, value);
      }
      if (path.empty()) return;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  };
  for (absl::string_view line : absl::StrSplit(ReadText("/proc/self/cgroup"), '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[0] == "0") {
      look("/sys/fs/cgroup", fields[2], "memory.max");
    } else if (fields[1] == "memory") {
      look("/sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes");
    }
  }
  return least >= kUnlimited / 4 ? kUnlimited : least;  // v1 writes "no limit" as a huge number.
}

bool MayLockAnything() {
  for (absl::string_view line : absl::StrSplit(ReadText("/proc/self/status"), '\n')) {
    if (!absl::ConsumePrefix(&line, "CapEff:")) continue;
    uint64_t capabilities = 0;
    return absl::SimpleHexAtoi(absl::StripAsciiWhitespace(line), &capabilities) &&
           (capabilities >> kCapIpcLock & 1) != 0;
  }
  return false;
}

uint64_t MemlockBytes() {
  if (MayLockAnything()) return kUnlimited;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 0;
  if (limit.rlim_cur != limit.rlim_max) {
    rlimit raised{limit.rlim_max, limit.rlim_max};
    if (::setrlimit(RLIMIT_MEMLOCK, &raised) == 0) limit = raised;
  }
  return limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur;
}

}  // namespace

bool MapZeroPage(void* address, uintptr_t page_bytes) {
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~(page_bytes - 1));
  return ::mmap(page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
         MAP_FAILED;
}

void LinuxOs::PreferLargePages(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const auto [first, length] = Pages(bytes);
  // For a file it makes faults read 2 MiB at a time into one folio, whatever the device's own
  // readahead: 1.4 times as fast as fadvise here, and locking is 20 times cheaper after it.
  (void)::madvise(first, length, MADV_HUGEPAGE);
}

absl::Status LinuxOs::Populate(std::span<const std::byte> bytes) {
  if (bytes.empty()) return absl::OkStatus();
  const auto [first, length] = Pages(bytes);
#ifdef MADV_POPULATE_READ
  int result = 0;
  do {
    result = ::madvise(first, length, MADV_POPULATE_READ);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return absl::OkStatus();
  if (errno != EINVAL) return PopulateError(errno, length);
#endif
  return TouchPages(first, length);
}

absl::Status LinuxOs::Lock(std::span<const std::byte> bytes) {
  if (bytes.empty()) return absl::OkStatus();
  const auto [first, length] = Pages(bytes);
  if (::mlock(first, length) == 0) return absl::OkStatus();
  // EAGAIN is mlock's way to say that pages could not be had.
  const int error = errno == EAGAIN ? ENOMEM : errno;
  return ErrnoStatus(error, absl::StrCat("lock ", length, " bytes of memory"));
}

void LinuxOs::Unlock(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const auto [first, length] = Pages(bytes);
  (void)::munlock(first, length);
}

absl::StatusOr<uint64_t> LinuxOs::ResidentBytes(std::span<const std::byte> bytes) {
  const uint64_t page = PageBytes();
  const uint64_t piece_bytes = page * 16384;
  std::vector<unsigned char> in_memory(16384);
  uint64_t resident = 0;
  for (uint64_t at = 0; at < bytes.size(); at += piece_bytes) {
    const uint64_t length = std::min<uint64_t>(piece_bytes, bytes.size() - at);
    // mincore takes a page-aligned start, which the start of every mapping is.
    if (::mincore(const_cast<std::byte*>(bytes.data() + at), length, in_memory.data()) != 0) {
      return ErrnoStatus(errno, absl::StrCat("ask which of ", length, " bytes are in memory"));
    }
    for (uint64_t i = 0; i * page < length; ++i) {
      if ((in_memory[i] & 1) != 0) resident += std::min(page, length - i * page);
    }
  }
  return resident;
}

MemoryLimits LinuxOs::Limits() {
  MemoryLimits limits;
  limits.ram_bytes = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * PageBytes();
  limits.cgroup_bytes = CgroupBytes();
  limits.memlock_bytes = MemlockBytes();
  return limits;
}

absl::Status LinuxOs::SetIoPriority(absl::string_view io_class) {
  absl::string_view rest = io_class;
  int value = 0;
  int level = 0;
  if (io_class == "none") {
    value = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_NONE, 0);
  } else if (io_class == "idle") {
    value = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 7);
  } else if (absl::ConsumePrefix(&rest, "best-effort:") && absl::SimpleAtoi(rest, &level) &&
             level >= 0 && level <= 7) {
    value = IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, level);
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "I/O priority \"", io_class, "\": not one of best-effort:0 to best-effort:7, idle, none"));
  }
  // Who 0 is the calling thread. There is no libc wrapper.
  if (::syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, value) != 0) {
    return ErrnoStatus(errno, absl::StrCat("set I/O priority ", io_class));
  }
  return absl::OkStatus();
}

absl::Status LinuxOs::MakeThreadBackground() {
  // For the kernel a thread has a nice value of its own; who 0 is the calling one. The process's is
  // that of its first thread.
  errno = 0;
  const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::getpid()));
  if (own == -1 && errno != 0) return ErrnoStatus(errno, "ask for the nice value");
  SchedAttributes wanted;
  wanted.policy = SCHED_BATCH;  // On waking up it waits for its turn.
  wanted.nice = std::min(own + kBackgroundNice, kHighestNice);
  // Who wakes up need not wait for the end of a long turn of this thread. Before Linux 6.12 nobody
  // looks at it. Unlike the nice value it counts for threads of other control groups and sessions.
  wanted.runtime = kBackgroundSliceNs;
  // There is no libc wrapper. Who 0 is the calling thread.
  if (::syscall(SYS_sched_setattr, 0, &wanted, 0) != 0) {
    return ErrnoStatus(errno,
                       absl::StrCat("make a thread a batch thread of nice value ", wanted.nice));
  }
  return absl::OkStatus();
}

absl::Duration LinuxOs::ThreadCpuTime() {
  timespec used{};
  if (::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) != 0) return absl::ZeroDuration();
  return absl::DurationFromTimespec(used);
}

}  // namespace modelhost
