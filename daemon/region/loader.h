// Makes a version resident: open, book, map, prefault and verify in one pass, lock, index.
//
// Runs on the calling (pool) thread and fans the chunk pass out over `executor`. Regions already
// resident under the same digest and residency are taken as they are: no byte is read for them.
// Bytes are booked before the first is read. On any error or cancellation everything made so far is
// undone.
//
// Errors: NOT_FOUND, INVALID_ARGUMENT (malformed; permanent), DATA_LOSS (digest differs, or EIO),
// RESOURCE_EXHAUSTED (budget or memlock, with the numbers), FAILED_PRECONDITION (required sidecar
// is missing), CANCELLED within 100 ms of the token.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/format/tensor_index.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/os.h"
#include "daemon/platform/task_runner.h"
#include "daemon/region/memory_budget.h"
#include "daemon/region/region_cache.h"
#include "daemon/region/resident_version.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"

namespace modelhost {

// Set from any thread; seen between chunks.
class CancelToken {
 public:
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> cancelled_{false};
};

struct LoadProgress {
  std::string phase;
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
};

enum class VerifyPolicy { kFull, kManifest, kNone };

struct LoadRequest {
  std::string model;
  uint64_t version = 0;
  EffectivePolicy policy;
  std::shared_ptr<CancelToken> cancel;
  std::function<void(const LoadProgress&)> progress;  // Any thread, at most about 10 a second.
};

// What the index builder is told about one weight set.
struct ComponentIndex {
  std::string name;
  TensorIndex index;
};

// Implemented in daemon/publish: lays the flat index out and seals it.
class IndexBuilder {
 public:
  virtual ~IndexBuilder() = default;
  // `version` has everything but index, format, tensor counts and report filled in.
  virtual absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                             const std::vector<ComponentIndex>& components) = 0;
};

struct LoaderOptions {
  VerifyPolicy verify = VerifyPolicy::kFull;
  MemlockPolicy memlock = MemlockPolicy::kBestEffort;
  int threads = 2;
  std::string io_priority = "best-effort:6";
};

class Loader {
 public:
  Loader(Os& os, Clock& clock, Store& store, VerifiedFiles& verified, Executor& executor,
         RegionCache& regions, BudgetPool& host, BudgetPool& memlock, IndexBuilder& index_builder,
         LoaderOptions options);

  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Load(const LoadRequest& request);

  // Re-reads every byte of a version from disk and compares with its manifest. Changes nothing.
  // DATA_LOSS names the file and the first bad chunk.
  absl::Status Verify(const LoadRequest& request);

 private:
  Os& os_;
  Clock& clock_;
  Store& store_;
  VerifiedFiles& verified_;
  Executor& executor_;
  RegionCache& regions_;
  BudgetPool& host_;
  BudgetPool& memlock_;
  IndexBuilder& index_builder_;
  const LoaderOptions options_;
};

}  // namespace modelhost
