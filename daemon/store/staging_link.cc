// A file whose digest the store already has becomes a hard link to that file: no second copy on
// disk, and one region in memory.
//
// A digest in a manifest says what a file had when it was published, not what the disk gives back
// today: without a look at the bytes, a repair would link the very file that went bad. So they are
// compared. Any obstacle (no hard links here, another owner, too many links) leaves the copy that
// has been staged.
#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/store/staging.h"

namespace modelhost {
namespace {

constexpr size_t kMaxCandidates = 4;
constexpr uint32_t kAnyWrite = 0222;

}  // namespace

absl::StatusOr<bool> Staging::ReplaceByLink(const Writing& writing, const ManifestFile& file,
                                            const Progress& progress) {
  if (file.bytes == 0) return false;  // Nothing to save.
  const std::vector<Store::Location> found = store_.FindFiles(file.sha256, file.bytes);
  for (size_t i = 0; i < std::min(found.size(), kMaxCandidates); ++i) {
    auto linked = TryLink(found[i], writing, file, progress);
    if (!linked.ok() || *linked) return linked;
  }
  return false;
}

absl::StatusOr<bool> Staging::SameBytes(const UniqueFd& a, const UniqueFd& b, uint64_t bytes,
                                        const Progress& progress) {
  absl::Status cancelled;
  std::vector<std::byte> other(std::min(bytes, kReadBytes));
  const absl::Status same = ReadInOrder(
      os_, a, "", bytes, buffer_,
      [&](uint64_t offset, std::span<const std::byte> piece) -> absl::Status {
        // The file counts as staged already: this only asks whether to go on.
        if (cancelled = Report(progress, 0); !cancelled.ok()) return cancelled;
        const auto into = std::span(other).first(piece.size());
        auto got = os_.ReadAt(b, offset, into);
        if (!got.ok()) return got.status();
        if (*got == piece.size() && std::memcmp(into.data(), piece.data(), piece.size()) == 0) {
          return absl::OkStatus();
        }
        return absl::DataLossError("they differ");
      });
  if (!cancelled.ok()) return cancelled;
  return same.ok();
}

absl::StatusOr<bool> Staging::TryLink(const Store::Location& from, const Writing& writing,
                                      const ManifestFile& file, const Progress& progress) {
  auto dir = os_.OpenDirAt(store_.root_dir(), from.dir);
  if (!dir.ok()) return false;
  auto existing = os_.OpenFileAt(*dir, from.name);
  if (!existing.ok()) return false;
  auto before = os_.Stat(*existing);
  if (!before.ok() || before->bytes != file.bytes || (before->mode & kAnyWrite) != 0 ||
      (before->uid != store_.own_uid() && before->uid != 0)) {
    return false;
  }
  auto same = SameBytes(*existing, writing.file, file.bytes, progress);
  if (!same.ok() || !*same) return same;
  // What an operator has put there may never have been written out, and this version promises it.
  if (!os_.Sync(*existing).ok()) return false;

  // Linked under a name of its own first: if that fails, the copy is still where it was.
  const std::string link = lock_.link();
  if (!os_.Link(*dir, from.name, *incoming_, link).ok()) return false;
  auto linked = os_.StatAt(*incoming_, link);
  const bool same_file = linked.ok() && linked->inode == before->inode &&
                         linked->device == before->device && linked->bytes == before->bytes &&
                         linked->mtime_ns == before->mtime_ns;
  if (!same_file || !os_.Rename(*incoming_, link, dir_, writing.path).ok()) {
    (void)os_.RemoveFileAt(*incoming_, link);
    return false;
  }
  // The link changed the file's ctime: what was known about it goes on being known.
  if (verified_ != nullptr && verified_->Find(*before) == file.sha256) {
    verified_->Forget(*before);
    if (auto after = os_.Stat(*existing); after.ok()) verified_->Record(*after, file.sha256);
  }
  return true;
}

}  // namespace modelhost
