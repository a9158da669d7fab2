// The store on disk: <root>/models/<model>/versions/<N>/ and <root>/incoming/.
//
// A version directory is immutable once it is there; it gets there by one rename. Reading it never
// trusts it: names, kinds, links and modes are checked each time (OpenVersion). Blocking; pool
// threads only. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/platform/os.h"
#include "daemon/store/manifest.h"
#include "daemon/store/model_policy.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct ScannedVersion {
  uint64_t number = 0;
  std::string name;              // As on disk; not canonical in an invalid entry.
  std::string invalid;           // Why it is not usable; empty when it is.
  uint64_t bytes = 0;            // Of its files.
  std::optional<Digest> digest;  // When it has a manifest, or one was computed before.
  absl::Time created;
  // That of manifest.json, without its chunk digests; null when it has none.
  std::shared_ptr<const Manifest> manifest;
};

struct ScannedModel {
  std::string name;
  ModelPolicy policy;  // Of its model.toml.
  // Its model.toml is broken, or cannot be read; policy is then empty, which must not be taken for
  // "no rules": the caller keeps those that it has.
  std::string policy_error;
  std::vector<ScannedVersion> versions;  // By number; then the invalid ones without a number.
  std::string versions_error;            // versions/ cannot be read: unknown, not absent.
};

// An open, checked version directory.
struct VersionFiles {
  UniqueFd dir;
  // From manifest.json, or computed and kept in the state directory when there is none; `computed`
  // tells.
  std::shared_ptr<const Manifest> manifest;
  bool computed = false;
  bool just_hashed = false;  // In this very call: every byte was read.
  // Descriptors of manifest->files, same order, opened for reading; sizes match the manifest.
  std::vector<UniqueFd> files;
  std::vector<FileInfo> infos;
};

// The payload of a FAILED_PRECONDITION that is about the store view and its mounts: the version may
// be as good as any.
inline constexpr char kViewRefusal[] = "modelhost.store_view";

class Store {
 public:
  // Makes the directories that are missing (0700). `own_uid` must own what is served, or root.
  // `view`, unless empty, is a read-only mount of `root`: what clients get is opened through it, so
  // that not even root can open it again for writing. FAILED_PRECONDITION when it is anything else.
  static absl::StatusOr<std::unique_ptr<Store>> Open(Os& os, std::string root, std::string state,
                                                     uint32_t own_uid, std::string view = "");
  virtual ~Store() = default;

  virtual const std::string& root() const = 0;
  // Whatever OpenVersion opens is on a read-only mount: there is a view.
  virtual bool read_only() const = 0;

  // All models and versions, the unusable ones with the reason. UNAVAILABLE/other when the store
  // itself cannot be read: the caller keeps what it has (absence is not an instruction).
  virtual absl::StatusOr<std::vector<ScannedModel>> Scan() = 0;

  // Opens and checks every file. Refused with the path and the reason: symlinks, non-regular files,
  // group- or world-writable modes, wrong owner, sizes that are not the manifest's, files that the
  // manifest does not name (manifest.json and checksums.sha256 aside). A directory without
  // manifest.json gets one computed (this reads every byte, `progress` is told, cancellable by a
  // false return); its checksums.sha256 must agree.
  //   NOT_FOUND no such version; INVALID_ARGUMENT/FAILED_PRECONDITION malformed; DATA_LOSS wrong
  //   digests; UNAVAILABLE not to be had through the view
  virtual absl::StatusOr<VersionFiles> OpenVersion(
      const std::string& model, uint64_t version,
      const std::function<bool(uint64_t bytes_done)>& progress) = 0;

  // Entries of models/ that the last Scan left out, each as "name: reason".
  virtual std::vector<std::string> Ignored() = 0;

  // Writes `residency` into models/<model>/model.toml and leaves the other keys and comments as
  // they are. Makes the model's directory if need be. INVALID_ARGUMENT if the file there is broken.
  virtual absl::Status SetResidency(const std::string& model, Residency residency) = 0;

  // Free bytes on the store's file system.
  virtual absl::StatusOr<uint64_t> FreeBytes() = 0;

  // Paths for a watch: models/ and each models/<model>/versions/.
  virtual std::vector<std::string> WatchPaths() = 0;

  // Internals that publish needs; see publish.h.
  virtual Os& os() = 0;
  virtual const UniqueFd& root_dir() const = 0;
  virtual uint32_t own_uid() const = 0;
  // Files of the store whose manifest gives them this digest and size, for a hard link. The caller
  // checks what is really there.
  struct Location {
    std::string dir;  // Relative to the root, '/' between parts.
    std::string name;
  };
  virtual std::vector<Location> FindFiles(const Digest& digest, uint64_t bytes) = 0;
  // The manifest of a version (or the one computed before), in whatever state its files are.
  // NOT_FOUND no such version; else why the manifest cannot be read.
  virtual absl::StatusOr<Manifest> RecordedManifest(const std::string& model, uint64_t version) = 0;
  // A version has just been removed; `version` as on disk.
  virtual void ForgetVersion(const std::string& model, const std::string& version) = 0;
  // A version has just been published.
  virtual void AddPublished(const Manifest& manifest) = 0;
};

}  // namespace modelhost
