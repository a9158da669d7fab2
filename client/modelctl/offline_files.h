// The files of a model on this disk, for commands that work without a daemon.
//
// Only regular files are opened, and without blocking: a folder, a FIFO or a device is refused at
// once. Links are followed as far as source_reach.h says. A main file that the user named himself
// may lie anywhere, and then its siblings may lie where it really lies. Hard links are fine.
//
// Error texts start with the name that was asked for. Not thread-safe. The bytes of Open live until
// Unmap, and truncating a file meanwhile raises SIGBUS in their reader; ReadAt has no such trap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/modelctl/exit_codes.h"
#include "client/modelctl/range_source.h"
#include "client/modelctl/source_reach.h"
#include "daemon/format/format_reader.h"
#include "proto/handle/error.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

// Error and Status share the canonical codes. The text becomes "WHAT: TEXT".
absl::Status StatusOfError(const Error& error, const std::string& what);

// The code that a verb without a daemon ends with: 3 not found, 4 exists, 5 out of memory, disk,
// descriptors or the like, 6 malformed or refused, 9 no permission, 130 cancelled, 1 anything else.
ExitCode OfflineExitCode(const absl::Status& status);

class OfflineFiles : public FileSource, public RangeSource {
 public:
  enum class Reach {
    kFolder,  // The user named the folder.
    kFile,    // The user named the main file.
  };

  // `folder` is "" for the current one. `main` is relative to it.
  OfflineFiles(std::string folder, std::string main, Reach reach);

  //   NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED  from the system
  //   FAILED_PRECONDITION  not a regular file, or a link that leads out of the model
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override;
  // As Open. The file that was read last stays open.
  absl::StatusOr<uint64_t> SizeOf(const std::string& name) override;
  absl::Status ReadAt(const std::string& name, uint64_t offset, std::span<std::byte> to) override;
  // Ends the life of all that Open gave.
  void Unmap() { mappings_.clear(); }

  // Where a file of the model lies, for the system.
  std::string PathOf(const std::string& name) const { return folder_ + name; }

 private:
  struct OpenFile {
    UniqueFd fd;
    uint64_t bytes = 0;
  };
  absl::StatusOr<OpenFile> OpenRegular(const std::string& name);
  absl::StatusOr<ReadOnlyMapping> Map(const std::string& name);
  absl::Status Turn(const std::string& name);
  absl::Status CheckReach(const std::string& name, const std::string& real_path);

  std::string folder_;
  std::string main_;
  Reach reach_;
  SourceReach in_reach_;
  std::map<std::string, ReadOnlyMapping> mappings_;
  std::string current_name_;  // Of current_.
  OpenFile current_;
};

// Names of the regular files below `folder`, relative to it, sorted; hidden ones are left out,
// links to folders not entered. RESOURCE_EXHAUSTED when there are more than a model could have.
absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& folder);

}  // namespace modelhost::modelctl
