// Os, as Linux does it. Stateless; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/platform/os.h"

namespace modelhost {

class LinuxOs final : public Os {
 public:
  // linux_os_files.cc
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

  // linux_os.cc
  void PreferLargePages(std::span<const std::byte> bytes) override;
  absl::Status Populate(std::span<const std::byte> bytes) override;
  absl::Status Lock(std::span<const std::byte> bytes) override;
  void Unlock(std::span<const std::byte> bytes) override;
  absl::StatusOr<uint64_t> ResidentBytes(std::span<const std::byte> bytes) override;
  MemoryLimits Limits() override;
  absl::Status SetIoPriority(absl::string_view io_class) override;
  absl::Status MakeThreadBackground() override;
  absl::Duration ThreadCpuTime() override;
};

// Puts a private page of zeros where `address` lies, in place of what is mapped there. For the
// SIGBUS handler alone: makes no call that a signal handler must not make.
bool MapZeroPage(void* address, uintptr_t page_bytes);

}  // namespace modelhost
