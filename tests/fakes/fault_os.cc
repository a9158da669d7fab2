#include "tests/fakes/fault_os.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {

void FaultOs::FailCall(const std::string& call, int nth, int sys_errno) {
  absl::MutexLock lock(&mutex_);
  faults_[call].push_back({calls_[call] + nth, false, sys_errno});
}

void FaultOs::FailFrom(const std::string& call, int nth, int sys_errno) {
  absl::MutexLock lock(&mutex_);
  faults_[call].push_back({calls_[call] + nth, true, sys_errno});
}

void FaultOs::Before(const std::string& call, std::function<void()> hook) {
  absl::MutexLock lock(&mutex_);
  hooks_[call] = std::move(hook);
}

void FaultOs::Heal() {
  absl::MutexLock lock(&mutex_);
  faults_.clear();
  hooks_.clear();
}

int FaultOs::calls(const std::string& call) const {
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

void FaultOs::set_limits(const MemoryLimits& limits) {
  absl::MutexLock lock(&mutex_);
  own_limits_ = true;
  limits_ = limits;
}

absl::Status FaultOs::Enter(const std::string& call) {
  absl::Status status;
  std::function<void()> hook;
  {
    absl::MutexLock lock(&mutex_);
    const int number = ++calls_[call];
    const auto faults = faults_.find(call);
    if (faults != faults_.end()) {
      for (const Fault& fault : faults->second) {
        if (number == fault.at || (fault.all_after && number > fault.at)) {
          status = ErrnoStatus(fault.sys_errno, absl::StrCat("injected fault in ", call));
          break;
        }
      }
    }
    const auto found = hooks_.find(call);
    if (found != hooks_.end()) hook = found->second;
  }
  if (hook) hook();
  return status;
}

absl::StatusOr<UniqueFd> FaultOs::OpenDir(const std::string& path) {
  if (auto fault = Enter("OpenDir"); !fault.ok()) return fault;
  return real_.OpenDir(path);
}

absl::StatusOr<UniqueFd> FaultOs::OpenDirAt(const UniqueFd& dir, const std::string& name) {
  if (auto fault = Enter("OpenDirAt"); !fault.ok()) return fault;
  return real_.OpenDirAt(dir, name);
}

absl::StatusOr<UniqueFd> FaultOs::OpenFileAt(const UniqueFd& dir, const std::string& name) {
  if (auto fault = Enter("OpenFileAt"); !fault.ok()) return fault;
  return real_.OpenFileAt(dir, name);
}

absl::StatusOr<UniqueFd> FaultOs::CreateFileAt(const UniqueFd& dir, const std::string& name,
                                               uint32_t mode) {
  if (auto fault = Enter("CreateFileAt"); !fault.ok()) return fault;
  return real_.CreateFileAt(dir, name, mode);
}

absl::Status FaultOs::MakeDirAt(const UniqueFd& dir, const std::string& name, uint32_t mode) {
  if (auto fault = Enter("MakeDirAt"); !fault.ok()) return fault;
  return real_.MakeDirAt(dir, name, mode);
}

absl::Status FaultOs::MakeDirs(const std::string& path, uint32_t mode) {
  if (auto fault = Enter("MakeDirs"); !fault.ok()) return fault;
  return real_.MakeDirs(path, mode);
}

absl::StatusOr<std::vector<DirEntry>> FaultOs::ListDir(const UniqueFd& dir) {
  if (auto fault = Enter("ListDir"); !fault.ok()) return fault;
  return real_.ListDir(dir);
}

absl::StatusOr<FileInfo> FaultOs::Stat(const UniqueFd& fd) {
  if (auto fault = Enter("Stat"); !fault.ok()) return fault;
  return real_.Stat(fd);
}

absl::StatusOr<FileInfo> FaultOs::StatAt(const UniqueFd& dir, const std::string& name) {
  if (auto fault = Enter("StatAt"); !fault.ok()) return fault;
  return real_.StatAt(dir, name);
}

absl::StatusOr<uint64_t> FaultOs::ReadAt(const UniqueFd& fd, uint64_t offset,
                                         std::span<std::byte> into) {
  if (auto fault = Enter("ReadAt"); !fault.ok()) return fault;
  return real_.ReadAt(fd, offset, into);
}

absl::Status FaultOs::WriteAt(const UniqueFd& fd, uint64_t offset,
                              std::span<const std::byte> bytes) {
  if (auto fault = Enter("WriteAt"); !fault.ok()) return fault;
  return real_.WriteAt(fd, offset, bytes);
}

absl::Status FaultOs::Allocate(const UniqueFd& fd, uint64_t bytes) {
  if (auto fault = Enter("Allocate"); !fault.ok()) return fault;
  return real_.Allocate(fd, bytes);
}

absl::Status FaultOs::Clone(const UniqueFd& from, const UniqueFd& to) {
  if (auto fault = Enter("Clone"); !fault.ok()) return fault;
  return real_.Clone(from, to);
}

absl::Status FaultOs::Sync(const UniqueFd& fd) {
  if (auto fault = Enter("Sync"); !fault.ok()) return fault;
  return real_.Sync(fd);
}

absl::Status FaultOs::SetMode(const UniqueFd& fd, uint32_t mode) {
  if (auto fault = Enter("SetMode"); !fault.ok()) return fault;
  return real_.SetMode(fd, mode);
}

absl::Status FaultOs::RenameNoReplace(const UniqueFd& from_dir, const std::string& from,
                                      const UniqueFd& to_dir, const std::string& to) {
  if (auto fault = Enter("RenameNoReplace"); !fault.ok()) return fault;
  return real_.RenameNoReplace(from_dir, from, to_dir, to);
}

absl::Status FaultOs::Rename(const UniqueFd& from_dir, const std::string& from,
                             const UniqueFd& to_dir, const std::string& to) {
  if (auto fault = Enter("Rename"); !fault.ok()) return fault;
  return real_.Rename(from_dir, from, to_dir, to);
}

absl::Status FaultOs::Link(const UniqueFd& from_dir, const std::string& from,
                           const UniqueFd& to_dir, const std::string& to) {
  if (auto fault = Enter("Link"); !fault.ok()) return fault;
  return real_.Link(from_dir, from, to_dir, to);
}

absl::Status FaultOs::RemoveFileAt(const UniqueFd& dir, const std::string& name) {
  if (auto fault = Enter("RemoveFileAt"); !fault.ok()) return fault;
  return real_.RemoveFileAt(dir, name);
}

absl::Status FaultOs::RemoveTreeAt(const UniqueFd& dir, const std::string& name) {
  if (auto fault = Enter("RemoveTreeAt"); !fault.ok()) return fault;
  return real_.RemoveTreeAt(dir, name);
}

absl::StatusOr<uint64_t> FaultOs::FreeBytes(const UniqueFd& dir) {
  if (auto fault = Enter("FreeBytes"); !fault.ok()) return fault;
  return real_.FreeBytes(dir);
}

absl::StatusOr<bool> FaultOs::OnReadOnlyMount(const UniqueFd& fd) {
  if (auto fault = Enter("OnReadOnlyMount"); !fault.ok()) return fault;
  return real_.OnReadOnlyMount(fd);
}

absl::Status FaultOs::TryLock(const UniqueFd& fd) {
  if (auto fault = Enter("TryLock"); !fault.ok()) return fault;
  return real_.TryLock(fd);
}

void FaultOs::PreferLargePages(std::span<const std::byte> bytes) {
  (void)Enter("PreferLargePages");  // Cannot fail; counted.
  real_.PreferLargePages(bytes);
}

absl::Status FaultOs::Populate(std::span<const std::byte> bytes) {
  if (auto fault = Enter("Populate"); !fault.ok()) return fault;
  return real_.Populate(bytes);
}

absl::Status FaultOs::Lock(std::span<const std::byte> bytes) {
  if (auto fault = Enter("Lock"); !fault.ok()) return fault;
  return real_.Lock(bytes);
}

void FaultOs::Unlock(std::span<const std::byte> bytes) {
  (void)Enter("Unlock");  // Cannot fail; counted.
  real_.Unlock(bytes);
}

absl::StatusOr<uint64_t> FaultOs::ResidentBytes(std::span<const std::byte> bytes) {
  if (auto fault = Enter("ResidentBytes"); !fault.ok()) return fault;
  return real_.ResidentBytes(bytes);
}

MemoryLimits FaultOs::Limits() {
  {
    absl::MutexLock lock(&mutex_);
    if (own_limits_) return limits_;
  }
  return real_.Limits();
}

absl::Status FaultOs::SetIoPriority(absl::string_view io_class) {
  if (auto fault = Enter("SetIoPriority"); !fault.ok()) return fault;
  return real_.SetIoPriority(io_class);
}

absl::Status FaultOs::MakeThreadBackground() {
  if (auto fault = Enter("MakeThreadBackground"); !fault.ok()) return fault;
  return real_.MakeThreadBackground();
}

absl::Duration FaultOs::ThreadCpuTime() {
  (void)Enter("ThreadCpuTime");  // Cannot fail; counted.
  return real_.ThreadCpuTime();
}

}  // namespace modelhost
