#include "daemon/store/version_tree.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr size_t kMaxFiles = kMostVersionFiles + 1;  // And manifest.json.
constexpr uint32_t kOthersMayWrite = 0022;

class TreeReader {
 public:
  TreeReader(Os& os, uint32_t own_uid, bool open_files)
      : os_(os), own_uid_(own_uid), open_files_(open_files) {}

  absl::Status Read(const UniqueFd& dir, const std::string& prefix, int depth) {
    if (depth > kMostVersionDepth) {
      return absl::FailedPreconditionError(
          absl::StrCat(prefix, ": over ", kMostVersionDepth, " directories deep"));
    }
    auto entries = os_.ListDir(dir);
    if (!entries.ok()) return entries.status();
    for (const DirEntry& entry : *entries) {
      const std::string path = prefix.empty() ? entry.name : absl::StrCat(prefix, "/", entry.name);
      if (path != kManifestName) {
        if (const absl::Status plain = CheckVersionPath(path); !plain.ok()) return plain;
      }
      const absl::Status read = entry.kind == FileKind::kDirectory
                                    ? ReadDir(dir, entry, path, depth)
                                    : ReadFile(dir, entry, path);
      if (!read.ok()) return read;
    }
    return absl::OkStatus();
  }
  std::vector<TreeFile> TakeFiles() {
    std::sort(files_.begin(), files_.end(),
              [](const TreeFile& a, const TreeFile& b) { return a.path < b.path; });
    return std::move(files_);
  }

 private:
  absl::Status ReadDir(const UniqueFd& parent, const DirEntry& entry, const std::string& path,
                       int depth) {
    auto dir = os_.OpenDirAt(parent, entry.name);
    if (!dir.ok()) return dir.status();
    auto info = os_.Stat(*dir);
    if (!info.ok()) return info.status();
    const absl::Status good = CheckNode(path, *info, FileKind::kDirectory, own_uid_);
    return good.ok() ? Read(*dir, path, depth + 1) : good;
  }

  absl::Status ReadFile(const UniqueFd& parent, const DirEntry& entry, const std::string& path) {
    if (files_.size() == kMaxFiles) {
      return absl::FailedPreconditionError(absl::StrCat("more than ", kMaxFiles, " files"));
    }
    TreeFile file;
    file.path = path;
    // What cannot be opened safely is told from its name alone, with the better reason.
    auto info = os_.StatAt(parent, entry.name);
    if (!info.ok()) return info.status();
    if (absl::Status good = CheckNode(path, *info, FileKind::kRegular, own_uid_); !good.ok()) {
      return good;
    }
    if (open_files_) {
      auto fd = os_.OpenFileAt(parent, entry.name);
      if (!fd.ok()) return fd.status();
      file.fd = *std::move(fd);
      // The name may have been given to another file since.
      info = os_.Stat(file.fd);
      if (!info.ok()) return info.status();
      if (absl::Status good = CheckNode(path, *info, FileKind::kRegular, own_uid_); !good.ok()) {
        return good;
      }
    }
    file.info = *info;
    files_.push_back(std::move(file));
    return absl::OkStatus();
  }

  Os& os_;
  const uint32_t own_uid_;
  const bool open_files_;
  std::vector<TreeFile> files_;
};

}  // namespace

absl::Status CheckNode(absl::string_view what, const FileInfo& info, FileKind kind,
                       uint32_t own_uid) {
  if (info.kind == FileKind::kSymlink) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, ": is a symbolic link (put the file itself there)"));
  }
  if (info.kind != kind) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, kind == FileKind::kRegular ? ": is not a regular file" : ": is not a directory"));
  }
  if ((info.mode & kOthersMayWrite) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: mode %04o lets its group or everybody change it (chmod go-w)", what, info.mode));
  }
  if (info.uid != own_uid && info.uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": belongs to uid ", info.uid,
                                                      ", who could change it (chown it to uid ",
                                                      own_uid, ", the daemon's, or to root)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TreeFile>> ReadTree(Os& os, const UniqueFd& dir, uint32_t own_uid,
                                               bool open_files) {
  TreeReader reader(os, own_uid, open_files);
  if (const absl::Status read = reader.Read(dir, "", 0); !read.ok()) return read;
  return reader.TakeFiles();
}

const TreeFile* FindInTree(const std::vector<TreeFile>& tree, absl::string_view path) {
  const auto it =
      std::lower_bound(tree.begin(), tree.end(), path,
                       [](const TreeFile& file, absl::string_view p) { return file.path < p; });
  return it != tree.end() && it->path == path ? &*it : nullptr;
}

absl::Status MatchTree(const std::vector<ManifestFile>& files, const std::vector<TreeFile>& tree) {
  auto listed = files.begin();
  for (const TreeFile& file : tree) {
    if (listed != files.end() && listed->path < file.path) break;
    if (listed != files.end() && listed->path == file.path) {
      if (listed->bytes != file.info.bytes) {
        return absl::FailedPreconditionError(absl::StrCat(file.path, ": has ", file.info.bytes,
                                                          " bytes, ", kManifestName, " says ",
                                                          listed->bytes));
      }
      ++listed;
    } else if (file.path != kManifestName && file.path != kChecksumsName) {
      return absl::FailedPreconditionError(absl::StrCat(
          file.path, ": is not listed in ", kManifestName, " (versions are never added to)"));
    }
  }
  if (listed != files.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat(listed->path, ": is listed in ", kManifestName, ", but not there"));
  }
  return absl::OkStatus();
}

}  // namespace modelhost
