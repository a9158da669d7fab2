#include "client/modelctl/offline_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/small_file.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFiles = 100'000;

absl::Status StatusOfErrno(int sys_errno, const std::string& what) {
  return StatusOfError(ErrnoError(sys_errno, what), "");
}

// An error in opening a file, with what to do where that is known.
absl::Status OpenError(int sys_errno, const std::string& name) {
  const char* hint = sys_errno == EACCES || sys_errno == EPERM
                         ? " (check the permissions of the file and of its folders)"
                     : sys_errno == ELOOP
                         ? " (its links lead in a circle: put the file itself there)"
                     : sys_errno == ENOENT ? " (check the name, and where a link leads)"
                                           : "";
  const absl::Status status = StatusOfErrno(sys_errno, name);
  return absl::Status(status.code(), absl::StrCat(status.message(), hint));
}

const char* KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "something unknown";
}

std::string WithSlash(std::string folder) {
  if (folder.empty() || folder.back() != '/') folder += '/';
  return folder;
}

}  // namespace

absl::Status StatusOfError(const Error& error, const std::string& what) {
  return absl::Status(static_cast<absl::StatusCode>(error.code),
                      what.empty() ? error.text : absl::StrCat(what, ": ", error.text));
}

ExitCode OfflineExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kNotFound:
      return ExitCode::kNotFound;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return ExitCode::kConflict;
    case absl::StatusCode::kResourceExhausted:
      return ExitCode::kResources;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kDataLoss:
      return ExitCode::kIntegrity;
    case absl::StatusCode::kPermissionDenied:
      return ExitCode::kPermission;
    case absl::StatusCode::kCancelled:
      return ExitCode::kInterrupted;
    default:
      return ExitCode::kOther;
  }
}

OfflineFiles::OfflineFiles(std::string folder, std::string main, Reach reach)
    : folder_(folder.empty() ? "" : WithSlash(std::move(folder))),
      main_(std::move(main)),
      reach_(reach),
      in_reach_(folder_) {}

absl::StatusOr<std::span<const std::byte>> OfflineFiles::Open(const std::string& name) {
  auto at = mappings_.find(name);
  if (at == mappings_.end()) {
    absl::StatusOr<ReadOnlyMapping> mapping = Map(name);
    if (!mapping.ok()) return mapping.status();
    at = mappings_.emplace(name, *std::move(mapping)).first;
  }
  return at->second.bytes();
}

absl::StatusOr<uint64_t> OfflineFiles::SizeOf(const std::string& name) {
  if (absl::Status status = Turn(name); !status.ok()) return status;
  return current_.bytes;
}

absl::Status OfflineFiles::ReadAt(const std::string& name, uint64_t offset,
                                  std::span<std::byte> to) {
  if (absl::Status status = Turn(name); !status.ok()) return status;
  return ReadFully(current_.fd, name, offset, to);
}

absl::Status OfflineFiles::Turn(const std::string& name) {
  if (current_.fd.valid() && current_name_ == name) return absl::OkStatus();
  absl::StatusOr<OpenFile> file = OpenRegular(name);
  if (!file.ok()) return file.status();
  current_ = *std::move(file);
  current_name_ = name;
  return absl::OkStatus();
}

absl::StatusOr<ReadOnlyMapping> OfflineFiles::Map(const std::string& name) {
  absl::StatusOr<OpenFile> file = OpenRegular(name);
  if (!file.ok()) return file.status();
  Result<ReadOnlyMapping> mapping = ReadOnlyMapping::MapFile(file->fd, file->bytes);
  if (!mapping.ok()) return StatusOfError(mapping.error(), name);
  return *std::move(mapping);
}

absl::StatusOr<OfflineFiles::OpenFile> OfflineFiles::OpenRegular(const std::string& name) {
  // First a descriptor that opens nothing: no FIFO blocks, no device reacts.
  const UniqueFd place(::open((folder_ + name).c_str(), O_PATH | O_CLOEXEC));
  if (!place.valid()) {
    // A part of the path that is a file is a path that is not there.
    return OpenError(errno == ENOTDIR ? ENOENT : errno, name);
  }
  struct stat info {};
  if (::fstat(place.get(), &info) != 0) return StatusOfErrno(errno, name);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, ": ", KindOf(info.st_mode), ", not a regular file (put the file itself there)"));
  }
  const std::string link = absl::StrCat("/proc/self/fd/", place.get());
  std::error_code error;
  const std::string real_path = fs::read_symlink(link, error).string();
  if (error) return StatusOfErrno(error.value(), absl::StrCat(name, ": ", link));
  if (absl::Status status = CheckReach(name, real_path); !status.ok()) return status;

  UniqueFd file(::open(link.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) return OpenError(errno, name);
  return OpenFile{std::move(file), static_cast<uint64_t>(info.st_size)};
}

absl::Status OfflineFiles::CheckReach(const std::string& name, const std::string& real_path) {
  if (reach_ == Reach::kFile && name == main_) {
    in_reach_.Add(fs::path(real_path).parent_path().string());
    return absl::OkStatus();
  }
  if (in_reach_.Holds(real_path)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(name, ": a link out of the model's folder, to ",
                                                    real_path, " (copy the file into the folder)"));
}

absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error);
  size_t seen = 0;
  for (; !error && at != fs::recursive_directory_iterator(); at.increment(error)) {
    if (++seen > kMaxFiles) {
      return absl::ResourceExhaustedError(absl::StrCat(
          folder, ": more than ", kMaxFiles, " files (name the folder of the model itself)"));
    }
    std::error_code unreadable;
    if (absl::StartsWith(at->path().filename().string(), ".")) {
      at.disable_recursion_pending();
    } else if (at->is_regular_file(unreadable) || at->is_symlink(unreadable)) {
      if (at->is_directory(unreadable)) continue;
      names.push_back(at->path().lexically_relative(folder).string());
    }
  }
  if (error) return StatusOfErrno(error.value(), folder);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace modelhost::modelctl
