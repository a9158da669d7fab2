// The state behind ModelManager. Included by model_manager.cc and the manager_*.cc files only.
//
// Everything here lives on the control thread. Work that blocks goes through OnLongPool or
// OnShortPool, which hand its result to a continuation on the control thread and count it, so that
// Stop knows when all is back.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/registry/lifecycle_policy.h"
#include "daemon/registry/model_manager.h"
#include "daemon/registry/operation_log.h"

namespace modelhost {

// One version, from the day it was found in the store until it is gone from there and from memory.
// Its tracks are changed by Move, SetHealth and SetResidency only.
struct VersionRecord : VersionTracks {
  VersionKey key;
  absl::Status error;
  std::optional<Digest> digest;
  uint64_t file_bytes = 0;
  std::shared_ptr<const Manifest> manifest;  // As a scan read it, without chunks; may be null.
  absl::Time created;
  bool on_disk = true;

  std::shared_ptr<const ResidentVersion> resident;  // In READY and DRAINING.
  std::shared_ptr<CancelToken> cancel;              // In RESERVED and LOADING.
  // While a resident version is loaded again beside what is there (SUSPECT, or repaired on disk).
  std::shared_ptr<CancelToken> reload;
  LoadProgress progress;
  absl::Duration load_started;

  // Who wants it READY. Told once, with what came of it.
  struct Waiter {
    OperationId operation = 0;  // The load, swap or unload; 0: the daemon itself, for a label.
    std::function<void(const absl::Status&)> done;
    bool wants_load = true;  // False: an unload that waits for the load to come to rest.
  };
  std::vector<Waiter> waiters;

  uint32_t holds = 0;  // Swaps and label moves under way that count on it being READY.
  absl::Time last_used;
  TimerId keep_timer = 0;   // keep_previous, while READY without a label.
  TimerId drain_timer = 0;  // The deadline of an unload.
  absl::Duration drain_started;
  // The last answer of MayServe, and to what.
  struct Verdict {
    const ResidentVersion* resident = nullptr;
    std::shared_ptr<const MachineFacts> facts;
    uint64_t policy = 0;
    absl::Status status;
  };
  mutable Verdict verdict;

  OperationId unload = 0;  // The operation that drains it; 0: nobody asked, keep_previous was over.
  bool drain_deadline_hit = false;
};

// A change of labels: checked and applied on the control thread, made durable in between on the
// pool. One at a time, in order.
struct LabelTransaction {
  struct Move {
    std::string model;
    std::string label;
    uint64_t to = 0;  // 0: remove.
    std::optional<uint64_t> if_current;
    bool record_previous = true;
  };
  std::vector<Move> moves;
  std::function<absl::Status()> still_wanted;
  struct Done {
    std::vector<LabelChange> changes;
    absl::Duration flip;
  };
  std::function<void(absl::StatusOr<Done>)> done;
};

struct PendingAcquire {
  SessionId session = 0;
  uint32_t uid = 0;
  std::vector<AcquireRef> refs;
  ModelManager::WaitFor wait_for = ModelManager::WaitFor::kAnything;
  TimerId timer = 0;
  ModelManager::AcquireDone done;
};

struct PendingUpload {
  UploadTicket ticket{};
  uint32_t uid = 0;
  PublishRequest request;
  std::vector<UniqueFd> fds;
  TimerId timer = 0;
};

struct PendingSwap {
  SwapRequest request;
  OperationId operation = 0;
  size_t not_ready = 0;
  std::set<VersionKey> held;  // READY, and kept so until the swap is over.
  bool flipping = false;
  absl::Duration longest_load;
  std::map<VersionKey, LoadProgress> progress;
};

struct ModelBook {
  ModelPolicy file_policy;
  std::string policy_error;   // Of the last scan; the policy is then that of the last good one.
  bool policy_known = false;  // There was a good one.
  EffectivePolicy policy;
  uint64_t policy_number = 1;                  // Another one whenever `policy` was set.
  std::shared_ptr<const AccessPolicy> access;  // Null: the daemon's.
  std::vector<ScannedVersion> invalid;
  std::deque<EventRecord> events;
};

struct ModelManager::Impl {
  Impl(Deps deps_in, ManagerOptions options_in, LabelFile labels_in);

