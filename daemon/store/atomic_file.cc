#include "daemon/store/atomic_file.h"

#include <span>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

absl::Status Gone(const absl::Status& removed) {
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::Status WriteNew(Os& os, const UniqueFd& dir, const std::string& name, uint32_t mode,
                      absl::string_view text) {
  auto file = os.CreateFileAt(dir, name, mode);
  if (!file.ok()) return file.status();
  absl::Status done = os.WriteAt(*file, 0, std::as_bytes(std::span(text.data(), text.size())));
  if (done.ok()) done = os.Sync(*file);
  return done;
}

enum class Old { kNone, kKept, kCannotKeep };

// Gives the file that is about to be replaced a second name.
absl::StatusOr<Old> KeepOld(Os& os, const UniqueFd& dir, const std::string& name,
                            const std::string& kept) {
  const absl::Status linked = os.Link(dir, name, dir, kept);
  if (linked.ok()) return Old::kKept;
  if (absl::IsNotFound(linked)) return Old::kNone;
  // A file system without hard links.
  if (absl::IsPermissionDenied(linked) || absl::IsUnimplemented(linked)) return Old::kCannotKeep;
  return linked;
}

// The directory's fsync failed after the rename: whether the new name would survive is unknown, so
// the old one goes back.
void PutBack(Os& os, const UniqueFd& dir, const std::string& name, const std::string& kept,
             Old old) {
  if (old == Old::kCannotKeep) return;
  const absl::Status back =
      old == Old::kKept ? os.Rename(dir, kept, dir, name) : os.RemoveFileAt(dir, name);
  if (back.ok()) (void)os.Sync(dir);
}

}  // namespace

absl::Status ReplaceFileAt(Os& os, const UniqueFd& dir, const std::string& name, uint32_t mode,
                           absl::string_view text) {
  const std::string fresh = absl::StrCat(name, ".tmp");
  const std::string kept = absl::StrCat(name, ".old");
  // What a crash may have left of either.
  if (auto gone = Gone(os.RemoveFileAt(dir, fresh)); !gone.ok()) return gone;
  if (auto gone = Gone(os.RemoveFileAt(dir, kept)); !gone.ok()) return gone;

  Old old = Old::kNone;
  absl::Status done = WriteNew(os, dir, fresh, mode, text);
  if (done.ok()) {
    FaultPoint("file.written");
    const absl::StatusOr<Old> kept_old = KeepOld(os, dir, name, kept);
    done = kept_old.status();
    if (done.ok()) old = *kept_old;
  }
  FaultPoint("file.kept");
  if (done.ok()) done = os.Rename(dir, fresh, dir, name);
  if (!done.ok()) {
    (void)os.RemoveFileAt(dir, fresh);
    if (old == Old::kKept) (void)os.RemoveFileAt(dir, kept);
    return done;
  }
  FaultPoint("file.renamed");
  if (done = os.Sync(dir); !done.ok()) {
    PutBack(os, dir, name, kept, old);
    return done;
  }
  FaultPoint("file.synced");
  if (old == Old::kKept)
    (void)os.RemoveFileAt(dir, kept);  // If it stays, the next call sees to it.
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(Os& os, const UniqueFd& file, absl::string_view name,
                                          uint64_t max_bytes) {
  auto info = os.Stat(file);
  if (!info.ok()) return info.status();
  if (info->bytes > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(name, ": ", info->bytes, " bytes, more than the ", max_bytes, " allowed"));
  }
  std::string text(info->bytes, '\0');
  auto got = os.ReadAt(file, 0, std::as_writable_bytes(std::span(text)));
  if (!got.ok()) return got.status();
  text.resize(*got);
  return text;
}

absl::StatusOr<std::string> ReadSmallFileAt(Os& os, const UniqueFd& dir, const std::string& name,
                                            uint64_t max_bytes) {
  auto file = os.OpenFileAt(dir, name);
  if (!file.ok()) return file.status();
  return ReadSmallFile(os, *file, name, max_bytes);
}

absl::Status Prefix(absl::string_view what, const absl::Status& status) {
  absl::Status out(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { out.SetPayload(url, payload); });
  return out;
}

}  // namespace modelhost
