// The file half of LinuxOs.
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/linux_os.h"

namespace modelhost {
namespace {

constexpr int kMaxDepth = 64;  // Of a tree to remove; a descriptor is held per level.

// The path behind a descriptor, for people; asked only when there is an error to tell.
std::string PathOf(const UniqueFd& fd) {
  char path[4096];
  const std::string link = absl::StrCat("/proc/self/fd/", fd.get());
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "(unknown path)";
}

std::string PathOf(const UniqueFd& dir, const std::string& name) {
  return absl::StrCat(PathOf(dir), "/", name);
}

absl::Status LinkRefused(const std::string& what) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": is a symbolic link"));
}

// A name's last part in the directory that holds it. No part on the way may be a symlink or "..".
class Place {
 public:
  static absl::StatusOr<Place> Find(const UniqueFd& dir, const std::string& name) {
    Place place(dir, name);
    size_t begin = 0;
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', begin)) {
      const std::string part = name.substr(begin, slash - begin);
      if (part.empty() || part == "." || part == "..") return Refused(dir, name);
      UniqueFd next(
          ::openat(place.fd(), part.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (!next.valid()) return ErrnoStatus(errno, absl::StrCat("open ", PathOf(dir, name)));
      place.parent_ = std::move(next);
      begin = slash + 1;
    }
    place.last_ = name.substr(begin);
    if (place.last_.empty() || place.last_ == "..") return Refused(dir, name);
    return place;
  }

  int fd() const { return parent_.valid() ? parent_.get() : dir_.get(); }
  const char* last() const { return last_.c_str(); }

  absl::Status Fail(int sys_errno, absl::string_view verb) const {
    return ErrnoStatus(sys_errno, absl::StrCat(verb, " ", PathOf(dir_, name_)));
  }
  bool IsSymlink() const {
    struct stat info {};
    return ::fstatat(fd(), last(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
  }
  absl::StatusOr<UniqueFd> Open(int flags, uint32_t mode, absl::string_view verb) const {
    UniqueFd opened(::openat(fd(), last(), flags | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY, mode));
    if (opened.valid()) return opened;
    const int error = errno;
    if ((error == ELOOP || error == ENOTDIR) && IsSymlink()) {
      return LinkRefused(absl::StrCat(verb, " ", PathOf(dir_, name_)));
    }
    if (error == ENXIO) {  // A FIFO that nobody reads, a socket.
      return absl::FailedPreconditionError(
          absl::StrCat(verb, " ", PathOf(dir_, name_), ": not a regular file"));
    }
    return Fail(error, verb);
  }

 private:
  Place(const UniqueFd& dir, const std::string& name) : dir_(dir), name_(name) {}
  static absl::Status Refused(const UniqueFd& dir, const std::string& name) {
    return absl::InvalidArgumentError(
        absl::StrCat("name \"", name, "\" in ", PathOf(dir), ": not a plain relative name"));
  }

  const UniqueFd& dir_;
  const std::string& name_;
  UniqueFd parent_;  // Not valid: `dir_` itself.
  std::string last_;
};

FileKind KindOf(mode_t mode) {
  if (S_ISREG(mode)) return FileKind::kRegular;
  if (S_ISDIR(mode)) return FileKind::kDirectory;
  if (S_ISLNK(mode)) return FileKind::kSymlink;
  return FileKind::kOther;
}

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileInfo InfoOf(const struct stat& from) {
  FileInfo info;
  info.kind = KindOf(from.st_mode);
  info.device = from.st_dev;
  info.inode = from.st_ino;
  info.bytes = static_cast<uint64_t>(from.st_size);
  info.mtime_ns = Nanoseconds(from.st_mtim);
  info.ctime_ns = Nanoseconds(from.st_ctim);
  info.mode = from.st_mode & 07777;
  info.uid = from.st_uid;
  info.gid = from.st_gid;
  info.links = static_cast<uint32_t>(from.st_nlink);
  return info;
}

// A directory to be emptied, made writable if it is not.
absl::StatusOr<UniqueFd> OpenToEmpty(const Place& place) {
  auto dir = place.Open(O_RDONLY | O_DIRECTORY, 0, "open");
  if (!dir.ok() && ErrnoOf(dir.status()) == EACCES) {
    // It may not even be listed: chmod goes through an O_PATH descriptor, which needs no right.
    auto handle = place.Open(O_PATH | O_DIRECTORY, 0, "open");
    if (!handle.ok()) return handle.status();
    if (::chmod(absl::StrCat("/proc/self/fd/", handle->get()).c_str(), 0700) != 0) {
      return place.Fail(errno, "make writable");
    }
    dir = place.Open(O_RDONLY | O_DIRECTORY, 0, "open");
  }
  if (!dir.ok()) return dir.status();
  struct stat info {};
  if (::fstat(dir->get(), &info) != 0) return place.Fail(errno, "stat");
  if ((info.st_mode & 0700) != 0700 && ::fchmod(dir->get(), 0700) != 0) {
    return place.Fail(errno, "make writable");
  }
  return dir;
}

absl::Status RemoveTree(LinuxOs& os, const UniqueFd& parent, const std::string& name, int depth) {
  const auto place = Place::Find(parent, name);
  if (!place.ok()) return place.status();
  if (depth > kMaxDepth) {
    return absl::FailedPreconditionError(
        absl::StrCat("remove ", PathOf(parent, name), ": over ", kMaxDepth, " directories deep"));
  }
  const auto dir = OpenToEmpty(*place);
  if (!dir.ok()) return dir.status();
  const auto entries = os.ListDir(*dir);
  if (!entries.ok()) return entries.status();
  for (const DirEntry& entry : *entries) {
    const absl::Status removed = entry.kind == FileKind::kDirectory
                                     ? RemoveTree(os, *dir, entry.name, depth + 1)
                                     : os.RemoveFileAt(*dir, entry.name);
    if (!removed.ok() && ErrnoOf(removed) != ENOENT) return removed;
  }
  if (::unlinkat(place->fd(), place->last(), AT_REMOVEDIR) != 0) {
    return place->Fail(errno, "remove");
  }
  return absl::OkStatus();
}

absl::Status RenameWith(unsigned flags, const UniqueFd& from_dir, const std::string& from,
                        const UniqueFd& to_dir, const std::string& to) {
  const auto source = Place::Find(from_dir, from);
  if (!source.ok()) return source.status();
  const auto target = Place::Find(to_dir, to);
  if (!target.ok()) return target.status();
  if (::renameat2(source->fd(), source->last(), target->fd(), target->last(), flags) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno,
                     absl::StrCat("rename ", PathOf(from_dir, from), " to ", PathOf(to_dir, to)));
}

}  // namespace

absl::StatusOr<UniqueFd> LinuxOs::OpenDir(const std::string& path) {
  UniqueFd dir(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (dir.valid()) return dir;
  const int error = errno;
  struct stat info {};
  if (error == ENOTDIR && ::lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "open directory ", path, ": is a symbolic link (give the path that it points to)"));
  }
  return ErrnoStatus(error, absl::StrCat("open directory ", path));
}

absl::StatusOr<UniqueFd> LinuxOs::OpenDirAt(const UniqueFd& dir, const std::string& name) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  return place->Open(O_RDONLY | O_DIRECTORY, 0, "open directory");
}

