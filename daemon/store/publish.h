// Publishing: bytes from somewhere become an immutable version directory, by one rename.
//
//   Stage(...) -> StagedVersion   incoming/<id>.partial/, exclusively locked while the object lives
//     AddFile / AppendBytes       each file hashed while it is written (whole and per chunk)
//     Commit                      manifest, fsyncs, renameat2(NOREPLACE), fsync, modes
//   ~StagedVersion without Commit removes the staging directory.
//
// Blocking; pool threads only. One StagedVersion is used by one thread at a time.
//
// Errors: RESOURCE_EXHAUSTED (need and have, checked before the first byte), ALREADY_EXISTS (that
// number has other bytes or requirements; the same bytes are success with `already_there`),
// INVALID_ARGUMENT (a name), DATA_LOSS (checksums.sha256 disagrees, or a source changed while it
// was read), CANCELLED.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/requires.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"

namespace modelhost {

struct PublishFile {
  std::string path;  // Relative to the version.
  uint64_t bytes = 0;
};

struct PublishResult {
  Digest digest;
  uint64_t bytes = 0;          // Of all files.
  uint64_t linked_bytes = 0;   // Of those that were hard-linked to files already in the store.
  bool already_there = false;  // The same version had the same bytes.
  bool repaired = false;       // It replaced a directory whose bytes were bad.
};

class StagedVersion {
 public:
  // Told the bytes staged so far, of all files; false cancels.
  using Progress = std::function<bool(uint64_t)>;
  virtual ~StagedVersion() = default;

  // Copies `bytes` bytes of `source` (clone where the file system can, then hash the clone).
  virtual absl::Status AddFile(const PublishFile& file, const UniqueFd& source,
                               const Progress& progress) = 0;
  // For a stream: bytes of one file, in order. A file ends when another begins or at Commit; its
  // length must be what was announced.
  virtual absl::Status AppendBytes(const PublishFile& file, std::span<const std::byte> bytes) = 0;
  // `weights(path)` says which files are weights (the role in the manifest).
  // `replace_bad`: an existing directory of that number whose content is bad (the caller knows: it
  // is QUARANTINED) may be replaced when the new bytes have its manifest's digest. One whose files
  // do not fit its manifest needs no such word: it is seen to be bad.
  virtual absl::StatusOr<PublishResult> Commit(
      const std::function<bool(const std::string&)>& weights, bool replace_bad) = 0;

  // Told, and asked, by AppendBytes and Commit: comparing bytes with those that the store has may
  // read as much again. AddFile has its own.
  void OnProgress(Progress progress) { progress_ = std::move(progress); }

  // Asked once more right before the first rename of Commit: with false nothing is put in place,
  // and Commit ends CANCELLED.
  void BeforeRename(std::function<bool()> may) { before_rename_ = std::move(may); }

 protected:
  Progress progress_;
  std::function<bool()> before_rename_;
};

class Publisher {
 public:
  // A hard link changes the ctime of the file that it names; with `verified`, what was known about
  // that file stays known.
  explicit Publisher(Store& store, VerifiedFiles* verified = nullptr)
      : store_(store), verified_(verified) {}

  // Checks names, the number, `requirements` (see format/requires.h; they go into the manifest) and
  // the space for `files`, and begins.
  absl::StatusOr<std::unique_ptr<StagedVersion>> Stage(const std::string& model, uint64_t version,
                                                       const std::vector<PublishFile>& files,
                                                       const Requirements& requirements = {});
  // Removes what crashed publishes left (staging directories that nobody has locked), and puts back
  // a version that a crashed repair had moved aside. Goes on after an error and returns the first.
  absl::Status SweepIncoming();

 private:
  Store& store_;
  VerifiedFiles* verified_;
};

}  // namespace modelhost
