// One parallel pass over the chunks of many files: read, copy where asked, verify.
//
//   in place  4 MiB:  Populate -> SHA-256 of the mapped bytes
//   copied    1 MiB:  Populate -> ReadAt into a buffer -> SHA-256 of the buffer -> WriteAt
//
// Each piece is read into the page cache through the mapping (large folios, see
// Os::PreferLargePages), then hashed while it is warm. What goes into a copy are the very bytes
// that were hashed. A file that is truncated or fails meanwhile is DATA_LOSS, never a signal
// (sigbus_guard.h).
//
// Errors name the path and the chunk: DATA_LOSS (EIO, truncated, digest differs: both digests),
// RESOURCE_EXHAUSTED (no memory), CANCELLED. Of several bad chunks the first is told.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/os.h"
#include "daemon/platform/task_runner.h"
#include "daemon/region/cancel_token.h"
#include "daemon/region/load_pacer.h"
#include "daemon/region/progress_meter.h"
#include "daemon/store/digest.h"

namespace modelhost {

struct ChunkJob {
  std::string path;                   // For people.
  std::span<const std::byte> mapped;  // The whole file.
  uint64_t chunk_bytes = 0;
  std::span<const Digest> chunks;     // Empty: do not verify.
  const UniqueFd* fd = nullptr;       // The file; used when there is a copy.
  const UniqueFd* copy_to = nullptr;  // As long as the file; null: no copy.
};

// Summed over the workers.
struct ChunkPassTotals {
  absl::Duration reading;
  absl::Duration verifying;
  uint64_t read_bytes = 0;
  uint64_t verified_bytes = 0;
};

struct ChunkPassOptions {
  int threads = 1;
  std::string io_priority = "none";
  LoadPacer* pacer = nullptr;  // Workers rest after their pieces as it says; null: never.
};

absl::StatusOr<ChunkPassTotals> RunChunkPass(Os& os, Clock& clock, Executor& executor,
                                             const ChunkPassOptions& options,
                                             std::span<const ChunkJob> jobs,
                                             const CancelToken& cancel, ProgressMeter& progress);

// "PATH: WHY" with the code and the errno of `status`.
absl::Status AtPath(const absl::Status& status, const std::string& path);

}  // namespace modelhost
