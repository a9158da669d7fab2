#include "daemon/store/staging.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/store/atomic_file.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

Staging::Staging(Store& store, VerifiedFiles* verified, std::string model, uint64_t version,
                 std::unique_ptr<UniqueFd> incoming, IncomingLock lock)
    : store_(store),
      os_(store.os()),
      verified_(verified),
      model_(std::move(model)),
      version_(version),
      incoming_(std::move(incoming)),
      lock_(std::move(lock)) {}

absl::StatusOr<std::unique_ptr<Staging>> Staging::Begin(Store& store, VerifiedFiles* verified,
                                                        const std::string& model, uint64_t version,
                                                        const std::vector<PublishFile>& files,
                                                        const Requirements& requirements) {
  Os& os = store.os();
  auto opened = os.OpenDirAt(store.root_dir(), "incoming");
  if (!opened.ok()) return opened.status();
  auto incoming = std::make_unique<UniqueFd>(*std::move(opened));
  auto lock = IncomingLock::Make(os, *incoming);
  if (!lock.ok()) return lock.status();
  // From here on the destructor clears up.
  std::unique_ptr<Staging> staging(
      new Staging(store, verified, model, version, std::move(incoming), *std::move(lock)));
  staging->requirements_ = requirements;
  for (const PublishFile& file : files) staging->planned_[file.path] = Planned{file.bytes};
  const std::string partial = staging->lock_.partial();
  if (absl::Status made = os.MakeDirAt(*staging->incoming_, partial, 0700); !made.ok()) return made;
  auto dir = os.OpenDirAt(*staging->incoming_, partial);
  if (!dir.ok()) return dir.status();
  staging->dir_ = *std::move(dir);
  FaultPoint("publish.staged");
  return staging;
}

Staging::~Staging() { Discard(); }

void Staging::Discard() {
  if (!staged_) return;
  staged_ = false;
  stream_.reset();
  // What stays behind here is swept at the next start.
  (void)os_.RemoveTreeAt(*incoming_, lock_.partial());
}

std::string Staging::Ref() const { return absl::StrCat(model_, "@", version_); }

absl::Status Staging::Report(const Progress& progress, uint64_t more_bytes) const {
  if (!progress || progress(staged_bytes_ + more_bytes)) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat(Ref(), ": publishing was cancelled"));
}

absl::Status Staging::MakeParents(const std::string& path) {
  for (size_t slash = path.find('/'); slash != std::string::npos;
       slash = path.find('/', slash + 1)) {
    std::string dir = path.substr(0, slash);
    if (subdirs_.contains(dir)) continue;
    if (absl::Status made = os_.MakeDirAt(dir_, dir, 0700); !made.ok()) return made;
    subdirs_.insert(std::move(dir));
  }
  return absl::OkStatus();
}

absl::StatusOr<Staging::Writing> Staging::BeginFile(const PublishFile& file) {
  if (!staged_) {
    return absl::FailedPreconditionError(absl::StrCat(Ref(), ": publishing has ended already"));
  }
  auto planned = planned_.find(file.path);
  if (planned == planned_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat(Ref(), ": ", file.path, ": was not announced when publishing began"));
  }
  if (planned->second.bytes != file.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(Ref(), ": ", file.path, ": announced with ",
                                                   planned->second.bytes, " bytes, then with ",
                                                   file.bytes));
  }
  if (planned->second.begun) {
    return absl::InvalidArgumentError(absl::StrCat(Ref(), ": ", file.path, ": was sent twice"));
  }
  planned->second.begun = true;
  if (absl::Status made = MakeParents(file.path); !made.ok()) return made;
  Writing writing;
  writing.path = file.path;
  writing.announced_bytes = file.bytes;
  auto created = os_.CreateFileAt(dir_, file.path, 0600);
  if (!created.ok()) return created.status();
  writing.file = *std::move(created);
  return writing;
}

