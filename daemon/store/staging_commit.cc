// From a staging directory to a version: complete, checked, durable, then there by one rename.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/format/text.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/staging.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr uint64_t kMaxChecksumsBytes = uint64_t{64} << 20;

// The codes that say that a version on disk is not what it should be, rather than that we could
// not look.
bool SaysBad(const absl::Status& status) {
  if (status.GetPayload(kViewRefusal).has_value()) return false;
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ||
         absl::IsDataLoss(status);
}

std::string TextOf(const Requirements& requirements) {
  if (requirements.empty()) return "nothing";
  return absl::StrJoin(requirements, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, Printable(entry.first), "=", Printable(entry.second));
  });
}

absl::StatusOr<UniqueFd> MakeDurableDir(Os& os, const UniqueFd& parent, const std::string& name) {
  const absl::Status made = os.MakeDirAt(parent, name, 0700);
  if (made.ok()) {
    if (absl::Status synced = os.Sync(parent); !synced.ok()) return synced;
  } else if (!absl::IsAlreadyExists(made)) {
    return made;
  }
  return os.OpenDirAt(parent, name);
}

}  // namespace

absl::StatusOr<PublishResult> Staging::Commit(
    const std::function<bool(const std::string&)>& weights, bool replace_bad) {
  if (!staged_) {
    return absl::FailedPreconditionError(absl::StrCat(Ref(), ": publishing has ended already"));
  }
  if (absl::Status ended = FinishStream(); !ended.ok()) return ended;
  if (absl::Status complete = CheckComplete(); !complete.ok()) return complete;
  if (absl::Status agree = CheckChecksums(); !agree.ok()) return Prefix(Ref(), agree);

  Manifest manifest;
  manifest.model = model_;
  manifest.version = version_;
  manifest.created = absl::Now();
  manifest.requires_map = requirements_;
  manifest.files = done_;
  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const ManifestFile& a, const ManifestFile& b) { return a.path < b.path; });
  for (ManifestFile& file : manifest.files) {
    file.role = weights && weights(file.path) ? "weights" : "sidecar";
  }
  manifest.digest = VersionDigest(manifest.files);

  auto versions = MakeVersionsDir();
  if (!versions.ok()) return versions.status();
  PublishResult result;
  result.digest = manifest.digest;
  result.bytes = manifest.TotalBytes();
  result.linked_bytes = linked_bytes_;

  auto there = os_.StatAt(*versions, absl::StrCat(version_));
  if (there.ok()) return MeetExisting(*versions, manifest, replace_bad);
  if (!absl::IsNotFound(there.status())) return there.status();
  absl::Status done = WriteManifest(manifest);
  if (done.ok()) done = SealTree();
  if (!done.ok()) return done;
  done = Publish(*versions);
  // Somebody else was quicker with this number.
  if (absl::IsAlreadyExists(done)) return MeetExisting(*versions, manifest, replace_bad);
  if (!done.ok()) return done;
  store_.AddPublished(manifest);
  return result;
}

absl::Status Staging::CheckComplete() {
  for (auto& [path, planned] : planned_) {
    if (planned.begun) continue;
    if (planned.bytes > 0) {
      return absl::DataLossError(absl::StrCat(Ref(), ": ", path, ": was announced and never sent"));
    }
    // A stream has no bytes that would name an empty file.
    auto writing = BeginFile({path, 0});
    if (!writing.ok()) return writing.status();
    if (absl::Status kept = FinishFile(*std::move(writing), progress_); !kept.ok()) return kept;
  }
  // A file that failed halfway is begun, but not done.
  if (done_.size() != planned_.size()) {
    return absl::FailedPreconditionError(absl::StrCat(Ref(), ": only ", done_.size(), " of ",
                                                      planned_.size(), " files are complete"));
  }
  return absl::OkStatus();
}

absl::Status Staging::CheckChecksums() {
  if (!planned_.contains(kChecksumsName)) return absl::OkStatus();
  auto text = ReadSmallFileAt(os_, dir_, kChecksumsName, kMaxChecksumsBytes);
  if (!text.ok()) return text.status();
  auto checksums = ParseChecksums(*text);
  if (!checksums.ok()) return checksums.status();
  return CheckAgainst(*checksums, done_);
}

absl::StatusOr<UniqueFd> Staging::MakeVersionsDir() {
  auto models = os_.OpenDirAt(store_.root_dir(), "models");
  if (!models.ok()) return models.status();
  auto model = MakeDurableDir(os_, *models, model_);
  if (!model.ok()) return model.status();
  return MakeDurableDir(os_, *model, "versions");
}

