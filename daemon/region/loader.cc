#include "daemon/region/loader.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/chunk_pass.h"
#include "daemon/region/load_job.h"
#include "daemon/region/workers.h"

namespace modelhost {
namespace {

LoaderOptions Normal(LoaderOptions options) {
  if (options.threads <= 0) {
    options.threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
  }
  if (options.cores <= 0) options.cores = static_cast<int>(std::thread::hardware_concurrency());
  return options;
}

absl::Status Differs(const std::string& what, const Digest& found, const Digest& wanted) {
  return absl::DataLossError(absl::StrCat(what, ": its bytes have SHA-256 ", found.Hex(),
                                          ", the manifest says ", wanted.Hex(),
                                          " (publish the same bytes again to repair it)"));
}

// Reads one file and compares it with its entry of the manifest.
class FileCheck {
 public:
  FileCheck(Os& os, LoadPacer& pacer, const CancelToken& cancel, ProgressMeter& progress)
      : os_(os), pace_(pacer), cancel_(cancel), progress_(progress), buffer_(kBufferBytes) {}

  absl::Status Run(const std::string& path, const ManifestFile& file, const UniqueFd& fd) {
    if (file.chunk_bytes == 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": its chunk size is 0"));
    }
    Sha256Stream whole;
    for (uint64_t number = 0, at = 0; at < file.bytes; ++number) {
      const uint64_t end = at + std::min(file.chunk_bytes, file.bytes - at);
      const std::string where = absl::StrCat(path, ": chunk ", number);
      Sha256Stream chunk;
      while (at < end) {
        if (cancel_.cancelled()) return absl::CancelledError(absl::StrCat(where, ": cancelled"));
        const std::span<std::byte> piece =
            std::span(buffer_).first(std::min<uint64_t>(buffer_.size(), end - at));
        const auto got = os_.ReadAt(fd, at, piece);
        if (!got.ok()) return AtPath(got.status(), where);
        if (*got != piece.size()) {
          return absl::DataLossError(absl::StrCat(where, ": the file ends at byte ", at + *got));
        }
        chunk.Update(piece);
        whole.Update(piece);
        progress_.Add(piece.size());
        at += piece.size();
        pace_.Rest(piece.size(), cancel_);
      }
      const Digest found = chunk.Finish();
      if (number >= file.chunks.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": the manifest has no digest for it"));
      }
      if (found != file.chunks[number]) return Differs(where, found, file.chunks[number]);
    }
    const Digest found = whole.Finish();
    return found == file.sha256 ? absl::OkStatus() : Differs(path, found, file.sha256);
  }

 private:
  static constexpr size_t kBufferBytes = size_t{1} << 20;

  Os& os_;
  LoadPacer::Worker pace_;
  const CancelToken& cancel_;
  ProgressMeter& progress_;
  std::vector<std::byte> buffer_;
};

}  // namespace

Loader::Loader(Os& os, Clock& clock, Store& store, VerifiedFiles& verified, Executor& executor,
               RegionCache& regions, BudgetPool& host, BudgetPool& memlock,
               ContentsIndexer& indexer, IndexBuilder& index_builder, Machine& machine,
               LoaderOptions options)
    : os_(os),
      clock_(clock),
      store_(store),
      verified_(verified),
      executor_(executor),
      regions_(regions),
      host_(host),
      memlock_(memlock),
      indexer_(indexer),
      index_builder_(index_builder),
      machine_(machine),
      options_(Normal(std::move(options))),
      pacer_(os, clock, options_.pace, options_.cores) {}

void Loader::UseFdStore(Parking& parking, RestoredMemory& restored) {
  parking_ = &parking;
  restored_ = &restored;
  if (devices_ != nullptr) restored.UseDevices(*devices_);
}

void Loader::UseDevices(DeviceTier& devices) {
  devices_ = &devices;
  if (restored_ != nullptr) restored_->UseDevices(devices);
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> Loader::Load(const LoadRequest& request) {
  return LoadJob(*this, request).Run();
}

absl::StatusOr<VersionFiles> Loader::OpenPaced(const LoadRequest& request,
                                               const CancelToken& cancel, ProgressMeter& progress) {
  std::optional<LoadPacer::Worker> pace;  // Nobody is at work until there is something to hash.
  uint64_t paced_bytes = 0;
  return store_.OpenVersion(request.model, request.version, [&](uint64_t done_bytes) {
    progress.SetDone(done_bytes);
    if (!pace.has_value()) pace.emplace(pacer_);
    pace->Rest(done_bytes - std::exchange(paced_bytes, done_bytes), cancel);
    return !cancel.cancelled();
  });
}

absl::Status Loader::Verify(const LoadRequest& request) {
  const auto cancel = request.cancel != nullptr ? request.cancel : std::make_shared<CancelToken>();
  const absl::Status cancelled = absl::CancelledError(
      absl::StrCat("verification of ", request.model, "@", request.version, ": it was cancelled"));
  ProgressMeter progress(clock_, request.progress);
  progress.Begin("open", 0);
  const auto opened = OpenPaced(request, *cancel, progress);
  if (cancel->cancelled()) return cancelled;
  if (!opened.ok()) return opened.status();

  const std::vector<ManifestFile>& files = opened->manifest->files;
  const std::string dir =
      absl::StrCat(store_.root(), "/models/", request.model, "/versions/", request.version, "/");
  progress.Begin("verify", opened->manifest->TotalBytes());
  // The digest of a whole file cannot be computed in parts, so here the files go in parallel.
  std::vector<absl::Status> results(files.size());
  std::atomic<size_t> next{0};
  const size_t workers = std::min(static_cast<size_t>(options_.threads), files.size());
  RunOnWorkers(executor_, static_cast<int>(workers), [&] {
    const ScopedIoPriority priority(os_, options_.io_priority);
    FileCheck check(os_, pacer_, *cancel, progress);
    for (size_t i = next.fetch_add(1); i < files.size(); i = next.fetch_add(1)) {
      results[i] = check.Run(dir + files[i].path, files[i], opened->files[i]);
      if (results[i].ok()) {
        verified_.Record(opened->infos[i], files[i].sha256);
      } else if (absl::IsDataLoss(results[i])) {
        verified_.Forget(opened->infos[i]);
      }
    }
  });
  if (cancel->cancelled()) return cancelled;
  // Bytes that are bad stay bad; what else went wrong, somewhere else, may be over the next time.
  for (const absl::Status& result : results) {
    if (absl::IsDataLoss(result) && ErrnoOf(result) == 0) return result;
  }
  for (const absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  return absl::OkStatus();
}

}  // namespace modelhost
