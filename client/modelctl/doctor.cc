#include "client/modelctl/doctor.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/modelctl/doctor_advice.h"
#include "client/modelctl/render.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {
namespace {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers do not have it.
#endif
#ifndef XFS_SUPER_MAGIC
#define XFS_SUPER_MAGIC 0x58465342
#endif

constexpr uint64_t kProbeBytes = 64 << 10;
constexpr uint64_t kMuchMemlock = uint64_t{1} << 30;
constexpr rlim_t kFewFiles = 1024;
constexpr int kCapIpcLock = 14;

std::string ReadText(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::pair<int, int> Kernel() {
  utsname name{};
  return ::uname(&name) == 0 ? ParseKernelRelease(name.release) : std::pair<int, int>{0, 0};
}

// The value of a "Name:   value" line.
std::string LineValue(const std::string& text, absl::string_view name) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, name)) return std::string(absl::StripAsciiWhitespace(line));
  }
  return "";
}

bool HasCapability(const std::string& proc_status, int capability) {
  const std::string hex = LineValue(proc_status, "CapEff:");
  uint64_t bits = 0;
  return absl::SimpleHexAtoi(hex, &bits) && ((bits >> capability) & 1) != 0;
}

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarn:
      return "warn";
    case Verdict::kFail:
      return "fail";
  }
  return "fail";
}

std::pair<int, int> ParseKernelRelease(absl::string_view release) {
  int major = 0, minor = 0;
  const std::vector<absl::string_view> parts = absl::StrSplit(release, absl::MaxSplits('.', 2));
  if (parts.size() < 2 || !absl::SimpleAtoi(parts[0], &major)) return {0, 0};
  const absl::string_view digits = parts[1].substr(0, parts[1].find_first_not_of("0123456789"));
  if (!absl::SimpleAtoi(digits, &minor)) return {0, 0};
  return {major, minor};
}

std::string ChosenWord(absl::string_view text) {
  const size_t open = text.find('[');
  const size_t close = text.find(']', open == absl::string_view::npos ? 0 : open);
  if (open == absl::string_view::npos || close == absl::string_view::npos) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

Check CheckKernel() {
  utsname name{};
  ::uname(&name);
  const std::string finding = absl::StrCat(name.sysname, " ", name.release, " ", name.machine);
  if (Kernel() < std::pair<int, int>{4, 14}) {
    return Found(Trouble::kKernelTooOld, finding);
  }
  if (Kernel() < std::pair<int, int>{5, 14}) {
    return Found(Trouble::kKernelOld, finding);
  }
  return Fine("kernel", finding);
}

Check CheckPopulate() {
  Result<WritableRegion> region = WritableRegion::Create("doctor", kProbeBytes, HugePages::kOff);
  if (!region.ok()) return Found(Trouble::kNoMemoryToTry, region.error().text);
  if (::syscall(SYS_madvise, region->bytes().data(), kProbeBytes, MADV_POPULATE_READ) == 0) {
    return Fine("prefault", "MADV_POPULATE_READ works");
  }
  return Found(Trouble::kNoPrefault, absl::StrCat("MADV_POPULATE_READ: ", std::strerror(errno)));
}

Check CheckSealing() {
  Result<WritableRegion> region = WritableRegion::Create("doctor", kProbeBytes, HugePages::kOff);
  if (!region.ok()) return Found(Trouble::kNoSealing, region.error().text);
  Result<SealedRegion> sealed = (*std::move(region)).Seal();
  if (!sealed.ok()) return Found(Trouble::kNoSealing, sealed.error().text);
  const Result<ReadOnlyMapping> mapping = ReadOnlyMapping::MapSealed(sealed->fd, sealed->bytes);
  if (!mapping.ok()) return Found(Trouble::kNoSealing, mapping.error().text);
  // A descriptor reopened for writing is what seals, and nothing else, must stop.
  const UniqueFd again(
      ::open(absl::StrCat("/proc/self/fd/", sealed->fd.get()).c_str(), O_RDWR | O_CLOEXEC));
  if (again.valid() && ::pwrite(again.get(), "x", 1, 0) == 1) {
    return Found(Trouble::kNoSealing, "a sealed memfd could be written");
  }
  return Fine("sealing", "a sealed memfd refuses writers");
}

Check CheckMemlock(const DaemonStatus& daemon) {
  std::string whose = "this user";
  std::string limits, status;
  if (daemon.has_value() && daemon->pid() > 0) {
    limits = ReadText(absl::StrCat("/proc/", daemon->pid(), "/limits"));
    status = ReadText(absl::StrCat("/proc/", daemon->pid(), "/status"));
    if (!limits.empty()) whose = "the daemon";
  }
  bool unlimited = false;
  uint64_t bytes = 0;
  if (!limits.empty()) {
    const std::string line = LineValue(limits, "Max locked memory");
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    // The daemon raises the soft limit to the hard one.
    const std::string hard = words.size() > 1 ? words[1] : "";
    unlimited = hard == "unlimited";
    if (!unlimited && !absl::SimpleAtoi(hard, &bytes)) limits.clear();
  }
  if (limits.empty()) {
    status = ReadText("/proc/self/status");
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    unlimited = limit.rlim_max == RLIM_INFINITY;
    bytes = limit.rlim_max;
    whose = "this user";
  }
  if (HasCapability(status, kCapIpcLock)) {
    return Fine("memlock", absl::StrCat(whose, " may lock any amount (CAP_IPC_LOCK)"));
  }
  if (unlimited) return Fine("memlock", absl::StrCat(whose, " has no limit"));
  const std::string finding = absl::StrCat(whose, " may lock ", FormatBytes(bytes));
  if (bytes >= kMuchMemlock) return Fine("memlock", finding);
  return Found(Trouble::kLittleMemlock, finding);
}

Check CheckFileLimit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string finding =
      absl::StrCat("soft ", limit.rlim_cur, ", hard ",
                   limit.rlim_max == RLIM_INFINITY ? "unlimited" : absl::StrCat(limit.rlim_max));
  if (limit.rlim_cur >= kFewFiles) return Fine("descriptors", finding);
  return Found(Trouble::kFewDescriptors, finding);
}

