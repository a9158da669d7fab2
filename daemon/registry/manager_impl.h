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
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/registry/capacity_plan.h"
#include "daemon/registry/commit_gate.h"
#include "daemon/registry/desired_book.h"
#include "daemon/registry/desired_plan.h"
#include "daemon/registry/event_ring.h"
#include "daemon/registry/lifecycle_policy.h"
#include "daemon/registry/model_manager.h"
#include "daemon/registry/operation_log.h"
#include "daemon/store/operation_journal.h"

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

  int attempts = 0;          // Failed loads in a row that were, or are to be, tried again.
  TimerId retry_timer = 0;   // Until the next of them, in FAILED.
  OperationId deleting = 0;  // Nothing may begin on it any more.

  uint32_t holds = 0;  // Swaps and label moves under way that count on it being READY.
  absl::Time last_used;
  bool from_before = false;  // Loaded at the start because the last daemon had it.
  TimerId keep_timer = 0;    // keep_previous, while READY without a label.
  TimerId drain_timer = 0;   // The deadline of an unload.
  absl::Duration drain_started;
  // The last answer of MayServe, and to what.
  struct Verdict {
    const ResidentVersion* resident = nullptr;
    std::shared_ptr<const MachineFacts> facts;
    uint64_t policy = 0;
    absl::Status status;
  };
  mutable Verdict verdict;

  // Of copies on GPUs: failed tries to have one again, and when the next may begin.
  int device_tries = 0;
  absl::Duration next_device_try = absl::ZeroDuration();
  bool renew_labels = false;  // Its copies are others, and the labels have not said so yet.
  // Since when its load has waited for room, in all its turns; infinite: it does not wait.
  absl::Duration room_since = absl::InfiniteDuration();

  OperationId unload = 0;  // The operation that drains it; 0: nobody asked, keep_previous was over.
  // The swap of strategy "resource" that it leaves for, with its label: nobody may have it back
  // but that swap.
  OperationId leaves_for = 0;
  bool drain_deadline_hit = false;
  std::vector<RegionBytes> freeing;  // In UNLOADING: what will be given back.
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
    bool renew = false;  // It names that version already, and gets a new generation.
  };
  std::vector<Move> moves;
  std::function<absl::Status()> still_wanted;
  // Of a swap. Labels that it has withdrawn are its own; nobody else's transaction moves them.
  OperationId swap = 0;
  // Nothing is written: the labels go from the page, or come back to it, and stay in labels.json.
  enum class Page { kMove, kWithdraw, kReinstate };
  Page page = Page::kMove;
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
  bool complete = false;  // All is here; it waits for another publish of the same version.
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
  SwapStrategy strategy = SwapStrategy::kAvailability;
  // Strategy "resource" only: manager_resource.cc.
  std::vector<VersionKey> old;    // Leave before anything is loaded.
  std::vector<VersionKey> evict;  // So do these.
  std::set<VersionKey> draining;  // Of these: still there.
  size_t not_back = 0;            // Of these: to be loaded again.
  bool withdrawn = false;         // The labels are not in the page.
  bool restoring = false;         // It has failed; the old ones are being brought back.
  absl::Status failure;           // Why.
  std::string not_restored;       // Which old versions could not be loaded again, and why.
  absl::Duration gap_started;
};

// A load that waits for room.
struct RoomWaiter {
  VersionKey key;
  absl::Duration since;  // On the monotonic clock.
  PoolBytes least;       // What it was refused, once it has asked.
  absl::Status refused;  // How.
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
  // A load that will not be: who waits for it is told why.
  void RefusedLoad(VersionRecord& record, const absl::Status& status);
  void TellWaiters(VersionRecord& record, const absl::Status& status);
  void TellLoadWaiters(VersionRecord& record, const absl::Status& status);
  void DropWaiters(OperationId operation, const absl::Status& why);
  void CancelLoad(VersionRecord& record);

