// The weight sets behind a path that a user gave: of a file the one that it is or belongs to, of a
// folder all that are in it, of a download cache those of its snapshot.
//
// Errors name the path as it was given; the codes are those of ReadModel and OfflineFiles, and
// INVALID_ARGUMENT for a folder without weights. The bytes live as long as the model does. Not
// thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/modelctl/index_render.h"
#include "client/modelctl/offline_files.h"

namespace modelhost::modelctl {

struct SourceModel {
  NamedIndex named;
  std::unique_ptr<OfflineFiles> files;  // For the names of named.index.files().
};

struct ModelSource {
  std::string path;     // What was read: the path given, or the snapshot that it stands for.
  bool folder = false;  // Then there may be more than one model.
  std::vector<SourceModel> models;
};

absl::StatusOr<ModelSource> OpenModelSource(const std::string& path);

}  // namespace modelhost::modelctl
