#include "daemon/store/publish.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/incoming.h"
#include "daemon/store/staging.h"

namespace modelhost {
namespace {

constexpr uint64_t kLargestFile = std::numeric_limits<int64_t>::max();
// For the manifest and the file system's own: a digest is 70 bytes of JSON per chunk.
constexpr uint64_t kOverheadPerVersion = uint64_t{1} << 20;
constexpr uint64_t kOverheadPerFile = 8192;
constexpr uint64_t kOverheadPerChunk = 128;

absl::StatusOr<uint64_t> BytesNeeded(const std::vector<PublishFile>& files) {
  uint64_t need = kOverheadPerVersion;
  for (const PublishFile& file : files) {
    if (file.bytes > kLargestFile / 2 - need) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, ": the sizes add up to more than any file system holds"));
    }
    need += file.bytes + kOverheadPerFile + file.bytes / kChunkBytes * kOverheadPerChunk;
  }
  return need;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StagedVersion>> Publisher::Stage(
    const std::string& model, uint64_t version, const std::vector<PublishFile>& files,
    const Requirements& requirements) {
  if (absl::Status name = CheckModelName(model); !name.ok()) return name;
  const std::string ref = absl::StrCat(model, "@", version);
  if (auto number = ParseVersionNumber(absl::StrCat(version)); !number.ok()) return number.status();
  std::vector<std::string> paths;
  for (const PublishFile& file : files) paths.push_back(file.path);
  if (absl::Status names = CheckVersionPaths(std::move(paths)); !names.ok()) {
    return Prefix(ref, names);
  }
  if (requirements.size() > kMostRequirements) {
    return absl::InvalidArgumentError(
        absl::StrCat(ref, ": requires: more than ", kMostRequirements, " keys"));
  }
  for (const auto& [key, value] : requirements) {
    if (absl::Status good = CheckRequirement(key, value); !good.ok()) {
      return Prefix(absl::StrCat(ref, ": requires"), good);
    }
  }
  auto need = BytesNeeded(files);
  if (!need.ok()) return Prefix(ref, need.status());
  auto have = store_.FreeBytes();
  if (!have.ok()) return Prefix(ref, have.status());
  if (*need > *have) {
    return absl::ResourceExhaustedError(
        absl::StrCat(ref, ": needs ", *need, " bytes, the file system of ", store_.root(), " has ",
                     *have, " free (free ", *need - *have, " bytes)"));
  }
  auto staging = Staging::Begin(store_, verified_, model, version, files, requirements);
  if (!staging.ok()) return Prefix(ref, staging.status());
  return std::unique_ptr<StagedVersion>(*std::move(staging));
}

absl::Status Publisher::SweepIncoming() {
  return modelhost::SweepIncoming(store_.os(), store_.root_dir());
}

}  // namespace modelhost
