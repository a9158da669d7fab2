// Manifests of versions that were put in place by hand, without one: computed by reading every byte
// and kept as <state>/manifests/<model>/<N>.json until a file changes.
//
//   {"schema": 1, "identities": [{"path", "device", "inode", "bytes", "mtime_ns", "ctime_ns"}],
//    "manifest": {...}}
//
// Blocking.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"
#include "daemon/store/file_identity.h"
#include "daemon/store/manifest.h"
#include "daemon/store/version_tree.h"

namespace modelhost {

struct ComputedManifest {
  Manifest manifest;
  std::vector<FileIdentity> identities;  // Of manifest.files, same order.
  // Whether the files that it was computed from are those of `tree`.
  bool Fits(const std::vector<TreeFile>& tree) const;
};

absl::StatusOr<ComputedManifest> ParseComputedManifest(absl::string_view text);
std::string SerializeComputedManifest(const ComputedManifest& computed);

// NOT_FOUND when there is none; a broken one is as good as none.
absl::StatusOr<ComputedManifest> LoadComputedManifest(Os& os, const UniqueFd& state_dir,
                                                      const std::string& model, uint64_t version);
absl::Status SaveComputedManifest(Os& os, const UniqueFd& state_dir,
                                  const ComputedManifest& computed);

// Reads every file of `tree`, whose descriptors are open. CANCELLED when `progress` says so;
// DATA_LOSS naming a file that changes meanwhile.
absl::StatusOr<ComputedManifest> ComputeManifest(
    Os& os, const std::string& model, uint64_t version, absl::Time created,
    const std::vector<TreeFile>& tree, const std::function<bool(uint64_t bytes_done)>& progress);

}  // namespace modelhost