  // --- manager_retry.cc
  // After a load that failed: true when it will be tried again, and who waits goes on waiting.
  bool RetryLater(VersionRecord& record, const absl::Status& status);
  void ScheduleRetry(VersionRecord& record, absl::Duration delay);
  // What a label names is wanted: looked after, when it came to rest without being READY for a
  // reason that may pass.
  void KeepWish(VersionRecord& record);
  // An explicit request does not wait for the next try.
  void RetryNow(VersionRecord& record);
  void StopRetrying(VersionRecord& record);
  // The operations that wait for a load of it.
  void UpdateWaiting(const VersionRecord& record,
                     const std::function<void(OperationSnapshot&)>& change);

  // --- manager_events.cc
  void Note(const VersionKey& key, const std::string& what, const std::string& detail);
  void NoteOperation(const OperationSnapshot& operation);

  // --- manager_journal.cc
  // Takes up what an earlier daemon left. In the constructor: reads a file.
  void RestoreOperations();
  void TellRestored();
  void JournalOperation(const OperationSnapshot& operation);
  void FlushJournal();
  void JournalWritten(const absl::Status& status);

  // --- manager_delete.cc
  // Why it may not be removed now, or OK.
  absl::Status CheckDelete(const VersionKey& key) const;
  // The operation that is about to remove it, known to the books or not; 0: none.
  OperationId RemovedBy(const VersionKey& key) const;
  absl::Status CheckNotRemoved(const VersionKey& key) const;
  void RemoveFromDisk(const VersionKey& key);
  void ForgetDeleted(const VersionKey& key);
  absl::Status CancelDelete(OperationId operation, const absl::Status& cancelled);
  void FinishDelete(const VersionKey& key, OperationId id, const absl::Status& status);
  std::vector<std::string> DeleteWarnings(const VersionKey& key) const;
  // --- manager_gc.cc
  // Of one model, or (empty) of all.
  std::vector<VersionKey> Garbage(const std::string& model) const;
  struct RunningGc {
    std::string model;
    std::vector<VersionKey> versions;
    std::shared_ptr<CancelToken> cancel = std::make_shared<CancelToken>();
  };
  struct GcOutcome {
    absl::Status status;
    uint64_t removed = 0;
    uint64_t bytes = 0;
    uint64_t freed_bytes = 0;
  };
  void StartGc(OperationId id);
  GcOutcome RunGc(OperationId id, const RunningGc& gc);
  void GcMoved(OperationId id, const VersionKey& key, bool gone, uint64_t removed);
  // --- manager_room.cc
  // Loads that nobody but operations of `leaving` wait for are about to be cancelled.
  CapacityPicture Picture(const std::set<OperationId>& leaving = {});
  WantedVersion Want(const VersionRecord& record);
  Stay StayOf(const VersionRecord& record) const;
  std::vector<RegionBytes> Regions(const ResidentVersion& resident) const;
  absl::Status WithHolders(const absl::Status& status);
  // Starts the load of a STAGED version, or lets it wait for its turn.
  void AskForRoom(VersionRecord& record);
  bool WaitsForRoom(const VersionKey& key) const;
  void QueueForRoom(const VersionKey& key, bool first);
  // True when `status` is a refusal of a budget that room is being made in; the load starts again
  // when it is there.
  bool WaitForRoom(VersionRecord& record, const absl::Status& status);
  void LookForRoom();
  void Admitted(const VersionKey& key);  // It has booked, or will not.
  void ArmRoomTimer();
  void ExpireRoomWaiters();
  void RefuseRoom(VersionRecord& record, const RoomWaiter& waiter, const std::string& why);
  void EvictVersions(const std::vector<VersionKey>& victims, const VersionKey& wanted);

  // --- manager_device.cc
  // Host, memlock, and from the moment that they are known one per GPU, always in this order.
  std::vector<BudgetPool*> Pools() const;
  void AddDeviceRegions(const ResidentVersion& resident, std::vector<RegionBytes>& regions) const;
  void AddImageRegions(const DeviceImage& image, std::vector<RegionBytes>& regions) const;
  void AddDeviceWant(const VersionRecord& record, WantedVersion& want);
  bool SetDeviceResidency(VersionRecord& record, DeviceResidency to);
  static DeviceResidency DeviceResidencyOf(const ResidentVersion& resident);
  // Null: none is asked for, or there is none and that is all right.
  absl::StatusOr<const DeviceImage*> DeviceFor(const VersionRecord& record,
                                               const AcquireRef& ref) const;
  // Such a refusal of DeviceFor stays one however long somebody waits.
  static bool NeverOnDevice(const absl::Status& status);
  static const char* DeviceTransport(abi::DeviceMode mode);
  // It is what `record` (may be null) has on that GPU now.
  static bool IsCurrent(const VersionRecord* record, const DeviceImage& image);
  // Maybe the last owner: not on the control thread.
  void DropImages(LeaseTable::Images images);
  void ScheduleDeviceCheck();
  void TakeLostDevices();
  // True: some is being let go of, and then looked at again.
  bool LetGoOfLost();
  bool WantsCopy(VersionRecord& record);
  void RenewLabels(const VersionKey& key);