absl::Status Staging::AddFile(const PublishFile& file, const UniqueFd& source,
                              const Progress& progress) {
  if (absl::Status ended = FinishStream(); !ended.ok()) return ended;
  const std::string what = absl::StrCat(Ref(), ": ", file.path);
  auto before = os_.Stat(source);
  if (!before.ok()) return Prefix(what, before.status());
  if (before->kind != FileKind::kRegular) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the source is not a regular file"));
  }
  if (before->bytes != file.bytes) {
    return absl::DataLossError(absl::StrCat(what, ": announced with ", file.bytes,
                                            " bytes, but the source has ", before->bytes,
                                            ": it changed meanwhile"));
  }
  auto writing = BeginFile(file);
  if (!writing.ok()) return writing.status();
  // Whatever the reason why it cannot be cloned, it can still be copied, or that fails with its
  // own.
  const bool cloned = os_.Clone(source, writing->file).ok();
  absl::Status done = cloned ? HashClone(*writing, progress) : Copy(*writing, source, progress);
  if (!done.ok()) return done;
  auto after = os_.Stat(source);
  if (!after.ok()) return Prefix(what, after.status());
  if (absl::Status same = CheckUnchanged(what, *before, *after); !same.ok()) return same;
  return FinishFile(*std::move(writing), progress);
}

absl::Status Staging::Copy(Writing& writing, const UniqueFd& source, const Progress& progress) {
  if (absl::Status room = os_.Allocate(writing.file, writing.announced_bytes); !room.ok()) {
    return Prefix(Ref(), room);
  }
  return ReadInOrder(os_, source, absl::StrCat(Ref(), ": ", writing.path), writing.announced_bytes,
                     buffer_, [&](uint64_t offset, std::span<const std::byte> piece) {
                       writing.hash.Update(piece);
                       absl::Status put = os_.WriteAt(writing.file, offset, piece);
                       return put.ok() ? Report(progress, offset + piece.size()) : put;
                     });
}

absl::Status Staging::HashClone(Writing& writing, const Progress& progress) {
  auto info = os_.Stat(writing.file);
  if (!info.ok()) return info.status();
  if (info->bytes != writing.announced_bytes) {
    return absl::DataLossError(absl::StrCat(Ref(), ": ", writing.path, ": has ", info->bytes,
                                            " bytes, announced ", writing.announced_bytes,
                                            ": it changed meanwhile"));
  }
  return ReadInOrder(os_, writing.file, writing.path, info->bytes, buffer_,
                     [&](uint64_t offset, std::span<const std::byte> piece) {
                       writing.hash.Update(piece);
                       return Report(progress, offset + piece.size());
                     });
}

absl::Status Staging::AppendBytes(const PublishFile& file, std::span<const std::byte> bytes) {
  if (!stream_.has_value() || stream_->path != file.path) {
    if (absl::Status ended = FinishStream(); !ended.ok()) return ended;
    auto writing = BeginFile(file);
    if (!writing.ok()) return writing.status();
    if (absl::Status room = os_.Allocate(writing->file, file.bytes); !room.ok()) {
      return Prefix(Ref(), room);
    }
    stream_.emplace(*std::move(writing));
  }
  const uint64_t at = stream_->hash.bytes();
  if (bytes.size() > stream_->announced_bytes - at) {
    return absl::InvalidArgumentError(absl::StrCat(Ref(), ": ", file.path, ": more than the ",
                                                   stream_->announced_bytes, " bytes announced"));
  }
  if (absl::Status put = os_.WriteAt(stream_->file, at, bytes); !put.ok()) return put;
  stream_->hash.Update(bytes);
  return absl::OkStatus();
}

absl::Status Staging::FinishStream() {
  if (!stream_.has_value()) return absl::OkStatus();
  Writing writing = *std::move(stream_);
  stream_.reset();
  if (writing.hash.bytes() != writing.announced_bytes) {
    return absl::DataLossError(absl::StrCat(Ref(), ": ", writing.path, ": ended after ",
                                            writing.hash.bytes(), " of ", writing.announced_bytes,
                                            " bytes"));
  }
  return FinishFile(std::move(writing), progress_);
}

absl::Status Staging::FinishFile(Writing writing, const Progress& progress) {
  ManifestFile file;
  file.path = writing.path;
  writing.hash.Finish(file);
  staged_bytes_ += file.bytes;
  auto linked = ReplaceByLink(writing, file, progress);
  if (!linked.ok()) return linked.status();
  if (*linked) {
    linked_bytes_ += file.bytes;  // Its new name is durable with the directory.
  } else {
    absl::Status kept = os_.SetMode(writing.file, kVersionFileMode);
    if (kept.ok()) kept = os_.Sync(writing.file);
    if (!kept.ok()) return kept;
  }
  FaultPoint("publish.file");
  done_.push_back(std::move(file));
  return absl::OkStatus();
}

}  // namespace modelhost
