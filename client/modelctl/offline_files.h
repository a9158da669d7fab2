// The files of a model on this disk, for commands that work without a daemon.
//
// Only regular files are opened, and without blocking: a folder, a FIFO or a device is refused at
// once. Links are followed, but a file beside the main one must really lie in the folder that was
// given, or in the folder where the main file really lies (a download cache links both into one
// folder of blobs). Hard links are fine.
//
// Error texts start with the name that was asked for. Not thread-safe. The bytes live as long as
// this object; truncating a file meanwhile raises SIGBUS in the reader.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"
#include "proto/handle/error.h"
#include "proto/handle/mapping.h"

namespace modelhost::modelctl {

// Error and Status share the canonical codes. The text becomes "WHAT: TEXT".
absl::Status StatusOfError(const Error& error, const std::string& what);

class OfflineFiles : public FileSource {
 public:
  enum class Reach {
    kModel,     // As above.
    kAnywhere,  // Links may lead anywhere: to look at what a folder holds, main file by main file.
  };

  // `folder` is "" for the current one. `main` is relative to it.
  OfflineFiles(std::string folder, std::string main, Reach reach);

  //   NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED  from the system
  //   FAILED_PRECONDITION  not a regular file, or a link that leads out of the model
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override;

 private:
  absl::StatusOr<ReadOnlyMapping> Map(const std::string& name);
  absl::Status CheckReach(const std::string& name, const std::string& real_path);

  std::string folder_;
  std::string main_;
  Reach reach_;
  std::vector<std::string> roots_;  // Real folders, each with a '/' at its end.
  std::map<std::string, ReadOnlyMapping> mappings_;
};

// Names of the regular files below `folder`, relative to it, sorted; hidden ones are left out,
// links to folders not entered. RESOURCE_EXHAUSTED when there are more than a model could have.
absl::StatusOr<std::vector<std::string>> ListFiles(const std::string& folder);

}  // namespace modelhost::modelctl
