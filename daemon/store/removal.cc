#include "daemon/store/removal.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/manifest.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr int kMostDepth = 32;
constexpr char kDeleted[] = ".deleted";
constexpr char kManifestsDir[] = "manifests";
constexpr size_t kMostShared = 256;  // Descriptors at one time.

using OnFile =
    std::function<void(const UniqueFd& dir, const std::string& name, const FileInfo& info)>;

// Every file below, whatever its kind and mode: this is about what lies there.
absl::Status Walk(Os& os, const UniqueFd& dir, const OnFile& on_file, int depth = 0) {
  if (depth > kMostDepth) {
    return absl::FailedPreconditionError(absl::StrCat("over ", kMostDepth, " directories deep"));
  }
  auto entries = os.ListDir(dir);
  if (!entries.ok()) return entries.status();
  for (const DirEntry& entry : *entries) {
    if (entry.kind == FileKind::kDirectory) {
      auto below = os.OpenDirAt(dir, entry.name);
      if (!below.ok()) return below.status();
      if (absl::Status walked = Walk(os, *below, on_file, depth + 1); !walked.ok()) return walked;
      continue;
    }
    auto info = os.StatAt(dir, entry.name);
    if (!info.ok()) return info.status();
    on_file(dir, entry.name, *info);
  }
  return absl::OkStatus();
}

// Of a directory, or of a single file that lies in a directory's place.
absl::Status WalkAt(Os& os, const UniqueFd& parent, const std::string& name,
                    const OnFile& on_file) {
  auto info = os.StatAt(parent, name);
  if (!info.ok()) return info.status();
  if (info->kind != FileKind::kDirectory) {
    on_file(parent, name, *info);
    return absl::OkStatus();
  }
  auto dir = os.OpenDirAt(parent, name);
  if (!dir.ok()) return dir.status();
  return Walk(os, *dir, on_file);
}

DiskUse::File UseOf(const FileInfo& info) {
  return {info.device, info.inode, info.kind == FileKind::kRegular ? info.bytes : 0, info.links};
}

absl::StatusOr<DiskUse> MeasureAt(Os& os, const UniqueFd& parent, const std::string& name) {
  DiskUse use;
  const absl::Status walked =
      WalkAt(os, parent, name, [&](const UniqueFd&, const std::string&, const FileInfo& info) {
        use.files.push_back(UseOf(info));
      });
  if (!walked.ok()) return walked;
  return use;
}

absl::StatusOr<UniqueFd> OpenVersions(Store& store, const std::string& model) {
  if (absl::Status good = CheckModelName(model); !good.ok()) return good;
  return store.os().OpenDirAt(store.root_dir(), absl::StrCat("models/", model, "/versions"));
}

absl::Status RemoveAt(Os& os, const UniqueFd& dir, const std::string& name) {
  auto info = os.StatAt(dir, name);
  if (!info.ok()) return info.status();
  return info->kind == FileKind::kDirectory ? os.RemoveTreeAt(dir, name)
                                            : os.RemoveFileAt(dir, name);
}

// A directory can only be moved by who may write to it.
absl::Status SetWritable(Os& os, const UniqueFd& dir, const std::string& name, uint32_t mode) {
  auto opened = os.OpenDirAt(dir, name);
  return opened.ok() ? os.SetMode(*opened, mode) : opened.status();
}

}  // namespace

absl::StatusOr<DiskUse> MeasureVersion(Store& store, const std::string& model,
                                       const std::string& version) {
  auto versions = OpenVersions(store, model);
  if (!versions.ok()) return Prefix(absl::StrCat(model, "@", version), versions.status());
  auto use = MeasureAt(store.os(), *versions, version);
  if (!use.ok()) return Prefix(absl::StrCat(model, "@", version), use.status());
  return use;
}

absl::StatusOr<RemovedVersion> RemovedVersion::MoveAside(Store& store, VerifiedFiles& verified,
                                                         const UniqueFd& state_dir,
                                                         const std::string& model,
                                                         const std::string& version, bool* gone) {
  *gone = false;
  Os& os = store.os();
  const std::string ref = absl::StrCat(model, "@", version);
  auto versions = OpenVersions(store, model);
  if (!versions.ok()) return Prefix(ref, versions.status());
  auto info = os.StatAt(*versions, version);
  if (!info.ok()) return Prefix(ref, info.status());

  DiskUse use;
  std::vector<Shared> shared;
  std::vector<FileInfo> own;
  const absl::Status walked =
      WalkAt(os, *versions, version,
             [&](const UniqueFd& dir, const std::string& name, const FileInfo& file) {
               use.files.push_back(UseOf(file));
               if (file.links <= 1) own.push_back(file);
               const auto digest = file.links > 1 ? verified.Find(file) : std::nullopt;
               if (!digest.has_value() || shared.size() >= kMostShared) return;
               // Not opened: its other versions are read once more, and nothing else is lost.
               if (auto fd = os.OpenFileAt(dir, name); fd.ok()) {
                 shared.push_back({*std::move(fd), file, *digest});
               }
             });
  if (!walked.ok()) return Prefix(ref, walked);

  auto opened = os.OpenDirAt(store.root_dir(), "incoming");
  if (!opened.ok()) return Prefix(ref, opened.status());
  auto incoming = std::make_unique<UniqueFd>(*std::move(opened));
  auto lock = IncomingLock::Make(os, *incoming);
  if (!lock.ok()) return Prefix(ref, lock.status());
  const std::string aside = absl::StrCat(lock->id(), kDeleted);

  const bool directory = info->kind == FileKind::kDirectory;
  if (directory) (void)SetWritable(os, *versions, version, 0700);  // Or the rename says why not.
  const auto put_back_mode = [&] {
    if (directory) (void)SetWritable(os, *versions, version, info->mode);
  };
  absl::Status done = os.RenameNoReplace(*versions, version, *incoming, aside);
  if (!done.ok()) {
    put_back_mode();
    return Prefix(ref, done);
  }
  FaultPoint("delete.renamed");
  done = os.Sync(*incoming);
  if (done.ok()) done = os.Sync(*versions);
  if (!done.ok()) {
    // Whether it is gone for good is not known: then it had better be there.
    if (os.RenameNoReplace(*incoming, aside, *versions, version).ok()) {
      put_back_mode();
    } else {
      *gone = true;
    }
    return Prefix(ref, done);
  }
  *gone = true;
  FaultPoint("delete.synced");
  // It was made for these files alone. What stays is found by the next collection.
  (void)os.RemoveFileAt(state_dir, absl::StrCat(kManifestsDir, "/", model, "/", version, ".json"));
  store.ForgetVersion(model, version);
  return RemovedVersion(os, verified, std::move(incoming), *std::move(lock), aside, std::move(use),
                        std::move(shared), std::move(own));
}

