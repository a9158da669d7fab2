#include "daemon/region/version_contents.h"

#include <cerrno>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/chunk_pass.h"

namespace modelhost {
namespace {

class MappedFiles final : public FileSource {
 public:
  MappedFiles(const Manifest& manifest, std::span<const std::span<const std::byte>> files)
      : files_(files) {
    for (uint32_t i = 0; i < manifest.files.size(); ++i) numbers_[manifest.files[i].path] = i;
  }

  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    const auto number = NumberOf(name);
    if (!number.ok()) return number.status();
    return files_[*number];
  }

  absl::StatusOr<uint32_t> NumberOf(const std::string& name) const {
    const auto found = numbers_.find(name);
    if (found == numbers_.end()) {
      return absl::NotFoundError(absl::StrCat(name, ": the version has no such file"));
    }
    return found->second;
  }

 private:
  const std::span<const std::span<const std::byte>> files_;
  std::unordered_map<std::string, uint32_t> numbers_;
};

// Adds one component's tensors to the totals, and their regions to `eager`.
absl::Status Account(const TensorIndex& index, const MappedFiles& source,
                     std::span<const std::span<const std::byte>> files,
                     std::span<const uint32_t> regions, std::vector<bool>& seen,
                     VersionContents& contents) {
  std::vector<uint32_t> numbers;
  for (const std::string& name : index.files()) {
    const auto number = source.NumberOf(name);
    if (!number.ok()) return number.status();
    numbers.push_back(*number);
  }
  for (size_t i = 0; i < index.size(); ++i) {
    const TensorInfo tensor = index.at(i);
    const uint32_t file = numbers[tensor.file];
    const uint64_t file_bytes = files[file].size();
    // Readers check this; clients rely on it, so it is checked where the bytes are known as well.
    if (tensor.offset > file_bytes || tensor.nbytes > file_bytes - tensor.offset) {
      return absl::InvalidArgumentError(
          absl::StrCat(index.files()[tensor.file], ": tensor ", std::string(tensor.name),
                       " ends after the file's ", file_bytes, " bytes"));
    }
    contents.tensor_bytes += tensor.nbytes;
    const uint32_t region = regions[file];
    if (seen[region]) continue;
    seen[region] = true;
    contents.eager.push_back(region);
  }
  contents.tensor_count += index.size();
  return absl::OkStatus();
}

absl::StatusOr<VersionContents> Read(const Manifest& manifest, MappedFiles& source,
                                     std::span<const std::span<const std::byte>> files,
                                     std::span<const uint32_t> regions) {
  std::vector<std::string> names;
  for (const ManifestFile& file : manifest.files) names.push_back(file.path);
  auto components = FindComponents(names, source);
  if (!components.ok()) return components.status();
  VersionContents contents;
  std::vector<bool> seen(manifest.files.size());
  for (const Component& component : *components) {
    auto index = ReadModel(component.main_file, source);
    if (!index.ok()) return index.status();
    if (auto added = Account(*index, source, files, regions, seen, contents); !added.ok()) {
      return added;
    }
    for (const std::string& warning : index->warnings()) contents.warnings.push_back(warning);
    if (contents.format.empty()) {
      contents.format = index->format();
    } else if (contents.format != index->format()) {
      contents.format = "mixed";
    }
    contents.components.push_back({component.name, *std::move(index)});
  }
  if (contents.components.empty()) {
    contents.warnings.push_back(
        "no file of the version is a known weight format: it has no tensors");
  }
  return contents;
}

}  // namespace

absl::StatusOr<VersionContents> ReadContents(const Manifest& manifest, const std::string& where,
                                             std::span<const std::span<const std::byte>> files,
                                             std::span<const uint32_t> regions) {
  MappedFiles source(manifest, files);
  const SigbusGuard guard(std::vector<std::span<const std::byte>>(files.begin(), files.end()));
  auto contents = Read(manifest, source, files, regions);
  // Zeros that stood in for lost bytes may have been parsed as anything.
  if (guard.hit()) {
    // EIO: the disk's fault or a writer's, and gone when they are; the bytes may be good.
    return ErrnoStatus(
        EIO, absl::StrCat(where, ": a file failed, or was truncated, while it was indexed"));
  }
  if (!contents.ok()) return AtPath(contents.status(), where);
  return contents;
}

}  // namespace modelhost
