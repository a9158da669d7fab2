// A version directory as it is on disk, never trusted: kinds, owners, modes and names are checked.
//
// Errors name the path inside the version: FAILED_PRECONDITION (a symlink, a device, a mode, an
// owner, a file too many or missing or of another size), INVALID_ARGUMENT (a name). Blocking.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"
#include "daemon/store/manifest.h"

namespace modelhost {

struct TreeFile {
  std::string path;
  FileInfo info;
  UniqueFd fd;  // Open for reading, if that was asked for.
};

// Nobody but `own_uid` or root can change what `info` describes, and it is of that kind.
absl::Status CheckNode(absl::string_view what, const FileInfo& info, FileKind kind,
                       uint32_t own_uid);

// Every file below `dir`, sorted by path.
absl::StatusOr<std::vector<TreeFile>> ReadTree(Os& os, const UniqueFd& dir, uint32_t own_uid,
                                               bool open_files);

const TreeFile* FindInTree(const std::vector<TreeFile>& tree, absl::string_view path);

// The tree has the files listed (sorted by path), in their sizes, and no others beside
// manifest.json and checksums.sha256.
absl::Status MatchTree(const std::vector<ManifestFile>& files, const std::vector<TreeFile>& tree);

}  // namespace modelhost