  // --- manager_resource.cc
  StrategyChoice PlanFor(const SwapRequest& request, SwapStrategy asked);
  std::vector<VersionKey> OldOf(const SwapRequest& request) const;
  // FAILED_PRECONDITION: it leaves for a swap.
  absl::Status LeavesError(const VersionRecord& record) const;
  absl::Status WithdrawnError(const std::string& model, const std::string& label) const;
  absl::Status CheckResourceTargets(const SwapRequest& request) const;
  void LoadTargets(OperationId operation);
  void WithdrawLabels(OperationId operation);
  void DrainOld(OperationId operation);
  void TellDrainOfSwap(OperationId operation);
  void DrainDeadlineOfSwap(VersionRecord& record, absl::Duration timeout);
  void OldLeft(OperationId operation, const VersionKey& key);
  void RestoreSwap(OperationId operation, const absl::Status& failure);
  void OldIsBack(OperationId operation, const VersionKey& key, const absl::Status& status);
  void EndRestore(OperationId operation);
  void ApplyPageOnly(LabelTransaction& transaction);

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
  void SetDrainDeadline(VersionRecord& record, absl::Duration timeout, bool release);
  // `by`: the operation that wants it again; 0: a client, or the daemon itself.
  void StopDrain(VersionRecord& record, OperationId by);
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
  absl::Status CheckSwap(const SwapRequest& request) const;
  absl::StatusOr<OperationId> StartSwap(SwapRequest request, OperationKind kind, uint32_t by);
  void SwapTargetReady(OperationId operation, const VersionKey& key, const absl::Status& status);
  void FlipSwap(OperationId operation);
  void FinishSwap(OperationId operation, const absl::Status& status);
  // Those under way that this one would take the place of.
  std::set<OperationId> SupersededSwaps(const SwapRequest& request) const;
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
  void LeaseEnded(Lease lease, LeaseChange change);
  // Its ticket, if it has one, is not good any more.
  void EndTicket(LeaseId lease);
  // After labels of `model` moved.
  void ReviewStale(const std::string& model);
  bool IsStale(const Lease& lease) const;

  // --- manager_desired.cc
  void FollowDesired(const std::string& file);
  void LookAtDesired();
  void TakeDesired(uint64_t look, DesiredText read);
  // Whether it says something else than before.
  bool TakeDesiredText(std::string text);
  void SetDesiredState(DesiredFileState state, std::string error);
  void TellDesiredFile(bool changed, std::vector<std::string> watch);
  void TellDesiredRows(const std::vector<DesiredRow>& rows);
  // After anything that it looks at may have changed: soon, once for all that happens in one turn.
  void ReviewDesired();
  void RunDesired();
  std::vector<DesiredFacts> DesiredFactsNow() const;
  std::pair<DesiredFacts::Target, std::string> DesiredTarget(const VersionKey& key) const;
  void StartDesired(const DesiredFacts& fact);
  void DesiredOperation(const OperationSnapshot& operation);
  void DesiredFailed(const DesiredBook::Name& name, const absl::Status& why);
  DesiredSnapshot SnapshotDesired() const;
  void StopDesired();

  // --- manager_publish.cc
  // The publish of this version that is at work; 0: none.
  OperationId PublishedBy(const VersionKey& key) const;
  // It has ended: the next that waits with all its descriptors may begin.
  void StartNextPublish(const VersionKey& key);
  void StartStaging(OperationId operation);
  // Forgets a publish whose descriptors have not all come. False: there is none.
  bool DropUpload(OperationId operation);
  bool KnownBad(const VersionKey& key) const;
  void FinishPublish(OperationId operation, absl::StatusOr<PublishResult> result);

