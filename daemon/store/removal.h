// Taking versions out of the store, and finding what is left of those that are gone.
//
//   MoveAside   versions/<N> -> incoming/<id>.deleted/ by one rename, with fsyncs; the id is locked
//   Remove      the tree; whoever has its files open or mapped keeps them
//
// A crash before the rename leaves the version as it was, after it nothing of it: what lies in
// incoming/ is swept at the next start. A file that is a hard link loses this name only; what is
// recorded of it as verified stays, although its ctime changes.
//
// Errors are those of Os, and name the path. Blocking; pool threads only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"
#include "daemon/store/incoming.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"

namespace modelhost {

// The files of a version or of a staging directory as they lie on disk.
struct DiskUse {
  struct File {
    uint64_t device = 0;
    uint64_t inode = 0;
    uint64_t bytes = 0;
    uint64_t links = 1;
  };
  std::vector<File> files;
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const File& file : files) sum += file.bytes;
    return sum;
  }
};

// In whatever state the version is, also one that a scan refuses.
absl::StatusOr<DiskUse> MeasureVersion(Store& store, const std::string& model,
                                       const std::string& version);

// A version that has left versions/ and is to be removed from incoming/.
class RemovedVersion {
 public:
  // `version` as on disk. NOT_FOUND; after any other error the version is where it was, unless
  // `*gone` says that it could not be put back (its place is then empty, and the start sweeps).
  static absl::StatusOr<RemovedVersion> MoveAside(Store& store, VerifiedFiles& verified,
                                                  const UniqueFd& state_dir,
                                                  const std::string& model,
                                                  const std::string& version, bool* gone);
  RemovedVersion(RemovedVersion&&) noexcept = default;
  RemovedVersion& operator=(RemovedVersion&&) = delete;

  const DiskUse& use() const { return use_; }
  // An error leaves the rest to the sweep.
  absl::Status Remove();

 private:
  struct Shared {  // A file that has other names, and was verified.
    UniqueFd fd;
    FileInfo before;
    Digest digest;
  };
  RemovedVersion(Os& os, VerifiedFiles& verified, std::unique_ptr<UniqueFd> incoming,
                 IncomingLock lock, std::string name, DiskUse use, std::vector<Shared> shared,
                 std::vector<FileInfo> own)
      : os_(&os),
        verified_(&verified),
        incoming_(std::move(incoming)),
        lock_(std::make_unique<IncomingLock>(std::move(lock))),
        name_(std::move(name)),
        use_(std::move(use)),
        shared_(std::move(shared)),
        own_(std::move(own)) {}

  Os* os_;
  VerifiedFiles* verified_;
  std::unique_ptr<UniqueFd> incoming_;  // Outlives the lock, which refers to it.
  std::unique_ptr<IncomingLock> lock_;
  std::string name_;
  DiskUse use_;
  std::vector<Shared> shared_;
  std::vector<FileInfo> own_;
};

// What nobody works on any more in incoming/.
struct StaleStaging {
  std::string name;
  DiskUse use;
};
absl::StatusOr<std::vector<StaleStaging>> FindStaleStaging(Store& store);

// "MODEL/N.json" of computed manifests whose versions are not in the store.
absl::StatusOr<std::vector<std::string>> FindOrphanManifests(Store& store,
                                                             const UniqueFd& state_dir);
absl::Status RemoveOrphanManifest(Store& store, const UniqueFd& state_dir, const std::string& name);

// The identities of all files of all versions. An error when any cannot be read: what is unknown is
// not gone.
absl::StatusOr<std::vector<FileInfo>> AllVersionFiles(Store& store);

}  // namespace modelhost