Check CheckShmemHugePages() {
  const std::string path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  const std::string chosen = ChosenWord(ReadText(path));
  if (chosen.empty()) return Found(Trouble::kNoHugePages, absl::StrCat(path, ": not there"));
  const std::string finding = absl::StrCat("shmem_enabled is ", chosen);
  if (chosen == "never" || chosen == "deny") {
    return Found(Trouble::kHugePagesOff, finding);
  }
  return Fine("huge pages", finding);
}

Check CheckFolios(const std::string& path) {
  struct statfs info {};
  if (::statfs(path.c_str(), &info) != 0) {
    return Found(Trouble::kStoreNotSeen, absl::StrCat(path, ": ", std::strerror(errno)));
  }
  struct Known {
    unsigned long magic;
    const char* name;
    std::pair<int, int> since;  // The first kernel whose page cache uses large folios for it.
  };
  const Known known[] = {{XFS_SUPER_MAGIC, "xfs", {5, 18}},
                         {EXT4_SUPER_MAGIC, "ext4", {6, 16}},
                         {BTRFS_SUPER_MAGIC, "btrfs", {6, 17}},
                         {TMPFS_MAGIC, "tmpfs", {6, 14}}};
  for (const Known& each : known) {
    if (static_cast<unsigned long>(info.f_type) != each.magic) continue;
    const std::string finding = absl::StrCat(each.name, " at ", path);
    if (Kernel() >= each.since) return Fine("large folios", finding);
    return Found(Trouble::kSmallFolios,
                 absl::StrCat(finding, ", large from Linux ", each.since.first, ".",
                              each.since.second, " on"));
  }
  return Found(Trouble::kSmallFolios,
               absl::StrFormat("file system type 0x%x at %s: not known", info.f_type, path));
}

std::vector<Check> CheckGpus(const DaemonStatus& daemon) {
  const std::string driver = ReadText("/proc/driver/nvidia/version");
  std::string finding = "no NVIDIA driver";
  if (!driver.empty()) {
    finding = std::string(absl::StripAsciiWhitespace(driver.substr(0, driver.find('\n'))));
  } else if (::access("/dev/nvidiactl", F_OK) == 0 || ::access("/dev/nvmap", F_OK) == 0) {
    finding = "NVIDIA device files are there";
  }
  std::vector<Check> checks;
  if (!daemon.has_value() || daemon->devices().empty()) {
    if (daemon.has_value() && !daemon->device_mode().empty()) {
      absl::StrAppend(&finding, "; mode ", daemon->device_mode());
      if (!daemon->device_reason().empty()) {
        absl::StrAppend(&finding, ": ", daemon->device_reason());
      }
    }
    checks.push_back(Fine("gpu", finding));
    return checks;
  }
  for (const v1::DeviceStatus& gpu : daemon->devices()) {
    const std::string what =
        absl::StrCat(gpu.uuid(), ", ", gpu.name(), ", driver ", gpu.driver(), ": ");
    const std::string how = absl::StrCat(what, gpu.mode(), ": ", gpu.reason());
    if (!gpu.usable()) {
      checks.push_back(
          Found(Trouble::kGpuDead, absl::StrCat(what, "does not answer: ", gpu.problem())));
    } else if (gpu.mode() == "host_only") {
      checks.push_back(Found(Trouble::kGpuHostOnly, how));
    } else if (!gpu.limits().empty()) {
      checks.push_back(Found(Trouble::kGpuUnprotected, how));
      checks.back().advice = gpu.limits();
    } else {
      checks.push_back(Fine("gpu", how));
    }
  }
  return checks;
}

}  // namespace modelhost::modelctl
