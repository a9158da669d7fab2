#include "daemon/runtime_dir.h"

#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr char kLockName[] = "modelhostd.lock";
constexpr char kPidName[] = "modelhostd.pid";
constexpr uint32_t kGroupOrWorldWrite = 0022;
constexpr uint32_t kSticky = 01000;

// Whoever may rename entries of the directory could put a socket of their own in our place.
absl::Status CheckOwner(Os& os, const std::string& path, uint32_t own_uid) {
  auto dir = os.OpenDir(path);
  if (!dir.ok()) return dir.status();
  const auto info = os.Stat(*dir);
  if (!info.ok()) return info.status();
  if (info->uid != own_uid && info->uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": belongs to uid ", info->uid,
                                                      ", not to us (uid ", own_uid,
                                                      "); remove it, or name another directory"));
  }
  if ((info->mode & kGroupOrWorldWrite) != 0 && (info->mode & kSticky) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": others may write in it (chmod go-w ", path, ")"));
  }
  return absl::OkStatus();
}

std::string HolderOf(Os& os, const UniqueFd& dir) {
  auto file = os.OpenFileAt(dir, kPidName);
  if (!file.ok()) return "another modelhostd";
  std::array<char, 32> text{};
  const auto got = os.ReadAt(*file, 0, std::as_writable_bytes(std::span(text)));
  if (!got.ok()) return "another modelhostd";
  const absl::string_view pid =
      absl::StripAsciiWhitespace(absl::string_view(text.data(), static_cast<size_t>(*got)));
  return absl::StrCat("modelhostd with pid ", pid);
}

absl::Status WritePid(Os& os, const UniqueFd& dir, int32_t pid) {
  const std::string temporary = absl::StrCat(kPidName, ".tmp");
  (void)os.RemoveFileAt(dir, temporary);
  auto file = os.CreateFileAt(dir, temporary, 0644);
  if (!file.ok()) return file.status();
  const std::string text = absl::StrCat(pid, "\n");
  if (auto status = os.WriteAt(*file, 0, std::as_bytes(std::span(text))); !status.ok()) {
    return status;
  }
  return os.Rename(dir, temporary, dir, kPidName);
}

}  // namespace

absl::StatusOr<OwnedDir> TakeDir(Os& os, const std::string& path, uint32_t own_uid,
                                 int32_t own_pid) {
  if (auto status = os.MakeDirs(path, 0700); !status.ok()) return status;
  const size_t slash = path.find_last_of('/', path.find_last_not_of('/'));
  const std::string parent = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : path.substr(0, slash);
  for (const std::string& place : {parent, path}) {
    if (auto status = CheckOwner(os, place, own_uid); !status.ok()) return status;
  }
  auto dir = os.OpenDir(path);
  if (!dir.ok()) return dir.status();
  auto lock = os.CreateFileAt(*dir, kLockName, 0600);
  if (absl::IsAlreadyExists(lock.status())) lock = os.OpenFileAt(*dir, kLockName);
  if (!lock.ok()) return lock.status();
  if (auto status = os.TryLock(*lock); !status.ok()) {
    if (!absl::IsUnavailable(status)) return status;
    return absl::FailedPreconditionError(absl::StrCat(path, ": in use by ", HolderOf(os, *dir),
                                                      " (stop it, or name another directory)"));
  }
  if (auto status = WritePid(os, *dir, own_pid); !status.ok()) return status;
  return OwnedDir{*std::move(dir), *std::move(lock)};
}

}  // namespace modelhost
