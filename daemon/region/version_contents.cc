#include "daemon/region/version_contents.h"

#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/region/chunk_pass.h"

namespace modelhost {
namespace {

using Numbers = std::unordered_map<std::string, uint32_t>;

// Adds one component's tensors to the totals, and their regions to `eager`.
absl::Status Account(const TensorIndex& index, const Numbers& known,
                     const std::vector<ContentsIndexer::File>& files,
                     std::span<const uint32_t> regions, std::vector<bool>& seen,
                     VersionContents& contents) {
  std::vector<uint32_t> numbers;
  for (const std::string& name : index.files()) {
    const auto number = known.find(name);
    if (number == known.end()) {
      return absl::NotFoundError(absl::StrCat(name, ": the version has no such file"));
    }
    numbers.push_back(number->second);
  }
  for (size_t i = 0; i < index.size(); ++i) {
    const TensorInfo tensor = index.at(i);
    const uint32_t file = numbers[tensor.file];
    const uint64_t file_bytes = files[file].bytes.size();
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

absl::StatusOr<VersionContents> Read(ContentsIndexer& indexer,
                                     const std::vector<ContentsIndexer::File>& files,
                                     std::span<const uint32_t> regions, const CancelToken& cancel) {
  Numbers numbers;
  for (uint32_t i = 0; i < files.size(); ++i) numbers[files[i].name] = i;
  auto components = indexer.Index(files, cancel);
  if (!components.ok()) return components.status();
  VersionContents contents;
  contents.components = *std::move(components);
  std::vector<bool> seen(files.size());
  for (const ComponentIndex& component : contents.components) {
    const TensorIndex& index = component.index;
    if (auto added = Account(index, numbers, files, regions, seen, contents); !added.ok()) {
      return added;
    }
    for (const std::string& warning : index.warnings()) contents.warnings.push_back(warning);
    if (contents.format.empty()) {
      contents.format = index.format();
    } else if (contents.format != index.format()) {
      contents.format = "mixed";
    }
  }
  if (contents.components.empty()) {
    contents.warnings.push_back(
        "no file of the version is a known weight format: it has no tensors");
  }
  return contents;
}

}  // namespace

absl::StatusOr<VersionContents> ReadContents(const std::string& where, ContentsIndexer& indexer,
                                             const std::vector<ContentsIndexer::File>& files,
                                             std::span<const uint32_t> regions,
                                             const CancelToken& cancel) {
  auto contents = Read(indexer, files, regions, cancel);
  if (!contents.ok()) return AtPath(contents.status(), where);
  return contents;
}

}  // namespace modelhost