  // --- manager_restore.cc
  // Loads what the last daemon had resident, labelled or not.
  void LoadRestored();
  // Of a client that had them before the restart: loads those that nothing else would.
  void LoadDeclared(SessionId session, std::span<const AcquireRef> refs);
  void LoadFromBefore(const VersionKey& key);
  // What the restart says of a load that ended.
  void NoteRestored(const VersionKey& key, const absl::StatusOr<const LoadReport*>& report);
  void EndGrace();
  RestartSnapshot SnapshotRestart() const;

  // --- manager_scan.cc
  void StartVerify(OperationId operation);
  void FinishVerify(OperationId operation, const VersionKey& key, const absl::Status& status);
  bool VerifyLater(OperationId operation, const absl::Status& status);
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
  DesiredBook desired;

  std::deque<LabelTransaction> transactions;
  bool saving_labels = false;
  // Targets of a write of the labels that failed: whether the disk has it is not known before
  // another one succeeds, so nothing of theirs may be deleted.
  std::set<VersionKey> maybe_labelled;
  bool labels_in_doubt = false;  // Since such a write, and what it was before is not there again.
  TimerId restore_timer = 0;
  std::map<OperationId, PendingSwap> swaps;
  LeaseTickets lease_tickets;
  std::map<OperationId, PendingUpload> uploads;
  struct RunningPublish {
    PublishRequest request;
    std::shared_ptr<CancelToken> cancel;
    std::shared_ptr<CommitGate> gate = std::make_shared<CommitGate>();
    bool streamed = false;  // As slow as its caller; nobody waits for it.
  };
  std::map<OperationId, RunningPublish> publishes;
  // Those whose version is in place, until it can be used.
  std::map<OperationId, VersionKey> settling;
  struct RunningVerify {
    VersionKey key;
    std::shared_ptr<CancelToken> cancel;
    int attempts = 0;         // That failed for a reason that may pass.
    TimerId retry_timer = 0;  // Until the next one.
    bool stale = false;       // The version was repaired since it opened the files.
  };
  std::map<OperationId, RunningVerify> verifies;
  struct RunningDelete {
    OperationId operation = 0;
    std::shared_ptr<CommitGate> gate = std::make_shared<CommitGate>();
  };
  std::map<VersionKey, RunningDelete> deletes;
  std::map<OperationId, RunningGc> gcs;
  std::map<uint64_t, PendingAcquire> pending_acquires;
  std::map<std::string, std::set<uint64_t>> pending_by_model;
  std::map<SessionId, size_t> pending_by_session;
  std::map<uint32_t, size_t> pending_by_uid;
  uint64_t next_pending = 1;
  std::deque<RoomWaiter> waiting_for_room;
  std::optional<RoomWaiter> admitting;  // Let in from there, and has not booked yet.
  absl::Duration admitted_at;
  TimerId room_timer = 0;
  // Labels that a swap has withdrawn from the page: which swap.
  std::map<std::pair<std::string, std::string>, OperationId> withdrawn;

  OperationJournal journal;
  std::vector<JournalRecord> unwritten;
  bool writing_journal = false;
  bool restored_some = false;
  absl::Status journal_status;
  TimerId journal_timer = 0;  // Until the next try after an error.
  EventRing events;
  std::mt19937_64 random{std::random_device()()};

  absl::Time started_wall;
  absl::Duration grace_ends = absl::ZeroDuration();  // Of the restart, on the monotonic clock.
  int grace_rounds = 0;
  bool in_grace = true;
  std::set<VersionKey> restoring;  // Offered by the fd store, and not loaded yet.
  RestartSnapshot restart;
  std::string store_error;
  std::shared_ptr<CancelToken> look;  // At the machine, under way.
  bool look_again = false;
  bool scanning = false;
  std::vector<ScanDone> scan_waiters;
  bool scanned = false;
  bool stopping = false;
  bool was_ready = false;
  TimerId health_timer = 0;
  TimerId device_timer = 0;
  bool letting_go = false;  // Of lost copies, on the pool.
  uint64_t inflight = 0;
  uint64_t invalid_transitions = 0;
  Task on_stopped;
};

}  // namespace modelhost
