#include "daemon/store/disk_store.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/computed_manifest.h"
#include "daemon/store/model_toml_edit.h"

namespace modelhost {
namespace {

constexpr char kModels[] = "models";
constexpr char kVersions[] = "versions";
constexpr char kIncoming[] = "incoming";
constexpr char kModelToml[] = "model.toml";
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
constexpr uint64_t kMaxTomlBytes = uint64_t{64} << 10;

// Nothing that time heals, and nothing that is wrong with the version.
absl::Status ViewRefusal(const std::string& what) {
  absl::Status status = absl::FailedPreconditionError(what);
  status.SetPayload(kViewRefusal, absl::Cord("1"));
  return status;
}

std::string Ref(const std::string& model, uint64_t version) {
  return absl::StrCat(model, "@", version);
}

absl::StatusOr<UniqueFd> OpenChecked(Os& os, const UniqueFd& parent, const std::string& name,
                                     const std::string& what, uint32_t own_uid) {
  auto dir = os.OpenDirAt(parent, name);
  if (!dir.ok()) return dir.status();
  auto info = os.Stat(*dir);
  if (!info.ok()) return info.status();
  if (absl::Status good = CheckNode(what, *info, FileKind::kDirectory, own_uid); !good.ok()) {
    return good;
  }
  return dir;
}

absl::StatusOr<bool> SameNode(Os& os, const UniqueFd& a, const UniqueFd& b) {
  auto one = os.Stat(a);
  if (!one.ok()) return one.status();
  auto other = os.Stat(b);
  if (!other.ok()) return other.status();
  return one->device == other->device && one->inode == other->inode;
}

// The store through a read-only mount of it.
absl::StatusOr<UniqueFd> OpenView(Os& os, const std::string& view, const UniqueFd& root_dir,
                                  const std::string& root) {
  const std::string how =
      absl::StrCat(" (mount --bind ", root, " ", view, ", then mount -o remount,bind,ro ", view,
                   "; under systemd BindReadOnlyPaths=", root, ":", view, ")");
  auto dir = os.OpenDir(view);
  if (!dir.ok()) return dir.status();
  auto same = SameNode(os, root_dir, *dir);
  if (!same.ok()) return same.status();
  if (!*same) {
    return absl::FailedPreconditionError(
        absl::StrCat(view, ": is not the store ", root, " seen through another mount", how));
  }
  auto read_only = os.OnReadOnlyMount(*dir);
  if (!read_only.ok()) return read_only.status();
  if (!*read_only) {
    return absl::FailedPreconditionError(
        absl::StrCat(view, ": may be written to: it is no read-only mount", how));
  }
  return dir;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(Os& os, std::string root, std::string state,
                                                   uint32_t own_uid, std::string view) {
  while (root.size() > 1 && root.back() == '/') root.pop_back();
  if (absl::Status made = os.MakeDirs(absl::StrCat(root, "/", kModels), 0700); !made.ok()) {
    return Prefix("store", made);
  }
  // A store that may only be read is served all the same; publishing will say what is wrong.
  (void)os.MakeDirs(absl::StrCat(root, "/", kIncoming), 0700);
  if (absl::Status made = os.MakeDirs(state, 0700); !made.ok()) {
    return Prefix("state directory", made);
  }
  auto root_dir = os.OpenDir(root);
  if (!root_dir.ok()) return Prefix("store", root_dir.status());
  auto info = os.Stat(*root_dir);
  if (!info.ok()) return Prefix("store", info.status());
  if (absl::Status good = CheckNode(root, *info, FileKind::kDirectory, own_uid); !good.ok()) {
    return Prefix("store", good);
  }
  auto state_dir = os.OpenDir(state);
  if (!state_dir.ok()) return Prefix("state directory", state_dir.status());
  UniqueFd view_dir;
  if (!view.empty()) {
    auto opened = OpenView(os, view, *root_dir, root);
    if (!opened.ok()) return Prefix("store view", opened.status());
    view_dir = *std::move(opened);
  }
  return std::make_unique<DiskStore>(os, std::move(root), own_uid, *std::move(root_dir),
                                     *std::move(state_dir), std::move(view), std::move(view_dir));
}

absl::StatusOr<UniqueFd> DiskStore::OpenVersionDir(const UniqueFd& root, const std::string& model,
                                                   uint64_t version) {
  if (absl::Status good = CheckModelName(model); !good.ok()) return good;
  const std::string number = absl::StrCat(version);
  auto models = OpenChecked(os_, root, kModels, kModels, own_uid_);
  if (!models.ok()) return models.status();
  auto missing = [&](absl::Status status) {
    if (!absl::IsNotFound(status)) return status;
    return absl::NotFoundError(absl::StrCat("there is no such version in the store ", root_));
  };
  auto dir = OpenChecked(os_, *models, model, absl::StrCat(kModels, "/", model), own_uid_);
  if (!dir.ok()) return missing(dir.status());
  auto versions = OpenChecked(os_, *dir, kVersions,
                              absl::StrCat(kModels, "/", model, "/", kVersions), own_uid_);
  if (!versions.ok()) return missing(versions.status());
  auto opened = OpenChecked(os_, *versions, number, "its directory", own_uid_);
  if (!opened.ok()) return missing(opened.status());
  return opened;
}

absl::StatusOr<UniqueFd> DiskStore::OpenServedDir(const std::string& model, uint64_t version) {
  auto dir = OpenVersionDir(root_dir_, model, version);
  if (!dir.ok() || !read_only()) return dir;
  auto seen = OpenVersionDir(view_dir_, model, version);
  if (!seen.ok() && !absl::IsNotFound(seen.status())) return seen;
  auto same = seen.ok() ? SameNode(os_, *dir, *seen) : false;
  if (!same.ok()) return same.status();
  // What was mounted below the store after the view was made is in one of them only.
  if (!*same) {
    // Or it was removed or replaced in between.
    auto again = OpenVersionDir(root_dir_, model, version);
    if (!again.ok()) return again.status();
    auto stayed = SameNode(os_, *dir, *again);
    if (!stayed.ok()) return stayed.status();
    if (!*stayed) {
      return absl::UnavailableError("its directory: was replaced a moment ago (try again)");
    }
    return ViewRefusal(
        absl::StrCat("its directory: is not the same in ", root_, " and in the store view ", view_,
                     " (restart the daemon after mounting anything below the store)"));
  }
  return seen;
}

absl::Status DiskStore::CheckReadOnly(const std::vector<TreeFile>& tree) {
  for (const TreeFile& file : tree) {
    auto read_only = os_.OnReadOnlyMount(file.fd);
    if (!read_only.ok()) return read_only.status();
    if (!*read_only) {
      return ViewRefusal(
          absl::StrCat(file.path, ": is not on a read-only mount in the store view ", view_,
                       " (restart the daemon after mounting anything below the store)"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> DiskStore::ReadManifest(const TreeFile& file, const std::string& model,
                                                 uint64_t version) {
  auto text = ReadSmallFile(os_, file.fd, kManifestName, kMaxManifestBytes);
  if (!text.ok()) return text.status();
  auto manifest = ParseManifest(*text);
  if (!manifest.ok()) return manifest.status();
  if (manifest->model != model || manifest->version != version) {
    return absl::FailedPreconditionError(
        absl::StrCat(kManifestName, ": is that of ", Ref(manifest->model, manifest->version),
                     " (remove it to have one made for this version)"));
  }
  return manifest;
}

absl::Status DiskStore::CheckChecksums(const std::vector<TreeFile>& tree,
                                       const Manifest& manifest) {
  const TreeFile* file = FindInTree(tree, kChecksumsName);
  if (file == nullptr) return absl::OkStatus();
  auto text = ReadSmallFile(os_, file->fd, kChecksumsName, kMaxManifestBytes);
  if (!text.ok()) return text.status();
  auto checksums = ParseChecksums(*text);
  if (!checksums.ok()) return checksums.status();
  return CheckAgainst(*checksums, manifest.files);
}

absl::StatusOr<ComputedManifest> DiskStore::Compute(
    const std::string& model, uint64_t version, const UniqueFd& dir,
    const std::vector<TreeFile>& tree, const std::function<bool(uint64_t bytes_done)>& progress,
    bool* just_hashed) {
  *just_hashed = false;
  auto before = LoadComputedManifest(os_, state_dir_, model, version);
  if (before.ok() && before->Fits(tree)) return before;
  auto info = os_.Stat(dir);
  if (!info.ok()) return info.status();
  auto computed =
      ComputeManifest(os_, model, version, absl::FromUnixNanos(info->mtime_ns), tree, progress);
  // Not kept: the next load reads the files again, and nothing else is lost.
  if (computed.ok()) (void)SaveComputedManifest(os_, state_dir_, *computed);
  *just_hashed = computed.ok();
  return computed;
}

absl::StatusOr<VersionFiles> DiskStore::OpenVersion(
    const std::string& model, uint64_t version,
    const std::function<bool(uint64_t bytes_done)>& progress) {
  const std::string ref = Ref(model, version);
  auto dir = OpenServedDir(model, version);
  if (!dir.ok()) return Prefix(ref, dir.status());
  auto tree = ReadTree(os_, *dir, own_uid_, /*open_files=*/true);
  if (!tree.ok()) return Prefix(ref, tree.status());
  if (read_only()) {
    if (absl::Status good = CheckReadOnly(*tree); !good.ok()) return Prefix(ref, good);
  }

  VersionFiles files;
  if (const TreeFile* file = FindInTree(*tree, kManifestName); file != nullptr) {
    auto manifest = ReadManifest(*file, model, version);
    if (!manifest.ok()) return Prefix(ref, manifest.status());
    files.manifest = std::make_shared<const Manifest>(*std::move(manifest));
  } else {
    auto computed = Compute(model, version, *dir, *tree, progress, &files.just_hashed);
    if (!computed.ok()) return Prefix(ref, computed.status());
    files.manifest = std::make_shared<const Manifest>(std::move(computed->manifest));
    files.computed = true;
  }
  if (absl::Status match = MatchTree(files.manifest->files, *tree); !match.ok()) {
    return Prefix(ref, match);
  }
  if (absl::Status agree = CheckChecksums(*tree, *files.manifest); !agree.ok()) {
    return Prefix(ref, agree);
  }
  auto listed = files.manifest->files.begin();
  for (TreeFile& file : *tree) {
    if (listed == files.manifest->files.end() || file.path != listed->path) continue;
    files.files.push_back(std::move(file.fd));
    files.infos.push_back(file.info);
    ++listed;
  }
  files.dir = *std::move(dir);
  return files;
}

absl::StatusOr<Manifest> DiskStore::RecordedManifest(const std::string& model, uint64_t version) {
  auto dir = OpenVersionDir(root_dir_, model, version);
  if (!dir.ok()) return Prefix(Ref(model, version), dir.status());
  TreeFile file;
  auto fd = os_.OpenFileAt(*dir, kManifestName);
  if (absl::IsNotFound(fd.status())) {
    auto computed = LoadComputedManifest(os_, state_dir_, model, version);
    if (!computed.ok()) return Prefix(Ref(model, version), computed.status());
    return computed->manifest;
  }
  if (!fd.ok()) return Prefix(Ref(model, version), fd.status());
  file.fd = *std::move(fd);
  auto manifest = ReadManifest(file, model, version);
  if (!manifest.ok()) return Prefix(Ref(model, version), manifest.status());
  return manifest;
}

absl::Status DiskStore::SetResidency(const std::string& model, Residency residency) {
  if (absl::Status good = CheckModelName(model); !good.ok()) return good;
  auto models = OpenChecked(os_, root_dir_, kModels, kModels, own_uid_);
  if (!models.ok()) return models.status();
  const absl::Status made = os_.MakeDirAt(*models, model, 0700);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  auto dir = OpenChecked(os_, *models, model, absl::StrCat(kModels, "/", model), own_uid_);
  if (!dir.ok()) return dir.status();
  auto text = ReadSmallFileAt(os_, *dir, kModelToml, kMaxTomlBytes);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  auto edited =
      WithResidency(text.ok() ? *text : "",
                    absl::StrCat(root_, "/", kModels, "/", model, "/", kModelToml), residency);
  if (!edited.ok()) return edited.status();
  if (text.ok() && *edited == *text) return absl::OkStatus();
  return ReplaceFileAt(os_, *dir, kModelToml, 0644, *edited);
}

std::vector<std::string> DiskStore::WatchPaths() {
  const std::string models = absl::StrCat(root_, "/", kModels);
  std::vector<std::string> paths = {models};
  auto dir = os_.OpenDirAt(root_dir_, kModels);
  if (!dir.ok()) return paths;
  auto entries = os_.ListDir(*dir);
  if (!entries.ok()) return paths;
  for (const DirEntry& entry : *entries) {
    if (entry.kind != FileKind::kDirectory || !CheckModelName(entry.name).ok()) continue;
    // A model without versions/ yet is watched itself, to see it come.
    auto versions = os_.StatAt(*dir, absl::StrCat(entry.name, "/", kVersions));
    const bool there = versions.ok() && versions->kind == FileKind::kDirectory;
    paths.push_back(
        absl::StrCat(models, "/", entry.name, there ? "/" : "", there ? kVersions : ""));
  }
  return paths;
}

std::vector<std::string> DiskStore::Ignored() {
  absl::MutexLock lock(&mutex_);
  return ignored_;
}

std::vector<Store::Location> DiskStore::FindFiles(const Digest& digest, uint64_t bytes) {
  bool scanned = false;
  {
    absl::MutexLock lock(&mutex_);
    scanned = scanned_;
  }
  if (!scanned) (void)Scan();  // Without an index nothing is found, which costs space only.
  absl::MutexLock lock(&mutex_);
  std::vector<Location> found;
  const auto it = by_digest_.find(digest);
  if (it == by_digest_.end()) return found;
  for (const auto& [id, file] : it->second) {
    if (file->bytes != bytes) continue;
    Location location;
    location.dir = absl::StrCat(kModels, "/", id.first, "/", kVersions, "/", id.second);
    const size_t slash = file->path.rfind('/');
    if (slash != std::string::npos) {
      absl::StrAppend(&location.dir, "/", file->path.substr(0, slash));
      location.name = file->path.substr(slash + 1);
    } else {
      location.name = file->path;
    }
    found.push_back(std::move(location));
  }
  return found;
}

void DiskStore::ForgetVersion(const std::string& model, const std::string& version) {
  const auto number = ParseVersionNumber(version);
  if (!number.ok()) return;
  absl::MutexLock lock(&mutex_);
  ++changes_;
  known_.erase({model, *number});
  IndexFiles();
}

void DiskStore::AddPublished(const Manifest& manifest) {
  absl::MutexLock lock(&mutex_);
  known_[{manifest.model, manifest.version}] =
      Known{std::nullopt, WithoutChunks(manifest), ++changes_};
  IndexFiles();
}

void DiskStore::IndexFiles() {
  by_digest_.clear();
  for (const auto& [id, known] : known_) {
    for (const ManifestFile& file : known.manifest->files) {
      by_digest_[file.sha256].emplace_back(id, &file);
    }
  }
}

std::shared_ptr<const Manifest> DiskStore::WithoutChunks(Manifest manifest) {
  for (ManifestFile& file : manifest.files) {
    file.chunks.clear();
    file.chunks.shrink_to_fit();
  }
  return std::make_shared<const Manifest>(std::move(manifest));
}

std::shared_ptr<const Manifest> DiskStore::FindKnown(const VersionId& id,
                                                     const FileIdentity& file) {
  absl::MutexLock lock(&mutex_);
  const auto it = known_.find(id);
  if (it == known_.end() || !it->second.file.has_value() || !(*it->second.file == file)) {
    return nullptr;
  }
  return it->second.manifest;
}

}  // namespace modelhost