absl::StatusOr<PublishResult> Staging::MeetExisting(const UniqueFd& versions,
                                                    const Manifest& manifest, bool replace_bad) {
  PublishResult result;
  result.digest = manifest.digest;
  result.bytes = manifest.TotalBytes();
  result.linked_bytes = linked_bytes_;

  // Without a manifest it is read from end to end; the bytes that were staged are all done.
  absl::Status cancelled;
  auto opened = store_.OpenVersion(model_, version_, [&](uint64_t) {
    cancelled = Report(progress_, 0);
    return cancelled.ok();
  });
  if (!cancelled.ok()) return cancelled;
  if (!opened.ok() && !SaysBad(opened.status())) return opened.status();
  auto recorded = opened.ok() ? absl::StatusOr<Manifest>(*opened->manifest)
                              : store_.RecordedManifest(model_, version_);
  const std::string where = absl::StrCat(store_.root(), "/models/", model_, "/versions/", version_);
  if (!recorded.ok()) {
    return absl::AlreadyExistsError(absl::StrCat(
        Ref(), ": exists, and nobody can tell whether these are its bytes: ",
        recorded.status().message(), " (publish under another number, or remove ", where, ")"));
  }
  if (recorded->digest != manifest.digest) {
    return absl::AlreadyExistsError(absl::StrCat(
        Ref(), ": exists with other bytes, sha256 ", recorded->digest.Short(), "; these have ",
        manifest.digest.Short(), " (a version never changes: publish under another number)"));
  }
  if (recorded->requires_map != requirements_) {
    return absl::AlreadyExistsError(
        absl::StrCat(Ref(), ": exists with the same bytes, but requires ",
                     TextOf(recorded->requires_map), "; these require ", TextOf(requirements_),
                     " (a version never changes: publish under another number)"));
  }
  if (opened.ok() && !replace_bad) {
    result.already_there = true;
    result.linked_bytes = 0;
    Discard();
    return result;
  }
  opened = absl::UnknownError("closed");  // Its descriptors are no longer needed.
  absl::Status done;
  if (!os_.StatAt(dir_, kManifestName).ok()) {
    done = WriteManifest(manifest);
    if (done.ok()) done = SealTree();
  }
  if (done.ok()) done = Repair(versions);
  if (!done.ok()) return done;
  store_.AddPublished(manifest);
  result.repaired = true;
  return result;
}

absl::Status Staging::WriteManifest(const Manifest& manifest) {
  auto file = os_.CreateFileAt(dir_, kManifestName, 0600);
  if (!file.ok()) return file.status();
  const std::string text = SerializeManifest(manifest);
  absl::Status done = os_.WriteAt(*file, 0, std::as_bytes(std::span(text)));
  if (done.ok()) done = os_.SetMode(*file, kVersionFileMode);
  if (done.ok()) done = os_.Sync(*file);
  FaultPoint("publish.manifest");
  return done;
}

absl::Status Staging::SealTree() {
  for (const std::string& name : subdirs_) {
    auto dir = os_.OpenDirAt(dir_, name);
    if (!dir.ok()) return dir.status();
    absl::Status done = os_.SetMode(*dir, kVersionDirMode);
    if (done.ok()) done = os_.Sync(*dir);
    if (!done.ok()) return done;
  }
  return os_.Sync(dir_);
}

absl::Status Staging::MayRename() const {
  if (!before_rename_ || before_rename_()) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat(Ref(), ": publishing was cancelled"));
}

absl::Status Staging::Publish(const UniqueFd& versions, bool* durable) {
  if (durable != nullptr) *durable = false;
  if (absl::Status may = MayRename(); !may.ok()) return may;
  FaultPoint("publish.before_rename");
  // The directory itself stays writable until it is in place: moving it changes its "..", which a
  // plain user may only do to a directory that he may write to.
  absl::Status done =
      os_.RenameNoReplace(*incoming_, lock_.partial(), versions, absl::StrCat(version_));
  if (!done.ok()) return done;
  staged_ = false;
  FaultPoint("publish.renamed");
  if (done = os_.Sync(versions); !done.ok()) {
    return Prefix(absl::StrCat(Ref(),
                               ": is in place, but may not survive a power failure (publish "
                               "it again to be told that it is there)"),
                  done);
  }
  if (durable != nullptr) *durable = true;
  FaultPoint("publish.synced");
  if (done = os_.SetMode(dir_, kVersionDirMode); !done.ok()) {
    return Prefix(absl::StrCat(Ref(), ": is in place, but could not be write-protected"), done);
  }
  FaultPoint("publish.done");
  return absl::OkStatus();
}

absl::Status Staging::Repair(const UniqueFd& versions) {
  const std::string number = absl::StrCat(version_);
  const std::string aside = lock_.replaced(model_, number);
  if (absl::Status may = MayRename(); !may.ok()) return may;
  auto bad = os_.OpenDirAt(versions, number);
  if (!bad.ok()) return bad.status();
  // Who has its files open or mapped keeps them; only the names move. After a crash in between, the
  // sweep puts the bad version back.
  absl::Status done = os_.SetMode(*bad, 0700);
  if (done.ok()) done = os_.Rename(versions, number, *incoming_, aside);
  if (!done.ok()) {
    (void)os_.SetMode(*bad, kVersionDirMode);
    return done;
  }
  FaultPoint("repair.moved_aside");
  bool durable = false;
  done = Publish(versions, &durable);
  FaultPoint("repair.published");
  if (staged_) {
    (void)os_.Rename(*incoming_, aside, versions, number);
    (void)os_.SetMode(*bad, kVersionDirMode);
    return done;
  }
  // After a power failure the new name may be lost, and then the sweep needs the old version. What
  // stays behind here is swept at the next start.
  if (durable) (void)os_.RemoveTreeAt(*incoming_, aside);
  return done;
}

}  // namespace modelhost
