// For tests: an Os whose file system can clone, as XFS and Btrfs do. The clone is a copy.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/os.h"

namespace modelhost {

class CopyingCloneOs final : public Os {
 public:
  explicit CopyingCloneOs(Os& real) : real_(real) {}
  int clones() const { return clones_; }

  absl::Status Clone(const UniqueFd& from, const UniqueFd& to) override {
    ++clones_;
    auto info = real_.Stat(from);
    if (!info.ok()) return info.status();
    std::vector<std::byte> bytes(info->bytes);
    auto got = real_.ReadAt(from, 0, bytes);
    return got.ok() ? real_.WriteAt(to, 0, bytes) : got.status();
  }

  virtual absl::StatusOr<UniqueFd> OpenDir(const std::string& path) override {
    return real_.OpenDir(path);
  }
  absl::StatusOr<UniqueFd> OpenDirAt(const UniqueFd& dir, const std::string& name) override {
    return real_.OpenDirAt(dir, name);
  }
  absl::StatusOr<UniqueFd> OpenFileAt(const UniqueFd& dir, const std::string& name) override {
    return real_.OpenFileAt(dir, name);
  }
  absl::StatusOr<UniqueFd> CreateFileAt(const UniqueFd& dir, const std::string& name,
                                        uint32_t mode) override {
    return real_.CreateFileAt(dir, name, mode);
  }
  absl::Status MakeDirAt(const UniqueFd& dir, const std::string& name, uint32_t mode) override {
    return real_.MakeDirAt(dir, name, mode);
  }
  absl::Status MakeDirs(const std::string& path, uint32_t mode) override {
    return real_.MakeDirs(path, mode);
  }
  absl::StatusOr<std::vector<DirEntry>> ListDir(const UniqueFd& dir) override {
    return real_.ListDir(dir);
  }
  absl::StatusOr<FileInfo> Stat(const UniqueFd& fd) override { return real_.Stat(fd); }
  absl::StatusOr<FileInfo> StatAt(const UniqueFd& dir, const std::string& name) override {
    return real_.StatAt(dir, name);
  }
  absl::StatusOr<uint64_t> ReadAt(const UniqueFd& fd, uint64_t offset,
                                  std::span<std::byte> into) override {
    return real_.ReadAt(fd, offset, into);
  }
  absl::Status WriteAt(const UniqueFd& fd, uint64_t offset,
                       std::span<const std::byte> bytes) override {
    return real_.WriteAt(fd, offset, bytes);
  }
  absl::Status Allocate(const UniqueFd& fd, uint64_t bytes) override {
    return real_.Allocate(fd, bytes);
  }
  absl::Status Sync(const UniqueFd& fd) override { return real_.Sync(fd); }
  absl::Status SetMode(const UniqueFd& fd, uint32_t mode) override {
    return real_.SetMode(fd, mode);
  }
  absl::Status RenameNoReplace(const UniqueFd& from_dir, const std::string& from,
                               const UniqueFd& to_dir, const std::string& to) override {
    return real_.RenameNoReplace(from_dir, from, to_dir, to);
  }
  absl::Status Rename(const UniqueFd& from_dir, const std::string& from, const UniqueFd& to_dir,
                      const std::string& to) override {
    return real_.Rename(from_dir, from, to_dir, to);
  }
  absl::Status Link(const UniqueFd& from_dir, const std::string& from, const UniqueFd& to_dir,
                    const std::string& to) override {
    return real_.Link(from_dir, from, to_dir, to);
  }
  absl::Status RemoveFileAt(const UniqueFd& dir, const std::string& name) override {
    return real_.RemoveFileAt(dir, name);
  }
  absl::Status RemoveTreeAt(const UniqueFd& dir, const std::string& name) override {
    return real_.RemoveTreeAt(dir, name);
  }
  absl::StatusOr<uint64_t> FreeBytes(const UniqueFd& dir) override { return real_.FreeBytes(dir); }
  absl::StatusOr<bool> OnReadOnlyMount(const UniqueFd& fd) override {
    return real_.OnReadOnlyMount(fd);
  }
  absl::Status TryLock(const UniqueFd& fd) override { return real_.TryLock(fd); }
  void PreferLargePages(std::span<const std::byte> bytes) override {
    real_.PreferLargePages(bytes);
  }
  absl::Status Populate(std::span<const std::byte> bytes) override { return real_.Populate(bytes); }
  absl::Status Lock(std::span<const std::byte> bytes) override { return real_.Lock(bytes); }
  void Unlock(std::span<const std::byte> bytes) override { real_.Unlock(bytes); }
  absl::StatusOr<uint64_t> ResidentBytes(std::span<const std::byte> bytes) override {
    return real_.ResidentBytes(bytes);
  }
  MemoryLimits Limits() override { return real_.Limits(); }
  absl::Status SetIoPriority(absl::string_view io_class) override {
    return real_.SetIoPriority(io_class);
  }
  absl::Status MakeThreadBackground() override { return real_.MakeThreadBackground(); }
  absl::Duration ThreadCpuTime() override { return real_.ThreadCpuTime(); }

 private:
  Os& real_;
  int clones_ = 0;
};

}  // namespace modelhost