absl::Status RemovedVersion::Remove() {
  FaultPoint("delete.removing");
  const absl::Status removed = RemoveAt(*os_, *incoming_, name_);
  FaultPoint("delete.removed");
  for (const Shared& file : shared_) {
    auto now = os_->Stat(file.fd);
    if (!now.ok() || now->mtime_ns != file.before.mtime_ns || now->bytes != file.before.bytes) {
      continue;
    }
    verified_->Forget(file.before);
    if (now->links > 0) verified_->Record(*now, file.digest);
  }
  shared_.clear();
  for (const FileInfo& info : own_) verified_->Forget(info);
  lock_.reset();
  return removed;
}

absl::StatusOr<std::vector<StaleStaging>> FindStaleStaging(Store& store) {
  Os& os = store.os();
  std::vector<StaleStaging> found;
  auto incoming = os.OpenDirAt(store.root_dir(), "incoming");
  if (absl::IsNotFound(incoming.status())) return found;  // A store to read only.
  if (!incoming.ok()) return incoming.status();
  auto entries = os.ListDir(*incoming);
  if (!entries.ok()) return entries.status();
  std::map<std::string, bool> alive;
  for (const DirEntry& entry : *entries) {
    const std::string id = IncomingId(entry.name);
    if (id.empty()) continue;
    if (!alive.contains(id)) {
      auto lock = os.OpenFileAt(*incoming, absl::StrCat(id, ".lock"));
      alive[id] = lock.ok() && absl::IsUnavailable(os.TryLock(*lock));
    }
    if (alive[id] || absl::EndsWith(entry.name, ".lock")) continue;
    auto use = MeasureAt(os, *incoming, entry.name);
    if (absl::IsNotFound(use.status())) continue;  // Just removed by who had it.
    if (!use.ok()) return use.status();
    found.push_back({entry.name, *std::move(use)});
  }
  return found;
}

absl::StatusOr<std::vector<std::string>> FindOrphanManifests(Store& store,
                                                             const UniqueFd& state_dir) {
  Os& os = store.os();
  std::vector<std::string> orphans;
  auto all = os.OpenDirAt(state_dir, kManifestsDir);
  if (absl::IsNotFound(all.status())) return orphans;
  if (!all.ok()) return all.status();
  auto models = os.ListDir(*all);
  if (!models.ok()) return models.status();
  for (const DirEntry& model : *models) {
    if (model.kind != FileKind::kDirectory || !CheckModelName(model.name).ok()) continue;
    auto dir = os.OpenDirAt(*all, model.name);
    if (!dir.ok()) return dir.status();
    auto files = os.ListDir(*dir);
    if (!files.ok()) return files.status();
    for (const DirEntry& file : *files) {
      absl::string_view number = file.name;
      if (!absl::ConsumeSuffix(&number, ".json")) continue;
      const auto there =
          os.StatAt(store.root_dir(), absl::StrCat("models/", model.name, "/versions/", number));
      if (there.ok()) continue;
      if (!absl::IsNotFound(there.status())) return there.status();
      orphans.push_back(absl::StrCat(model.name, "/", file.name));
    }
  }
  return orphans;
}

absl::Status RemoveOrphanManifest(Store& store, const UniqueFd& state_dir,
                                  const std::string& name) {
  return store.os().RemoveFileAt(state_dir, absl::StrCat(kManifestsDir, "/", name));
}

absl::StatusOr<std::vector<FileInfo>> AllVersionFiles(Store& store) {
  Os& os = store.os();
  std::vector<FileInfo> files;
  auto models = os.OpenDirAt(store.root_dir(), "models");
  if (!models.ok()) return models.status();
  const absl::Status walked =
      Walk(os, *models, [&](const UniqueFd&, const std::string&, const FileInfo& info) {
        if (info.kind == FileKind::kRegular) files.push_back(info);
      });
  if (!walked.ok()) return walked;
  return files;
}

}  // namespace modelhost
