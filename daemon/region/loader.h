// Makes a version resident: open, book, map, prefault and verify in one pass, lock, index.
//
// Runs on the calling (pool) thread and fans the chunk pass out over `executor`. Regions already
// resident under the same digest and residency are taken as they are: no byte is read for them.
// Bytes are booked before the first is read. On any error or cancellation everything made so far is
// undone.
//
// Errors: NOT_FOUND, INVALID_ARGUMENT (malformed; permanent), DATA_LOSS (digest differs, or EIO),
// RESOURCE_EXHAUSTED (budget or memlock, with the numbers), FAILED_PRECONDITION (a required file is
// missing, or the version is for another machine), CANCELLED within 100 ms of the token; and those
// of DeviceTier::Make, where the policy wants copies on GPUs.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/machine_facts.h"
#include "daemon/platform/os.h"
#include "daemon/platform/task_runner.h"
#include "daemon/region/cancel_token.h"
#include "daemon/region/contents_indexer.h"
#include "daemon/region/device_plan.h"
#include "daemon/region/device_tier.h"
#include "daemon/region/load_pacer.h"
#include "daemon/region/memory_budget.h"
#include "daemon/region/parking.h"
#include "daemon/region/progress_meter.h"
#include "daemon/region/region_cache.h"
#include "daemon/region/resident_version.h"
#include "daemon/region/restored_memory.h"
#include "daemon/region/version_contents.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"

namespace modelhost {

enum class VerifyPolicy { kFull, kManifest, kNone };

struct LoadRequest {
  std::string model;
  uint64_t version = 0;
  EffectivePolicy policy;
  std::shared_ptr<CancelToken> cancel;
  std::function<void(const LoadProgress&)> progress;  // Any thread, at most about 10 a second.
};

// Implemented in daemon/publish: lays the flat index out and seals it.
class IndexBuilder {
 public:
  virtual ~IndexBuilder() = default;
  // `version` has everything but index, format, tensor counts and report filled in.
  // `plan` says which tensors are on GPUs, and where.
  virtual absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                             const std::vector<ComponentIndex>& components,
                                             const DevicePlan& plan) = 0;
};

struct LoaderOptions {
  VerifyPolicy verify = VerifyPolicy::kFull;
  MemlockPolicy memlock = MemlockPolicy::kBestEffort;
  int threads = 2;  // Of one load. 0: one per core, at most 8.
  std::string io_priority = "best-effort:6";
  LoadPace pace = {};
  int cores = 0;  // Of the machine. 0: ask it.
};

class Loader {
 public:
  Loader(Os& os, Clock& clock, Store& store, VerifiedFiles& verified, Executor& executor,
         RegionCache& regions, BudgetPool& host, BudgetPool& memlock, ContentsIndexer& indexer,
         IndexBuilder& index_builder, Machine& machine, LoaderOptions options);

  // Loads take what they can from `restored`, and leave what they made in `parking`. Before the
  // first load; both outlive the loader.
  void UseFdStore(Parking& parking, RestoredMemory& restored);
  // Loads make the copies on GPUs that policies ask for. Before the first load; it outlives the
  // loader and every version.
  void UseDevices(DeviceTier& devices);

  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Load(const LoadRequest& request);

  // Re-reads every byte of a version's files and compares it with the manifest: each chunk and each
  // whole file. Changes nothing but the record of what is verified. DATA_LOSS names the file and
  // the first bad chunk. CANCELLED as for Load.
  absl::Status Verify(const LoadRequest& request);

  // How many clients there are that a load could disturb (load_pacer.h). Any thread.
  void SetClients(size_t clients) { pacer_.SetClients(clients); }
  size_t clients() const { return pacer_.clients(); }

 private:
  friend class LoadJob;  // One call of Load (load_job.h).

  // Opens it for a load or a verification. What has no manifest is hashed, at the pace of loads.
  absl::StatusOr<VersionFiles> OpenPaced(const LoadRequest& request, const CancelToken& cancel,
                                         ProgressMeter& progress);

  Os& os_;
  Clock& clock_;
  Store& store_;
  VerifiedFiles& verified_;
  Executor& executor_;
  RegionCache& regions_;
  BudgetPool& host_;
  BudgetPool& memlock_;
  ContentsIndexer& indexer_;
  IndexBuilder& index_builder_;
  Machine& machine_;
  Parking* parking_ = nullptr;  // Null, as the next: without an fd store.
  RestoredMemory* restored_ = nullptr;
  DeviceTier* devices_ = nullptr;  // Null: everything stays on the host.
  const LoaderOptions options_;
  LoadPacer pacer_;
};

}  // namespace modelhost
