#include "daemon/region/chunk_pass.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/workers.h"

namespace modelhost {
namespace {

// Large enough for the disk, small enough that a cancelled load stops at once: 80 ms at 50 MB/s.
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
// Copied pieces pass through a buffer that should stay in the processor's cache.
constexpr uint64_t kCopyBytes = uint64_t{1} << 20;

struct Chunk {
  const ChunkJob* job;
  uint64_t number;
};

class Pass {
 public:
  Pass(Os& os, Clock& clock, const ChunkPassOptions& options, const CancelToken& cancel,
       ProgressMeter& progress)
      : os_(os), clock_(clock), options_(options), cancel_(cancel), progress_(progress) {}

  void Add(const ChunkJob& job) {
    for (uint64_t number = 0; number * job.chunk_bytes < job.mapped.size(); ++number) {
      chunks_.push_back({&job, number});
    }
  }
  size_t size() const { return chunks_.size(); }

  // Body of each worker.
  void Work() {
    const ScopedIoPriority priority(os_, options_.io_priority);
    std::optional<LoadPacer::Worker> pace;
    if (options_.pacer != nullptr) pace.emplace(*options_.pacer);
    ChunkPassTotals totals;
    std::vector<std::byte> buffer;
    while (true) {
      const size_t index = next_.fetch_add(1);
      if (index >= chunks_.size() || Stopped(index)) break;
      const absl::Status status = Do(chunks_[index], index, pace, buffer, totals);
      if (!status.ok()) Fail(index, status);
    }
    absl::MutexLock lock(&mutex_);
    totals_.reading += totals.reading;
    totals_.verifying += totals.verifying;
    totals_.read_bytes += totals.read_bytes;
    totals_.verified_bytes += totals.verified_bytes;
  }

  absl::StatusOr<ChunkPassTotals> Result() {
    if (cancel_.cancelled()) return absl::CancelledError("cancelled");
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    return totals_;
  }

 private:
  // A chunk before the first bad one is still looked at, so that the first is told.
  bool Stopped(size_t index) const { return cancel_.cancelled() || index > failed_.load(); }

  void Fail(size_t index, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (index >= failed_.load()) return;
    failed_.store(index);
    failure_ = status;
  }

  absl::Status Do(const Chunk& chunk, size_t index, std::optional<LoadPacer::Worker>& pace,
                  std::vector<std::byte>& buffer, ChunkPassTotals& totals) {
    const ChunkJob& job = *chunk.job;
    const uint64_t begin = chunk.number * job.chunk_bytes;
    const uint64_t end = std::min<uint64_t>(begin + job.chunk_bytes, job.mapped.size());
    const bool verify = !job.chunks.empty();
    const bool copy = job.copy_to != nullptr;
    if (copy) buffer.resize(kCopyBytes);
    const SigbusGuard guard(job.mapped.subspan(begin, end - begin));
    Sha256Stream sha256;
    for (uint64_t at = begin; at < end;) {
      if (Stopped(index)) return absl::OkStatus();  // The failure, or the wish, is on record.
      const uint64_t piece_bytes = std::min(copy ? kCopyBytes : kPieceBytes, end - at);
      absl::Duration started = clock_.Monotonic();
      // Adds the time since the last call to `sum`.
      const auto account = [&](absl::Duration& sum) {
        const absl::Duration now = clock_.Monotonic();
        sum += now - started;
        started = now;
      };
      std::span<const std::byte> piece = job.mapped.subspan(at, piece_bytes);
      if (auto read = os_.Populate(piece); !read.ok()) return Bad(chunk, read);
      if (copy) {
        const std::span<std::byte> own = std::span(buffer).first(piece_bytes);
        const auto got = os_.ReadAt(*job.fd, at, own);
        if (!got.ok()) return Bad(chunk, got.status());
        if (*got != piece_bytes) return Bad(chunk, Truncated());
        piece = own;
      }
      account(totals.reading);
      totals.read_bytes += piece_bytes;
      if (verify) {
        sha256.Update(piece);
        account(totals.verifying);
        totals.verified_bytes += piece_bytes;
      }
      if (copy) {
        if (auto put = os_.WriteAt(*job.copy_to, at, piece); !put.ok()) return Bad(chunk, put);
        account(totals.reading);
      }
      if (guard.hit()) return Bad(chunk, Truncated());
      progress_.Add(piece_bytes);
      at += piece_bytes;
      if (pace.has_value()) pace->Rest(piece_bytes, cancel_);
    }
    return verify ? Compare(chunk, sha256.Finish()) : absl::OkStatus();
  }

  static absl::Status Truncated() {
    return ErrnoStatus(EIO, "the file failed, or was truncated, while it was read");
  }

  static absl::Status Bad(const Chunk& chunk, const absl::Status& status) {
    return AtPath(status, absl::StrCat(chunk.job->path, ": chunk ", chunk.number));
  }

  static absl::Status Compare(const Chunk& chunk, const Digest& found) {
    if (chunk.number >= chunk.job->chunks.size()) {
      return Bad(chunk, absl::InvalidArgumentError("the manifest has no digest for it"));
    }
    const Digest& wanted = chunk.job->chunks[chunk.number];
    if (found == wanted) return absl::OkStatus();
    return Bad(chunk, absl::DataLossError(absl::StrCat(
                          "its bytes have SHA-256 ", found.Hex(), ", the manifest says ",
                          wanted.Hex(), " (publish the same bytes again to repair it)")));
  }

  Os& os_;
  Clock& clock_;
  const ChunkPassOptions& options_;
  const CancelToken& cancel_;
  ProgressMeter& progress_;
  std::vector<Chunk> chunks_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> failed_{std::numeric_limits<size_t>::max()};
  absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  ChunkPassTotals totals_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<ChunkPassTotals> RunChunkPass(Os& os, Clock& clock, Executor& executor,
                                             const ChunkPassOptions& options,
                                             std::span<const ChunkJob> jobs,
                                             const CancelToken& cancel, ProgressMeter& progress) {
  Pass pass(os, clock, options, cancel, progress);
  for (const ChunkJob& job : jobs) {
    if (job.chunk_bytes == 0) {
      return absl::InvalidArgumentError(absl::StrCat(job.path, ": its chunk size is 0"));
    }
    pass.Add(job);
  }
  const size_t workers = std::min<size_t>(static_cast<size_t>(options.threads), pass.size());
  RunOnWorkers(executor, static_cast<int>(workers), [&pass] { pass.Work(); });
  return pass.Result();
}

absl::Status AtPath(const absl::Status& status, const std::string& path) {
  absl::Status result(status.code(), absl::StrCat(path, ": ", status.message()));
  status.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

}  // namespace modelhost
