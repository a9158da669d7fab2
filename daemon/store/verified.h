// <state>/verified.json: which files were read and hashed in full, so that a restart need not
// again. Keyed by (device, inode, bytes, mtime, ctime); a changed file is simply not in it. A
// broken or missing record is an empty one: it only costs a read. Thread-safe; Record does not
// block on disk, Save does.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/platform/os.h"
#include "daemon/store/digest.h"

namespace modelhost {

class VerifiedFiles {
 public:
  static std::unique_ptr<VerifiedFiles> Load(Os& os, const UniqueFd& state_dir);
  virtual ~VerifiedFiles() = default;
  virtual std::optional<Digest> Find(const FileInfo& info) = 0;
  virtual void Record(const FileInfo& info, const Digest& digest) = 0;
  virtual void Forget(const FileInfo& info) = 0;
  // How many of the records are of none of `files`; forgets those, unless it is only asked.
  virtual size_t ForgetOthers(const std::vector<FileInfo>& files, bool only_count) = 0;
  // Writes it if it changed (rename). `state_dir` as in Load.
  virtual absl::Status Save(const UniqueFd& state_dir) = 0;
};

}  // namespace modelhost
