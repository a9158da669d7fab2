// What the daemon asks of the kernel for files and memory: the only door to both.
//
// LinuxOs is the real one; tests/fakes/fault_os.h wraps it and fails the calls that a test names.
// Paths are relative to an open directory wherever a name comes from outside; no call follows a
// symlink at the last part. All sizes are bytes. Errors carry the errno (ErrnoOf) and name the path
// or the size: RESOURCE_EXHAUSTED (ENOSPC, ENOMEM, EMFILE), PERMISSION_DENIED (EACCES, EPERM,
// EROFS), NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION (a symlink, the wrong kind), DATA_LOSS
// (EIO). Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

enum class FileKind { kRegular, kDirectory, kSymlink, kOther };

struct FileInfo {
  FileKind kind = FileKind::kOther;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  uint32_t mode = 0;  // Permission bits.
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint32_t links = 0;
};

struct DirEntry {
  std::string name;
  FileKind kind = FileKind::kOther;
};

struct MemoryLimits {
  uint64_t ram_bytes = 0;
  uint64_t cgroup_bytes = 0;   // memory.max of this cgroup; UINT64_MAX when unlimited.
  uint64_t memlock_bytes = 0;  // RLIMIT_MEMLOCK (soft, after raising it to hard); UINT64_MAX = no
                               // limit or CAP_IPC_LOCK.
};

class Os {
 public:
  virtual ~Os() = default;

  // Files. Every descriptor is close-on-exec.
  virtual absl::StatusOr<UniqueFd> OpenDir(const std::string& path) = 0;
  virtual absl::StatusOr<UniqueFd> OpenDirAt(const UniqueFd& dir, const std::string& name) = 0;
  // For reading; a FIFO or device does not block and is refused.
  virtual absl::StatusOr<UniqueFd> OpenFileAt(const UniqueFd& dir, const std::string& name) = 0;
  // Fails if it is there (ALREADY_EXISTS).
  virtual absl::StatusOr<UniqueFd> CreateFileAt(const UniqueFd& dir, const std::string& name,
                                                uint32_t mode) = 0;
  virtual absl::Status MakeDirAt(const UniqueFd& dir, const std::string& name, uint32_t mode) = 0;
  // As `mkdir -p`; existing directories are left as they are.
  virtual absl::Status MakeDirs(const std::string& path, uint32_t mode) = 0;
  // Without "." and "..", sorted by name.
  virtual absl::StatusOr<std::vector<DirEntry>> ListDir(const UniqueFd& dir) = 0;
  virtual absl::StatusOr<FileInfo> Stat(const UniqueFd& fd) = 0;
  virtual absl::StatusOr<FileInfo> StatAt(const UniqueFd& dir, const std::string& name) = 0;
  // Fewer bytes than asked only at the end of the file.
  virtual absl::StatusOr<uint64_t> ReadAt(const UniqueFd& fd, uint64_t offset,
                                          std::span<std::byte> into) = 0;
  virtual absl::Status WriteAt(const UniqueFd& fd, uint64_t offset,
                               std::span<const std::byte> bytes) = 0;
  // Reserves space: RESOURCE_EXHAUSTED now rather than halfway through a write.
  virtual absl::Status Allocate(const UniqueFd& fd, uint64_t bytes) = 0;
  // Makes `to` share the blocks of `from` (reflink). UNIMPLEMENTED where the file system cannot.
  virtual absl::Status Clone(const UniqueFd& from, const UniqueFd& to) = 0;
  virtual absl::Status Sync(const UniqueFd& fd) = 0;  // fsync; also for directories.
  virtual absl::Status SetMode(const UniqueFd& fd, uint32_t mode) = 0;
  virtual absl::Status RenameNoReplace(const UniqueFd& from_dir, const std::string& from,
                                       const UniqueFd& to_dir, const std::string& to) = 0;
  virtual absl::Status Rename(const UniqueFd& from_dir, const std::string& from,
                              const UniqueFd& to_dir, const std::string& to) = 0;
  // A second name for the file `from` in `from_dir`.
  virtual absl::Status Link(const UniqueFd& from_dir, const std::string& from,
                            const UniqueFd& to_dir, const std::string& to) = 0;
  virtual absl::Status RemoveFileAt(const UniqueFd& dir, const std::string& name) = 0;
  // Removes a directory and all in it, write-protected or not. Does not follow links.
  virtual absl::Status RemoveTreeAt(const UniqueFd& dir, const std::string& name) = 0;
  virtual absl::StatusOr<uint64_t> FreeBytes(const UniqueFd& dir) = 0;
  // The mount that `fd` was opened through refuses every write, whoever asks, and so does opening
  // the descriptor again.
  virtual absl::StatusOr<bool> OnReadOnlyMount(const UniqueFd& fd) = 0;
  // An exclusive lock on an open file for the life of the descriptor; UNAVAILABLE if someone has
  // it.
  virtual absl::Status TryLock(const UniqueFd& fd) = 0;

  // Memory. `bytes` is (part of) a live mapping.
  // A hint for a mapping that will be read whole: fill the page cache, and map it, in the largest
  // pages there are. Ignored where the kernel cannot.
  virtual void PreferLargePages(std::span<const std::byte> bytes) = 0;
  // Faults the pages in for reading. DATA_LOSS on EIO or past the end of a truncated file: an
  // error, never SIGBUS.
  virtual absl::Status Populate(std::span<const std::byte> bytes) = 0;
  virtual absl::Status Lock(std::span<const std::byte> bytes) = 0;
  virtual void Unlock(std::span<const std::byte> bytes) = 0;
  // How many of the bytes are in memory now (mincore).
  virtual absl::StatusOr<uint64_t> ResidentBytes(std::span<const std::byte> bytes) = 0;
  virtual MemoryLimits Limits() = 0;
  // "best-effort:N", "idle" or "none" for the calling thread's reads.
  virtual absl::Status SetIoPriority(absl::string_view io_class) = 0;

  // The calling thread gives way to every other thread of the machine from now on: nice is 10 more
  // than the process's, it never preempts, and its turns are the shortest there are. Without rights
  // this cannot be taken back, so it is for threads that do nothing else.
  virtual absl::Status MakeThreadBackground() = 0;
  // How long the calling thread has had a core.
  virtual absl::Duration ThreadCpuTime() = 0;
};

}  // namespace modelhost
