// The Store on a real directory. See store.h.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "daemon/store/computed_manifest.h"
#include "daemon/store/file_identity.h"
#include "daemon/store/store.h"
#include "daemon/store/version_tree.h"

namespace modelhost {

class DiskStore final : public Store {
 public:
  // `view_dir` is not valid when there is no view.
  DiskStore(Os& os, std::string root, uint32_t own_uid, UniqueFd root_dir, UniqueFd state_dir,
            std::string view, UniqueFd view_dir)
      : os_(os),
        root_(std::move(root)),
        view_(std::move(view)),
        own_uid_(own_uid),
        root_dir_(std::move(root_dir)),
        view_dir_(std::move(view_dir)),
        state_dir_(std::move(state_dir)) {}

  const std::string& root() const override { return root_; }
  bool read_only() const override { return view_dir_.valid(); }
  absl::StatusOr<std::vector<ScannedModel>> Scan() override;
  absl::StatusOr<VersionFiles> OpenVersion(
      const std::string& model, uint64_t version,
      const std::function<bool(uint64_t bytes_done)>& progress) override;
  std::vector<std::string> Ignored() override;
  absl::Status SetResidency(const std::string& model, Residency residency) override;
  absl::StatusOr<uint64_t> FreeBytes() override { return os_.FreeBytes(root_dir_); }
  std::vector<std::string> WatchPaths() override;
  Os& os() override { return os_; }
  const UniqueFd& root_dir() const override { return root_dir_; }
  uint32_t own_uid() const override { return own_uid_; }
  std::vector<Location> FindFiles(const Digest& digest, uint64_t bytes) override;
  absl::StatusOr<Manifest> RecordedManifest(const std::string& model, uint64_t version) override;
  void ForgetVersion(const std::string& model, const std::string& version) override;
  void AddPublished(const Manifest& manifest) override;

 private:
  // A manifest that was read before, without its chunk lists.
  struct Known {
    std::optional<FileIdentity> file;  // Of manifest.json; unset: just published.
    std::shared_ptr<const Manifest> manifest;
    uint64_t added_at = 0;  // Value of changes_ then.
  };
  using VersionId = std::pair<std::string, uint64_t>;
  using KnownVersions = std::map<VersionId, Known>;

  // models/<model>/versions/<N> below `root`, each directory on the way checked.
  absl::StatusOr<UniqueFd> OpenVersionDir(const UniqueFd& root, const std::string& model,
                                          uint64_t version);
  // The same where clients may look: through the view, if there is one.
  absl::StatusOr<UniqueFd> OpenServedDir(const std::string& model, uint64_t version);
  absl::Status CheckReadOnly(const std::vector<TreeFile>& tree);
  absl::StatusOr<Manifest> ReadManifest(const TreeFile& file, const std::string& model,
                                        uint64_t version);
  absl::Status CheckChecksums(const std::vector<TreeFile>& tree, const Manifest& manifest);
  absl::StatusOr<ComputedManifest> Compute(const std::string& model, uint64_t version,
                                           const UniqueFd& dir, const std::vector<TreeFile>& tree,
                                           const std::function<bool(uint64_t bytes_done)>& progress,
                                           bool* just_hashed);

  ScannedModel ScanModel(const UniqueFd& models, const std::string& name, KnownVersions& known);
  void ScanPolicy(const UniqueFd& dir, ScannedModel& model);
  ScannedVersion ScanVersion(const UniqueFd& versions, const std::string& model,
                             const DirEntry& entry, KnownVersions& known);
  absl::Status ScanFiles(const UniqueFd& dir, const std::string& model, ScannedVersion& version,
                         KnownVersions& known);
  static std::shared_ptr<const Manifest> WithoutChunks(Manifest manifest);
  std::shared_ptr<const Manifest> FindKnown(const VersionId& id, const FileIdentity& file);
  void IndexFiles() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Os& os_;
  const std::string root_;
  const std::string view_;
  const uint32_t own_uid_;
  const UniqueFd root_dir_;
  const UniqueFd view_dir_;
  const UniqueFd state_dir_;

  absl::Mutex mutex_;  // Never held during a call to os_.
  KnownVersions known_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<Digest, std::vector<std::pair<VersionId, const ManifestFile*>>> by_digest_
      ABSL_GUARDED_BY(mutex_);  // Into the manifests of known_.
  uint64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool scanned_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::string> ignored_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
