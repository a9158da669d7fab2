#include "client/modelctl/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/modelctl/offline_files.h"
#include "client/modelctl/small_file.h"

namespace modelhost::modelctl {
namespace {

constexpr size_t kBufferBytes = 1 << 20;
constexpr size_t kMaxStemBytes = 200;  // Leaves room for what a temporary's name adds.
constexpr int kMostAttempts = 100;
constexpr mode_t kMode = 0666;  // Less the umask.

absl::Status ExistsError(const std::string& target) {
  return absl::AlreadyExistsError(
      absl::StrCat(target,
                   ": exists already and was left as it is (choose another name, or add "
                   "--force to replace it)"));
}

bool HasNoTmpfile(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOSYS;
}

std::string FdPath(const UniqueFd& fd) { return absl::StrCat("/proc/self/fd/", fd.get()); }

}  // namespace

OutputFile::OutputFile(std::string target, bool replace)
    : target_(std::move(target)), replace_(replace) {
  const size_t slash = target_.rfind('/');
  folder_ = slash == std::string::npos ? "." : slash == 0 ? "/" : target_.substr(0, slash);
}

absl::StatusOr<OutputFile> OutputFile::Create(const std::string& target, bool replace,
                                              Temporary how) {
  OutputFile file(target, replace);
  struct stat info {};
  if (::lstat(target.c_str(), &info) == 0) {
    if (!replace) return ExistsError(target);
    if (!S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode)) {
      return absl::AlreadyExistsError(
          absl::StrCat(target, ": exists and is no file that could be replaced"));
    }
  } else if (errno != ENOENT) {
    return file.Failed(target);
  }
  if (absl::Status status = file.OpenTemporary(how); !status.ok()) return status;
  return file;
}

OutputFile::~OutputFile() {
  if (fd_.valid() && !named_.empty()) ::unlink(named_.c_str());
}

absl::Status OutputFile::Failed(const std::string& what) const {
  return StatusOfError(ErrnoError(errno, what), "");
}

absl::Status OutputFile::OpenTemporary(Temporary how) {
  if (how == Temporary::kUnnamed) {
    fd_ = UniqueFd(::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, kMode));
    if (fd_.valid() && ::access(FdPath(fd_).c_str(), F_OK) == 0) return absl::OkStatus();
    // Without /proc it could never get a name.
    if (!fd_.valid() && !HasNoTmpfile(errno)) return Failed(folder_);
    fd_.Reset();
  }
  for (int attempt = 0;; ++attempt) {
    const std::string path = TemporaryPath(attempt);
    fd_ = UniqueFd(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, kMode));
    if (fd_.valid()) {
      named_ = path;
      return absl::OkStatus();
    }
    if (errno != EEXIST || attempt == kMostAttempts) return Failed(path);
  }
}

// A killed process may have left one, and its number come again.
std::string OutputFile::TemporaryPath(int attempt) const {
  const std::string name = target_.substr(target_.rfind('/') + 1).substr(0, kMaxStemBytes);
  const std::string path = absl::StrCat(folder_, "/.", name, ".partial-", ::getpid());
  return attempt == 0 ? path : absl::StrCat(path, "-", attempt);
}

absl::Status OutputFile::CheckSpace(uint64_t bytes) const {
  struct statvfs system {};
  // One that does not know its size (some network file systems) is asked byte by byte.
  if (::fstatvfs(fd_.get(), &system) != 0 || system.f_blocks == 0) return absl::OkStatus();
  const uint64_t blocks = ::geteuid() == 0 ? system.f_bfree : system.f_bavail;
  uint64_t free = 0;
  if (__builtin_mul_overflow(blocks, uint64_t{system.f_frsize}, &free) || bytes <= free) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(target_, ": needs ", bytes, " bytes, and its file system has ", free,
                   " free: nothing was written (make room, choose another folder, or import less "
                   "with --only)"));
}

absl::Status OutputFile::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd_.get(), bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return Failed(target_);
    bytes = bytes.subspan(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Append(std::span<const std::byte> bytes) {
  size_ += bytes.size();
  if (buffer_.size() + bytes.size() <= kBufferBytes) {
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return absl::OkStatus();
  }
  const std::string full = std::exchange(buffer_, {});
  if (absl::Status status = Write(std::as_bytes(std::span<const char>(full))); !status.ok()) {
    return status;
  }
  if (bytes.size() >= kBufferBytes) return Write(bytes);
  buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return absl::OkStatus();
}

absl::Status OutputFile::AppendZeros(uint64_t count) {
  constexpr std::array<std::byte, 64> kZeros{};
  while (count > 0) {
    const auto part = std::span(kZeros).first(std::min<uint64_t>(count, kZeros.size()));
    if (absl::Status status = Append(part); !status.ok()) return status;
    count -= part.size();
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Sync() {
  const std::string rest = std::exchange(buffer_, {});
  if (absl::Status status = Write(std::as_bytes(std::span<const char>(rest))); !status.ok()) {
    return status;
  }
  if (::fsync(fd_.get()) != 0) return Failed(target_);
  // A hint: what is compared later should be what the disk has, not what the kernel remembers.
  (void)::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED);
  return absl::OkStatus();
}

absl::StatusOr<ReadOnlyMapping> OutputFile::Map() const {
  Result<ReadOnlyMapping> mapping = ReadOnlyMapping::MapFile(fd_, size_);
  if (!mapping.ok()) return StatusOfError(mapping.error(), target_);
  return *std::move(mapping);
}

absl::Status OutputFile::ReadAt(uint64_t offset, std::span<std::byte> to) const {
  return ReadFully(fd_, target_, offset, to);
}

// Gives the file that has no name one.
absl::Status OutputFile::Link() {
  for (int attempt = 0;; ++attempt) {
    const std::string path = replace_ ? TemporaryPath(attempt) : target_;
    if (::linkat(AT_FDCWD, FdPath(fd_).c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      if (replace_) named_ = path;
      return absl::OkStatus();
    }
    if (errno == EEXIST && !replace_) return ExistsError(target_);
    if (errno != EEXIST || attempt == kMostAttempts) return Failed(path);
  }
}

absl::Status OutputFile::Rename() {
  if (replace_) {
    if (::rename(named_.c_str(), target_.c_str()) != 0) return Failed(target_);
    named_.clear();
    return absl::OkStatus();
  }
  if (::renameat2(AT_FDCWD, named_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) == 0) {
    named_.clear();
    return absl::OkStatus();
  }
  // Not every file system has the flag; a link replaces nothing either.
  if (errno == EINVAL || errno == ENOSYS) {
    if (::link(named_.c_str(), target_.c_str()) == 0) return absl::OkStatus();
  }
  return errno == EEXIST ? ExistsError(target_) : Failed(target_);
}

absl::Status OutputFile::Commit() {
  if (named_.empty()) {
    if (absl::Status status = Link(); !status.ok()) return status;
  }
  if (!named_.empty()) {
    if (absl::Status status = Rename(); !status.ok()) return status;
    if (!named_.empty()) ::unlink(named_.c_str());
    named_.clear();
  }
  const UniqueFd folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A folder that may be written but not read cannot be synced; the file itself is.
  if (!folder.valid() && errno == EACCES) return absl::OkStatus();
  if (!folder.valid() || ::fsync(folder.get()) != 0) {
    const absl::Status status = Failed(folder_);
    // What may be gone after a power cut is no success, and failures leave nothing.
    if (!replace_) ::unlink(target_.c_str());
    return status;
  }
  return absl::OkStatus();
}

}  // namespace modelhost::modelctl