  // --- model_manager.cc
  // Runs `work` on one of the two executors and then `then(result)` on the control thread.
  template <typename Work, typename Then>
  void Run(Executor& executor, Work work, Then then) {
    ++inflight;
    executor.Post([this, work = std::move(work), then = std::move(then)]() mutable {
      auto result = work();
      deps.loop.Post([this, then = std::move(then), result = std::move(result)]() mutable {
        then(std::move(result));
        --inflight;
        MaybeStopped();
      });
    });
  }
  // Reads or writes weights: takes as long as there are bytes.
  template <typename Work, typename Then>
  void OnLongPool(Work work, Then then) {
    Run(deps.pool, std::move(work), std::move(then));
  }
  // Everything else that blocks. Never behind a load: a rollback must not wait for one.
  template <typename Work, typename Then>
  void OnShortPool(Work work, Then then) {
    Run(deps.short_work, std::move(work), std::move(then));
  }
  // Frees gigabytes where nobody waits for it.
  void Drop(std::shared_ptr<const ResidentVersion> resident);
  void CancelWork();
  void Tell(const std::function<void(Observer&)>& what);
  void Note(const VersionKey& key, const std::string& what, const std::string& detail);
  ModelBook& Book(const std::string& model);
  const EffectivePolicy& PolicyOf(const std::string& model);
  VersionRecord* Find(const VersionKey& key);
  const VersionRecord* Find(const VersionKey& key) const;
  std::vector<std::string> LabelsOf(const VersionKey& key) const;
  // What lifecycle_policy.h decides by.
  VersionFacts FactsOf(const VersionRecord& record) const;
  // False: the tables forbid it (`checked`), which is counted and told.
  bool Took(const VersionRecord& record, absl::string_view track, absl::string_view from,
            absl::string_view to, const absl::Status& checked);
  VersionSnapshot Snapshot(const VersionRecord& record) const;
  ModelSnapshot SnapshotModel(const std::string& name, const ModelBook& book) const;
  void Changed(const VersionRecord& record);
  void UpdateReady();
  std::vector<std::string> NotReadyReasons() const;
  void MaybeStopped();
  // `near`: with the name that was probably meant, which costs more than a look-up.
  absl::Status NoSuchModel(const std::string& model, bool near = true) const;
  absl::Status NoSuchVersion(const VersionKey& key) const;
  static absl::Status StoppingError();
  absl::Status SuspectError(const VersionRecord& record) const;

  // --- manager_loads.cc
  bool Move(VersionRecord& record, Phase to);
  // Makes the version READY; `waiter.done` runs once, maybe before this returns.
  void EnsureReady(const VersionKey& key, VersionRecord::Waiter waiter);
  void StartLoad(VersionRecord& record);
  void OnLoadProgress(const VersionKey& key, const LoadProgress& progress);
  void FinishLoad(const VersionKey& key,
                  absl::StatusOr<std::shared_ptr<const ResidentVersion>> loaded);
  // Puts a loaded version into its record: READY, with the health that its tier gives it.
  void Adopt(VersionRecord& record, std::shared_ptr<const ResidentVersion> resident);
  absl::Status CheckLabelDigests(const VersionRecord& record, const ResidentVersion& loaded) const;
  LoadRequest MakeLoadRequest(const VersionKey& key, std::shared_ptr<CancelToken> cancel);
  // Loads what is resident once more, with its files as they are now, and then takes the old bytes'
  // place. The version stays READY all the time; a failure leaves it as it is.
  void StartReload(VersionRecord& record);
  void FinishReload(const VersionKey& key, const std::shared_ptr<CancelToken>& token,
                    absl::StatusOr<std::shared_ptr<const ResidentVersion>> loaded);
  // True when `status` is a refusal of a budget that room is being made in; the load starts again
  // when it is there.
  bool WaitForRoom(VersionRecord& record, const absl::Status& status);
  // Bytes of a pool that idle versions hold and nobody else shares.
  uint64_t EvictableBytes(const BudgetPool& pool) const;
  // In what is free, or can be made free by evicting idle versions.
  bool Fits(const BudgetPool& pool, uint64_t need_bytes) const;
  absl::Status WithHolders(const absl::Status& status) const;
  void TellWaiters(VersionRecord& record, const absl::Status& status);
  void TellLoadWaiters(VersionRecord& record, const absl::Status& status);
  void DropWaiters(OperationId operation, const absl::Status& why);
  void CancelLoad(VersionRecord& record);

  // --- manager_serving.cc
  // FAILED_PRECONDITION when a resident version lacks what its policy asks for by now, or requires
  // what the machine is known not to be. Whoever hands it out or labels it asks this first.
  absl::Status MayServe(const VersionRecord& record) const;
  // The same for what a load has just brought.
  absl::Status MayServe(const VersionKey& key, const ResidentVersion& resident,
                        const MachineFacts& facts) const;
  void SetPolicy(ModelBook& book, EffectivePolicy policy);
  void RetryFailed();
  void LookAtMachine();
  void TellRefused();

  // --- manager_unload.cc
  // After a label or lease went: starts or stops the keep_previous clock.
  void ReviewKeeping(VersionRecord& record);
  void BeginDrain(VersionRecord& record, OperationId unload);
  void StopDrain(VersionRecord& record);
  void MaybeUnload(VersionRecord& record);
  void StartUnload(VersionRecord& record, bool deadline);
  void FinishUnload(const VersionKey& key, absl::Duration started);
  void ForgetIfGone(const VersionKey& key);

  // --- manager_health.cc
  void ScheduleHealthCheck();
  // True when it is what it was asked to be, then.
  bool SetHealth(VersionRecord& record, HealthState to, HealthCause cause,
                 const std::string& detail = "");
  // Of a resident version whose source is as it was.
  HealthState GoodHealth(const VersionRecord& record);
  // Host bytes came, were replaced, or went.
  bool SetResidency(VersionRecord& record, HostTier to);
  void Hold(VersionRecord& record) { ++record.holds; }
  void Unhold(const VersionKey& key);

