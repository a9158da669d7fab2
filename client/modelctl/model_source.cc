#include "client/modelctl/model_source.h"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/source_reach.h"
#include "daemon/format/format_reader.h"

namespace modelhost::modelctl {
namespace {

// Readers name files relative to the folder of the model; users want the path that they gave.
absl::Status InFolder(const std::string& folder, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(folder, status.message()));
}

absl::Status AddModel(const std::string& folder, const Component& component,
                      OfflineFiles::Reach reach, ModelSource& source) {
  auto files = std::make_unique<OfflineFiles>(folder, component.main_file, reach);
  absl::StatusOr<TensorIndex> index = ReadModel(component.main_file, *files);
  if (!index.ok()) return InFolder(folder, index.status());
  source.models.push_back(
      {{component.name, component.main_file, *std::move(index)}, std::move(files)});
  return absl::OkStatus();
}

absl::Status AddFolder(ModelSource& source) {
  const std::string folder = source.path.back() == '/' ? source.path : source.path + '/';
  absl::StatusOr<std::vector<std::string>> names = ListFiles(folder);
  if (!names.ok()) return names.status();
  std::vector<Component> components;
  {
    OfflineFiles all(folder, "", OfflineFiles::Reach::kFolder);
    absl::StatusOr<std::vector<Component>> found = FindComponents(*names, all);
    if (!found.ok()) return InFolder(folder, found.status());
    components = *std::move(found);
  }
  if (components.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source.path,
                     ": a folder without model files (none of its files has the content or the "
                     "name of weights)"));
  }
  for (const Component& component : components) {
    if (absl::Status status = AddModel(folder, component, OfflineFiles::Reach::kFolder, source);
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelSource> OpenModelSource(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    return StatusOfError(ErrnoError(errno == ENOTDIR ? ENOENT : errno, path), "");
  }
  ModelSource source;
  source.folder = S_ISDIR(info.st_mode);
  if (source.folder) {
    absl::StatusOr<std::string> resolved = ResolveSnapshot(path);
    if (!resolved.ok()) return resolved.status();
    source.path = *std::move(resolved);
    if (absl::Status status = AddFolder(source); !status.ok()) return status;
    return source;
  }
  source.path = path;
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  const std::string name = path.substr(folder.size());
  if (absl::Status status = AddModel(folder, {name, name}, OfflineFiles::Reach::kFile, source);
      !status.ok()) {
    return status;
  }
  return source;
}

}  // namespace modelhost::modelctl
