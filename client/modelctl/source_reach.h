// Where links may lead on the source side of publish, import and inspect: to files of the folder
// itself, or, when the folder lies in a snapshot of a download cache, to the blobs of that cache
// (models--x/snapshots/REVISION/model.safetensors is a link into models--x/blobs/). Nowhere else. A
// blobs/, or a snapshot, that is itself a link is not the cache's and reaches nothing.
//
// One thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace modelhost::modelctl {

class SourceReach {
 public:
  // Nothing is in reach.
  SourceReach() = default;
  // `folder` as the user gave it; "" is the current one. One that is not there reaches nothing.
  explicit SourceReach(const std::string& folder);

  // `real_path` has no link in it.
  bool Holds(const std::string& real_path) const;
  // A real folder that counts as well.
  void Add(const std::string& real_folder);
  // The real folders, each with a '/' at its end.
  const std::vector<std::string>& folders() const { return folders_; }

 private:
  std::vector<std::string> folders_;
};

// The path of what the user means by `path`: of a download cache's folder of one model (blobs/ and
// snapshots/, and refs/ in which main names a snapshot) the snapshot's folder; any other path as it
// is. FAILED_PRECONDITION when no snapshot is the one that is meant (the text lists them), or it is
// a link.
absl::StatusOr<std::string> ResolveSnapshot(const std::string& path);

}  // namespace modelhost::modelctl
