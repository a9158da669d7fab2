// One version on its way into the store. See publish.h for what it promises and incoming.h for
// where it lives meanwhile. Not thread-safe.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/store/content_hash.h"
#include "daemon/store/incoming.h"
#include "daemon/store/publish.h"

namespace modelhost {

class Staging final : public StagedVersion {
 public:
  // Makes the staging directory.
  static absl::StatusOr<std::unique_ptr<Staging>> Begin(Store& store, VerifiedFiles* verified,
                                                        const std::string& model, uint64_t version,
                                                        const std::vector<PublishFile>& files,
                                                        const Requirements& requirements);
  ~Staging() override;

  absl::Status AddFile(const PublishFile& file, const UniqueFd& source,
                       const Progress& progress) override;
  absl::Status AppendBytes(const PublishFile& file, std::span<const std::byte> bytes) override;
  absl::StatusOr<PublishResult> Commit(const std::function<bool(const std::string&)>& weights,
                                       bool replace_bad) override;

 private:
  struct Planned {
    uint64_t bytes = 0;
    bool begun = false;
  };
  // A file being written.
  struct Writing {
    std::string path;
    uint64_t announced_bytes = 0;
    UniqueFd file;
    ContentHash hash;
  };

  Staging(Store& store, VerifiedFiles* verified, std::string model, uint64_t version,
          std::unique_ptr<UniqueFd> incoming, IncomingLock lock);

  std::string Ref() const;
  // staging.cc
  absl::StatusOr<Writing> BeginFile(const PublishFile& file);
  absl::Status FinishFile(Writing writing, const Progress& progress);
  absl::Status FinishStream();
  absl::Status MakeParents(const std::string& path);
  absl::Status Copy(Writing& writing, const UniqueFd& source, const Progress& progress);
  absl::Status HashClone(Writing& writing, const Progress& progress);
  absl::Status Report(const Progress& progress, uint64_t more_bytes) const;
  // staging_link.cc: a file that the store already has becomes a second name of it.
  // False leaves the copy; an error is a cancellation.
  absl::StatusOr<bool> ReplaceByLink(const Writing& writing, const ManifestFile& file,
                                     const Progress& progress);
  absl::StatusOr<bool> TryLink(const Store::Location& from, const Writing& writing,
                               const ManifestFile& file, const Progress& progress);
  absl::StatusOr<bool> SameBytes(const UniqueFd& a, const UniqueFd& b, uint64_t bytes,
                                 const Progress& progress);
  // staging_commit.cc
  absl::Status CheckComplete();
  absl::Status CheckChecksums();
  absl::StatusOr<UniqueFd> MakeVersionsDir();
  absl::StatusOr<PublishResult> MeetExisting(const UniqueFd& versions, const Manifest& manifest,
                                             bool replace_bad);
  absl::Status WriteManifest(const Manifest& manifest);
  absl::Status SealTree();
  absl::Status MayRename() const;
  // `durable` (may be null): whether the new name would survive a power failure.
  absl::Status Publish(const UniqueFd& versions, bool* durable = nullptr);
  absl::Status Repair(const UniqueFd& versions);
  void Discard();

  Store& store_;
  Os& os_;
  VerifiedFiles* verified_;
  const std::string model_;
  const uint64_t version_;
  std::unique_ptr<UniqueFd> incoming_;  // Lent to lock_.
  IncomingLock lock_;
  UniqueFd dir_;        // <id>.partial, then the version.
  bool staged_ = true;  // dir_ is still in incoming/.
  Requirements requirements_;
  std::map<std::string, Planned> planned_;
  std::set<std::string> subdirs_;
  std::vector<ManifestFile> done_;
  std::optional<Writing> stream_;
  uint64_t staged_bytes_ = 0;
  uint64_t linked_bytes_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace modelhost
