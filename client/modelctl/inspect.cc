#include "client/modelctl/inspect.h"

#include <sys/stat.h>

#include <cerrno>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/offline_files.h"
#include "daemon/format/format_reader.h"

namespace modelhost::modelctl {
namespace {

int ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      return 3;
    case absl::StatusCode::kResourceExhausted:
      return 5;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kDataLoss:
      return 6;
    case absl::StatusCode::kPermissionDenied:
      return 9;
    default:
      return 1;
  }
}

// Readers name files relative to the folder of the model; users want the path that they gave.
absl::Status InFolder(const std::string& folder, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(folder, status.message()));
}

absl::StatusOr<std::vector<NamedIndex>> ReadOne(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  const std::string name = path.substr(folder.size());
  OfflineFiles files(folder, name, OfflineFiles::Reach::kModel);
  absl::StatusOr<TensorIndex> index = ReadModel(name, files);
  if (!index.ok()) return InFolder(folder, index.status());
  std::vector<NamedIndex> result;
  result.push_back({name, name, *std::move(index)});
  return result;
}

absl::StatusOr<std::vector<NamedIndex>> ReadFolder(const std::string& path) {
  const std::string folder = path.back() == '/' ? path : path + '/';
  absl::StatusOr<std::vector<std::string>> names = ListFiles(folder);
  if (!names.ok()) return names.status();
  std::vector<Component> components;
  {
    OfflineFiles all(folder, "", OfflineFiles::Reach::kAnywhere);
    absl::StatusOr<std::vector<Component>> found = FindComponents(*names, all);
    if (!found.ok()) return InFolder(folder, found.status());
    components = *std::move(found);
  }
  if (components.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a folder without model files (safetensors and GGUF are looked for)"));
  }
  std::vector<NamedIndex> result;
  for (const Component& component : components) {
    OfflineFiles files(folder, component.main_file, OfflineFiles::Reach::kModel);
    absl::StatusOr<TensorIndex> index = ReadModel(component.main_file, files);
    if (!index.ok()) return InFolder(folder, index.status());
    result.push_back({component.name, component.main_file, *std::move(index)});
  }
  return result;
}

absl::Status Inspect(const std::string& path, const InspectOptions& options, std::ostream& out) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    return StatusOfError(ErrnoError(errno == ENOTDIR ? ENOENT : errno, path), "");
  }
  const bool folder = S_ISDIR(info.st_mode);
  absl::StatusOr<std::vector<NamedIndex>> indexes = folder ? ReadFolder(path) : ReadOne(path);
  if (!indexes.ok()) return indexes.status();
  WriteIndex(path, *indexes, {options.output, options.tensors, options.filter_glob, folder}, out);
  out.flush();
  if (!out) return absl::UnknownError("standard output: cannot write");
  return absl::OkStatus();
}

}  // namespace

int InspectPath(const std::string& path, const InspectOptions& options, std::ostream& out,
                std::ostream& err) {
  absl::Status status;
  try {
    status = Inspect(path, options, out);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        absl::StrCat(path, ": not enough memory for its index (raise the limit of this process)"));
  }
  if (status.ok()) return 0;
  err << "error: " << OneLine(std::string_view(status.message().data(), status.message().size()))
      << '\n';
  return ExitCodeOf(status);
}

}  // namespace modelhost::modelctl