  // --- manager_labels.cc
  void Enqueue(LabelTransaction transaction);
  void RunNextTransaction();
  void ApplyTransaction(LabelTransaction& transaction, LabelFile next,
                        const std::vector<LabelChange>& changes, const absl::Status& saved);
  uint64_t LabelVersion(const std::string& model, const std::string& label) const;
  // Bytes that a load of it would book; `counted` are the files that the same plan counts already.
  uint64_t NeedBytes(const VersionRecord& record, std::set<Digest>& counted);
  absl::Status CheckSwap(const SwapRequest& request) const;
  absl::StatusOr<OperationId> StartSwap(SwapRequest request, OperationKind kind, uint32_t by);
  void SwapTargetReady(OperationId operation, const VersionKey& key, const absl::Status& status);
  void FlipSwap(OperationId operation);
  void FinishSwap(OperationId operation, const absl::Status& status);
  void SupersedeSwaps(const SwapRequest& request, OperationId by);
  void RestoreLabels();
  void AnnounceLabels(const VersionRecord& record);

  // --- manager_grants.cc
  absl::StatusOr<std::vector<Grant>> TryAcquire(SessionId session, std::span<const AcquireRef> refs,
                                                bool near = true);
  absl::StatusOr<VersionKey> ResolveRef(const AcquireRef& ref, bool near = true) const;
  bool MayRead(const ModelBook& book, const Peer& peer) const;
  // Looks again at those that wait for something of `model`.
  void RetryPendingAcquires(const std::string& model);
  // At those for whom a scan has the last word.
  void RetryAfterScan();
  void Retry(const std::vector<uint64_t>& ids);
  bool MayBecomeReady(const absl::Status& status, WaitFor wait_for) const;
  PendingAcquire TakePending(uint64_t id);
  void LeaseEnded(const Lease& lease, LeaseChange change);

  // --- manager_publish.cc
  void StartStaging(OperationId operation);
  // Forgets a publish whose descriptors have not all come. False: there is none.
  bool DropUpload(OperationId operation);
  bool KnownBad(const VersionKey& key) const;
  void FinishPublish(OperationId operation, absl::StatusOr<PublishResult> result);

  // --- manager_scan.cc
  void ApplyVerified(VersionRecord& record, const absl::Status& status);
  using ScanResult = absl::StatusOr<std::vector<ScannedModel>>;
  using ScanDone = std::function<void(absl::StatusOr<RescanResult>)>;
  void ScanAgain(ScanDone done);
  void RunScan();
  using ModelAccess = std::map<std::string, std::shared_ptr<const AccessPolicy>>;
  absl::StatusOr<RescanResult> TakeScan(ScanResult scan, const ModelAccess& access);
  RescanResult ApplyScan(std::vector<ScannedModel> models, const ModelAccess& access);
  void ApplyScannedPolicy(const ScannedModel& model, const ModelAccess& access);
  void ApplyInvalidVersion(ModelBook& book, const std::string& model,
                           const ScannedVersion& version);
  void ApplyScannedVersion(const std::string& model, const ScannedVersion& version,
                           RescanResult& result);

  Deps deps;
  ManagerOptions options;
  LabelFile labels;
  std::vector<Observer*> observers;

  std::map<VersionKey, VersionRecord> versions;
  std::map<std::string, ModelBook> models;
  LeaseTable leases;
  OperationLog operations;

  std::deque<LabelTransaction> transactions;
  bool saving_labels = false;
  // Targets of a write of the labels that failed: whether the disk has it is not known before
  // another one succeeds, so nothing of theirs may be deleted.
  std::set<VersionKey> maybe_labelled;
  bool labels_in_doubt = false;  // Since such a write, and what it was before is not there again.
  TimerId restore_timer = 0;
  std::map<OperationId, PendingSwap> swaps;
  std::map<OperationId, PendingUpload> uploads;
  struct RunningPublish {
    PublishRequest request;
    std::shared_ptr<CancelToken> cancel;
  };
  std::map<OperationId, RunningPublish> publishes;
  std::map<OperationId, std::shared_ptr<CancelToken>> verifies;
  std::map<uint64_t, PendingAcquire> pending_acquires;
  std::map<std::string, std::set<uint64_t>> pending_by_model;
  std::map<SessionId, size_t> pending_by_session;
  std::map<uint32_t, size_t> pending_by_uid;
  uint64_t next_pending = 1;
  std::vector<VersionKey> waiting_for_room;

  absl::Time started_wall;
  std::string store_error;
  std::shared_ptr<CancelToken> look;  // At the machine, under way.
  bool look_again = false;
  bool scanning = false;
  std::vector<ScanDone> scan_waiters;
  bool scanned = false;
  bool stopping = false;
  bool was_ready = false;
  TimerId health_timer = 0;
  uint64_t inflight = 0;
  uint64_t invalid_transitions = 0;
  Task on_stopped;
};

}  // namespace modelhost
