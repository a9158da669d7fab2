// The real Os, except for the calls that a test wants to fail. Thread-safe.
//
//   fault_os.FailCall("Sync", 2, ENOSPC);    the second Sync from now, once
//   fault_os.FailFrom("ReadAt", 3, EIO);     the third from now and all after it
//   fault_os.Before("Rename", [&] { ... });  runs before each such call, in its thread
//   fault_os.calls("ReadAt")                 how many there were
//
// A failed call does nothing. A call's name is that of the method of Os.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/os.h"

namespace modelhost {

class FaultOs final : public Os {
 public:
  explicit FaultOs(Os& real) : real_(real) {}

  // `nth` counts from 1 and from now.
  void FailCall(const std::string& call, int nth, int sys_errno);
  void FailFrom(const std::string& call, int nth, int sys_errno);
  void Before(const std::string& call, std::function<void()> hook);
  // Forgets all faults and hooks.
  void Heal();
  int calls(const std::string& call) const;
  // What Limits() says instead of the truth.
  void set_limits(const MemoryLimits& limits);

  absl::StatusOr<UniqueFd> OpenDir(const std::string& path) override;
  absl::StatusOr<UniqueFd> OpenDirAt(const UniqueFd& dir, const std::string& name) override;
  absl::StatusOr<UniqueFd> OpenFileAt(const UniqueFd& dir, const std::string& name) override;
  absl::StatusOr<UniqueFd> CreateFileAt(const UniqueFd& dir, const std::string& name,
                                        uint32_t mode) override;
  absl::Status MakeDirAt(const UniqueFd& dir, const std::string& name, uint32_t mode) override;
  absl::Status MakeDirs(const std::string& path, uint32_t mode) override;
  absl::StatusOr<std::vector<DirEntry>> ListDir(const UniqueFd& dir) override;
  absl::StatusOr<FileInfo> Stat(const UniqueFd& fd) override;
  absl::StatusOr<FileInfo> StatAt(const UniqueFd& dir, const std::string& name) override;
  absl::StatusOr<uint64_t> ReadAt(const UniqueFd& fd, uint64_t offset,
                                  std::span<std::byte> into) override;
  absl::Status WriteAt(const UniqueFd& fd, uint64_t offset,
                       std::span<const std::byte> bytes) override;
  absl::Status Allocate(const UniqueFd& fd, uint64_t bytes) override;
  absl::Status Clone(const UniqueFd& from, const UniqueFd& to) override;
  absl::Status Sync(const UniqueFd& fd) override;
  absl::Status SetMode(const UniqueFd& fd, uint32_t mode) override;
  absl::Status RenameNoReplace(const UniqueFd& from_dir, const std::string& from,
                               const UniqueFd& to_dir, const std::string& to) override;
  absl::Status Rename(const UniqueFd& from_dir, const std::string& from, const UniqueFd& to_dir,
                      const std::string& to) override;
  absl::Status Link(const UniqueFd& from_dir, const std::string& from, const UniqueFd& to_dir,
                    const std::string& to) override;
  absl::Status RemoveFileAt(const UniqueFd& dir, const std::string& name) override;
  absl::Status RemoveTreeAt(const UniqueFd& dir, const std::string& name) override;
  absl::StatusOr<uint64_t> FreeBytes(const UniqueFd& dir) override;
  absl::StatusOr<bool> OnReadOnlyMount(const UniqueFd& fd) override;
  absl::Status TryLock(const UniqueFd& fd) override;
  void PreferLargePages(std::span<const std::byte> bytes) override;
  absl::Status Populate(std::span<const std::byte> bytes) override;
  absl::Status Lock(std::span<const std::byte> bytes) override;
  void Unlock(std::span<const std::byte> bytes) override;
  absl::StatusOr<uint64_t> ResidentBytes(std::span<const std::byte> bytes) override;
  MemoryLimits Limits() override;
  absl::Status SetIoPriority(absl::string_view io_class) override;
  absl::Status MakeThreadBackground() override;
  absl::Duration ThreadCpuTime() override;

 private:
  struct Fault {
    int at;  // Number of the call, from 1 and from the beginning.
    bool all_after;
    int sys_errno;
  };
  // Counts a call, runs its hooks, and says whether it is to fail.
  absl::Status Enter(const std::string& call);

  Os& real_;
  mutable absl::Mutex mutex_;
  std::map<std::string, int> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<Fault>> faults_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::function<void()>> hooks_ ABSL_GUARDED_BY(mutex_);
  bool own_limits_ ABSL_GUARDED_BY(mutex_) = false;
  MemoryLimits limits_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
