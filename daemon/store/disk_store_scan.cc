// DiskStore::Scan: what is there, and what is wrong with it. Reads directories and manifests, never
// weights.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/computed_manifest.h"
#include "daemon/store/disk_store.h"

namespace modelhost {
namespace {

constexpr uint64_t kMaxPolicyBytes = uint64_t{64} << 10;

}  // namespace

absl::StatusOr<std::vector<ScannedModel>> DiskStore::Scan() {
  uint64_t began_at = 0;
  {
    absl::MutexLock lock(&mutex_);
    began_at = changes_;
  }
  auto models = os_.OpenDirAt(root_dir_, "models");
  if (!models.ok()) return Prefix("store", models.status());
  auto entries = os_.ListDir(*models);
  if (!entries.ok()) return Prefix("store", entries.status());

  std::vector<ScannedModel> scanned;
  std::vector<std::string> ignored;
  KnownVersions known;
  for (const DirEntry& entry : *entries) {
    if (const absl::Status name = CheckModelName(entry.name); !name.ok()) {
      ignored.push_back(absl::StrCat("models/", Quoted(entry.name), ": ", name.message()));
    } else if (entry.kind != FileKind::kDirectory) {
      ignored.push_back(absl::StrCat("models/", entry.name, ": is not a directory"));
    } else {
      scanned.push_back(ScanModel(*models, entry.name, known));
    }
  }

  absl::MutexLock lock(&mutex_);
  for (auto& [id, version] : known_) {
    // Published while the scan was under way, which may have missed it.
    if (version.added_at > began_at) known.try_emplace(id, std::move(version));
  }
  known_ = std::move(known);
  IndexFiles();
  ignored_ = std::move(ignored);
  scanned_ = true;
  return scanned;
}

void DiskStore::ScanPolicy(const UniqueFd& dir, ScannedModel& model) {
  const std::string path = absl::StrCat(root_, "/models/", model.name, "/model.toml");
  auto file = os_.OpenFileAt(dir, "model.toml");
  if (absl::IsNotFound(file.status())) return;
  absl::Status read = file.status();
  if (read.ok()) {
    auto info = os_.Stat(*file);
    read = info.ok() ? CheckNode(path, *info, FileKind::kRegular, own_uid_) : info.status();
  }
  if (read.ok()) {
    auto text = ReadSmallFile(os_, *file, path, kMaxPolicyBytes);
    read = text.status();
    if (read.ok()) {
      auto policy = ParseModelToml(*text, path);
      read = policy.status();
      if (read.ok()) model.policy = *std::move(policy);
    }
  }
  if (!read.ok()) model.policy_error = std::string(read.message());
}

ScannedModel DiskStore::ScanModel(const UniqueFd& models, const std::string& name,
                                  KnownVersions& known) {
  ScannedModel model;
  model.name = name;
  auto fail = [&](const absl::Status& why) {
    model.versions_error = std::string(why.message());
    return model;
  };
  // Until model.toml has been looked for, nobody knows what it says.
  model.policy_error = absl::StrCat("models/", name, ": could not be read");
  auto dir = os_.OpenDirAt(models, name);
  if (!dir.ok()) return fail(dir.status());
  auto info = os_.Stat(*dir);
  if (!info.ok()) return fail(info.status());
  const std::string what = absl::StrCat("models/", name);
  if (absl::Status good = CheckNode(what, *info, FileKind::kDirectory, own_uid_); !good.ok()) {
    return fail(good);
  }
  model.policy_error.clear();
  ScanPolicy(*dir, model);

  auto versions = os_.OpenDirAt(*dir, "versions");
  if (absl::IsNotFound(versions.status())) return model;
  if (!versions.ok()) return fail(versions.status());
  info = os_.Stat(*versions);
  if (!info.ok()) return fail(info.status());
  if (absl::Status good =
          CheckNode(absl::StrCat(what, "/versions"), *info, FileKind::kDirectory, own_uid_);
      !good.ok()) {
    return fail(good);
  }
  auto entries = os_.ListDir(*versions);
  if (!entries.ok()) return fail(entries.status());
  for (const DirEntry& entry : *entries) {
    model.versions.push_back(ScanVersion(*versions, name, entry, known));
  }
  std::stable_sort(model.versions.begin(), model.versions.end(),
                   [](const ScannedVersion& a, const ScannedVersion& b) {
                     return a.number - 1 < b.number - 1;  // 0, no number, comes last.
                   });
  return model;
}

ScannedVersion DiskStore::ScanVersion(const UniqueFd& versions, const std::string& model,
                                      const DirEntry& entry, KnownVersions& known) {
  ScannedVersion version;
  version.name = ToUtf8(entry.name);
  auto number = ParseVersionNumber(entry.name);
  if (!number.ok()) {
    version.invalid = std::string(number.status().message());
    return version;
  }
  version.number = *number;
  auto fail = [&](const absl::Status& why) {
    version.invalid = std::string(why.message());
    return version;
  };
  auto info = os_.StatAt(versions, entry.name);
  if (!info.ok()) return fail(info.status());
  absl::Status good = CheckNode(entry.name, *info, FileKind::kDirectory, own_uid_);
  if (!good.ok()) return fail(good);
  auto dir = os_.OpenDirAt(versions, entry.name);
  if (!dir.ok()) return fail(dir.status());
  version.created = absl::FromUnixNanos(info->mtime_ns);
  good = ScanFiles(*dir, model, version, known);
  return good.ok() ? version : fail(good);
}

absl::Status DiskStore::ScanFiles(const UniqueFd& dir, const std::string& model,
                                  ScannedVersion& version, KnownVersions& known) {
  auto tree = ReadTree(os_, dir, own_uid_, /*open_files=*/false);
  if (!tree.ok()) return tree.status();
  const TreeFile* file = FindInTree(*tree, kManifestName);
  if (file == nullptr) {
    if (tree->empty()) return absl::FailedPreconditionError("the directory has no files");
    for (const TreeFile& entry : *tree) version.bytes += entry.info.bytes;
    auto computed = LoadComputedManifest(os_, state_dir_, model, version.number);
    if (computed.ok() && computed->Fits(*tree)) version.digest = computed->manifest.digest;
    return absl::OkStatus();
  }
  const VersionId id(model, version.number);
  const FileIdentity identity = IdentityOf(file->info);
  std::shared_ptr<const Manifest> manifest = FindKnown(id, identity);
  if (manifest == nullptr) {
    TreeFile opened;
    opened.info = file->info;
    auto fd = os_.OpenFileAt(dir, kManifestName);
    if (!fd.ok()) return fd.status();
    opened.fd = *std::move(fd);
    auto read = ReadManifest(opened, model, version.number);
    if (!read.ok()) return read.status();
    manifest = WithoutChunks(*std::move(read));
  }
  version.digest = manifest->digest;
  version.bytes = manifest->TotalBytes();
  version.created = manifest->created;
  version.manifest = manifest;
  if (absl::Status match = MatchTree(manifest->files, *tree); !match.ok()) return match;
  known[id] = Known{identity, std::move(manifest), 0};
  return absl::OkStatus();
}

}  // namespace modelhost