absl::StatusOr<UniqueFd> LinuxOs::OpenFileAt(const UniqueFd& dir, const std::string& name) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  // Non-blocking only for the open: a FIFO would wait for its other end.
  auto file = place->Open(O_RDONLY | O_NONBLOCK, 0, "open");
  if (!file.ok()) return file.status();
  struct stat info {};
  if (::fstat(file->get(), &info) != 0) return place->Fail(errno, "stat");
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("open ", PathOf(dir, name), ": not a regular file"));
  }
  const int flags = ::fcntl(file->get(), F_GETFL);
  if (flags < 0 || ::fcntl(file->get(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
    return place->Fail(errno, "open");
  }
  return file;
}

absl::StatusOr<UniqueFd> LinuxOs::CreateFileAt(const UniqueFd& dir, const std::string& name,
                                               uint32_t mode) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  return place->Open(O_RDWR | O_CREAT | O_EXCL, mode, "create");
}

absl::Status LinuxOs::MakeDirAt(const UniqueFd& dir, const std::string& name, uint32_t mode) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  if (::mkdirat(place->fd(), place->last(), mode) != 0) {
    return place->Fail(errno, "create directory");
  }
  return absl::OkStatus();
}

absl::Status LinuxOs::MakeDirs(const std::string& path, uint32_t mode) {
  for (size_t at = 1; at <= path.size(); ++at) {
    if (at < path.size() && path[at] != '/') continue;
    const std::string part = path.substr(0, at);
    if (::mkdir(part.c_str(), mode) == 0) continue;
    const int error = errno;
    struct stat info {};
    if (::stat(part.c_str(), &info) == 0) {
      if (S_ISDIR(info.st_mode)) continue;
      return ErrnoStatus(ENOTDIR, absl::StrCat("create directory ", path, ": ", part));
    }
    return ErrnoStatus(error, absl::StrCat("create directory ", part));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DirEntry>> LinuxOs::ListDir(const UniqueFd& dir) {
  // A second open file, so that the caller's position is left alone.
  UniqueFd own(::openat(dir.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!own.valid()) return ErrnoStatus(errno, absl::StrCat("list ", PathOf(dir)));
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(own.get()), &::closedir);
  if (stream == nullptr) return ErrnoStatus(errno, absl::StrCat("list ", PathOf(dir)));
  (void)std::move(own).Release();  // The stream closes it.
  std::vector<DirEntry> entries;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(stream.get());
    if (entry == nullptr) {
      if (errno != 0) return ErrnoStatus(errno, absl::StrCat("list ", PathOf(dir)));
      break;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat info {};
    if (::fstatat(::dirfd(stream.get()), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // Gone since.
      return ErrnoStatus(errno, absl::StrCat("stat ", PathOf(dir, name)));
    }
    entries.push_back({name, KindOf(info.st_mode)});
  }
  std::sort(entries.begin(), entries.end(),
            [](const DirEntry& a, const DirEntry& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<FileInfo> LinuxOs::Stat(const UniqueFd& fd) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", PathOf(fd)));
  return InfoOf(info);
}

absl::StatusOr<FileInfo> LinuxOs::StatAt(const UniqueFd& dir, const std::string& name) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  struct stat info {};
  if (::fstatat(place->fd(), place->last(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return place->Fail(errno, "stat");
  }
  return InfoOf(info);
}

absl::StatusOr<uint64_t> LinuxOs::ReadAt(const UniqueFd& fd, uint64_t offset,
                                         std::span<std::byte> into) {
  uint64_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(fd.get(), into.data() + done, into.size() - done,
                                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return ErrnoStatus(errno, absl::StrCat("read ", PathOf(fd), " at byte ", offset + done));
    }
    if (got == 0) break;
    done += static_cast<uint64_t>(got);
  }
  return done;
}

absl::Status LinuxOs::WriteAt(const UniqueFd& fd, uint64_t offset,
                              std::span<const std::byte> bytes) {
  uint64_t done = 0;
  while (done < bytes.size()) {
    const ssize_t put = ::pwrite(fd.get(), bytes.data() + done, bytes.size() - done,
                                 static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      return ErrnoStatus(put == 0 ? EIO : errno,
                         absl::StrCat("write ", PathOf(fd), " at byte ", offset + done));
    }
    done += static_cast<uint64_t>(put);
  }
  return absl::OkStatus();
}

absl::Status LinuxOs::Allocate(const UniqueFd& fd, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const std::string what = absl::StrCat("allocate ", bytes, " bytes for ");
  int error = 0;
  do {
    error = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) {
    // Nothing can be reserved here: at least do not begin what cannot fit.
    struct statvfs space {};
    if (::fstatvfs(fd.get(), &space) != 0) return ErrnoStatus(errno, what + PathOf(fd));
    if (uint64_t{space.f_bavail} * space.f_frsize < bytes) {
      error = ENOSPC;
    } else {
      error = ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    }
  }
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, what + PathOf(fd));
}

absl::Status LinuxOs::Clone(const UniqueFd& from, const UniqueFd& to) {
  if (::ioctl(to.get(), FICLONE, from.get()) == 0) return absl::OkStatus();
  const int error = errno;
  const std::string what = absl::StrCat("clone ", PathOf(from), " to ", PathOf(to));
  switch (error) {
    case EOPNOTSUPP:
    case ENOTTY:
    case ENOSYS:
    case EXDEV:
    case EINVAL:
    case EPERM:  // What seccomp filters answer.
      return ErrnoStatus(EOPNOTSUPP, what);
    default:
      return ErrnoStatus(error, what);
  }
}

absl::Status LinuxOs::Sync(const UniqueFd& fd) {
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, absl::StrCat("sync ", PathOf(fd)));
  return absl::OkStatus();
}

absl::Status LinuxOs::SetMode(const UniqueFd& fd, uint32_t mode) {
  if (::fchmod(fd.get(), mode) != 0) {
    return ErrnoStatus(errno, absl::StrCat("set the mode of ", PathOf(fd)));
  }
  return absl::OkStatus();
}

absl::Status LinuxOs::RenameNoReplace(const UniqueFd& from_dir, const std::string& from,
                                      const UniqueFd& to_dir, const std::string& to) {
  return RenameWith(RENAME_NOREPLACE, from_dir, from, to_dir, to);
}

absl::Status LinuxOs::Rename(const UniqueFd& from_dir, const std::string& from,
                             const UniqueFd& to_dir, const std::string& to) {
  return RenameWith(0, from_dir, from, to_dir, to);
}

absl::Status LinuxOs::Link(const UniqueFd& from_dir, const std::string& from,
                           const UniqueFd& to_dir, const std::string& to) {
  const auto source = Place::Find(from_dir, from);
  if (!source.ok()) return source.status();
  const auto target = Place::Find(to_dir, to);
  if (!target.ok()) return target.status();
  // Without AT_SYMLINK_FOLLOW a symlink would be linked itself; it is refused instead.
  if (source->IsSymlink()) return LinkRefused(absl::StrCat("link ", PathOf(from_dir, from)));
  if (::linkat(source->fd(), source->last(), target->fd(), target->last(), 0) == 0) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno,
                     absl::StrCat("link ", PathOf(from_dir, from), " as ", PathOf(to_dir, to)));
}

absl::Status LinuxOs::RemoveFileAt(const UniqueFd& dir, const std::string& name) {
  const auto place = Place::Find(dir, name);
  if (!place.ok()) return place.status();
  if (::unlinkat(place->fd(), place->last(), 0) != 0) return place->Fail(errno, "remove");
  return absl::OkStatus();
}

absl::Status LinuxOs::RemoveTreeAt(const UniqueFd& dir, const std::string& name) {
  return RemoveTree(*this, dir, name, 0);
}

absl::StatusOr<uint64_t> LinuxOs::FreeBytes(const UniqueFd& dir) {
  struct statvfs space {};
  if (::fstatvfs(dir.get(), &space) != 0) {
    return ErrnoStatus(errno, absl::StrCat("ask for the free space at ", PathOf(dir)));
  }
  return uint64_t{space.f_bavail} * space.f_frsize;
}

absl::StatusOr<bool> LinuxOs::OnReadOnlyMount(const UniqueFd& fd) {
  struct statvfs mount {};
  if (::fstatvfs(fd.get(), &mount) != 0) {
    return ErrnoStatus(errno, absl::StrCat("ask for the mount of ", PathOf(fd)));
  }
  return (mount.f_flag & ST_RDONLY) != 0;
}

absl::Status LinuxOs::TryLock(const UniqueFd& fd) {
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno == EWOULDBLOCK) {
    return absl::UnavailableError(
        absl::StrCat("lock ", PathOf(fd), ": somebody else has it locked"));
  }
  return ErrnoStatus(errno, absl::StrCat("lock ", PathOf(fd)));
}

}  // namespace modelhost
