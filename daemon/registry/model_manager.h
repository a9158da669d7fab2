// The verbs: everything an operator or a client can ask for, with no transport in it.
//
//   life of a load   Load/Swap -> StartLoad: STAGED -> RESERVED -> LOADING, Loader on a pool thread
//                    -> result posted back -> READY (grants possible) -> waiting swaps go on
//   life of a swap   all targets READY -> labels.json on a pool thread -> Publish (page) ->
//   observers
//                    -> versions without a label wait keep_previous, then DRAINING -> UNLOADING ->
//                    STAGED
//   life of a lease  Acquire -> Grant (descriptors are the transport's business) -> Release or
//   EndSession
//
// Control thread only, except where a comment says otherwise; nothing here blocks.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/machine_facts.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/region/device_tier.h"
#include "daemon/region/loader.h"
#include "daemon/region/memory_budget.h"
#include "daemon/registry/commit_gate.h"
#include "daemon/registry/events.h"
#include "daemon/registry/gc_policy.h"
#include "daemon/registry/ids.h"
#include "daemon/registry/lease_table.h"
#include "daemon/registry/lease_tickets.h"
#include "daemon/registry/retry_policy.h"
#include "daemon/registry/snapshots.h"
#include "daemon/store/labels.h"
#include "daemon/store/publish.h"
#include "daemon/store/store.h"

namespace modelhost {

struct AcquireRef {
  std::string model;
  std::string label;     // Empty with a fixed version.
  uint64_t version = 0;  // 0: by label.
  Digest digest;         // All zero: any.
  enum class Device : uint8_t { kNone, kIfAny, kRequired };
  Device device = Device::kNone;
  std::string gpu = {};  // UUID of the GPU that a copy is wanted on.
};

struct Grant {
  LeaseId lease = 0;
  VersionKey key;
  std::string label;
  uint64_t generation = 0;  // 0 for a fixed version.
  uint32_t slot = 0;        // abi::kNoSlot for a fixed version.
  std::shared_ptr<const ResidentVersion> resident;
  // Null: no device memory goes along. Lives in `resident`.
  const DeviceImage* device = nullptr;
};

struct SwapTarget {
  std::string model;
  uint64_t version = 0;
};

struct SwapRequest {
  std::vector<SwapTarget> targets;  // [0] is the one that --if-current is about.
  std::string label = kDefaultLabel;
  std::optional<uint64_t> if_current;     // 0: the label must not be set.
  std::string strategy = "availability";  // "availability", "resource", "auto".
  bool allow_downtime = false;
  std::string trigger = kTriggerApi;  // Of the operation.
};

struct SwapPlanRow {
  std::string model;
  uint64_t from = 0;
  uint64_t to = 0;
  std::string to_phase;
  uint64_t need_bytes = 0;    // To be booked: what is not resident yet, in it or another version.
  uint64_t shared_bytes = 0;  // Resident already, or of a row above.
  bool old_leaves_first = false;
};
struct SwapPlan {
  struct Pool {
    std::string name;
    bool decides = true;  // False: what does not fit is only not locked.
    uint64_t need_bytes = 0;
    uint64_t limit_bytes = 0;  // UINT64_MAX: none.
    uint64_t free_bytes = 0;   // UINT64_MAX: no limit.
    uint64_t comes_bytes = 0;  // Given back by what leaves or is evicted.
    uint64_t peak_bytes = 0;
    bool fits = true;
  };
  std::vector<SwapPlanRow> rows;
  uint64_t need_bytes = 0;  // Of the host budget.
  uint64_t free_bytes = 0;  // In it; UINT64_MAX = no limit.
  std::vector<Pool> pools;
  std::vector<VersionKey> evict;
  std::string strategy;  // "availability" or "resource": what a swap would do now.
  bool waits = false;    // For versions that are leaving already.
  bool fits = true;
  absl::Status refused;  // What the swap would be told; OK when it fits.
};

struct PublishRequest {
  std::string model;
  uint64_t version = 0;
  std::vector<PublishFile> files;
  std::string residency;  // Empty: leave the model's policy alone.
  // For the manifest: what it is bound to.
  std::map<std::string, std::string> requirements = {};
};

struct DeletePlan {
  VersionKey key;
  DiskUse use;
  std::vector<std::string> warnings;  // What will not work any more without it.
};

struct GarbageItem {
  std::string kind;  // "version", "staging", "computed_manifest", "verified_record".
  VersionKey key;    // Of a version.
  std::string name;  // Of anything else.
  uint64_t bytes = 0;
  std::string reason;
};
struct GarbagePlan {
  std::vector<GarbageItem> items;
  uint64_t bytes = 0;
  uint64_t freed_bytes = 0;
};

// Events after a point, oldest first.
struct EventPage {
  std::vector<EventRecord> events;
  uint64_t lost = 0;  // Before the first of them, and not kept any more.
  uint64_t next = 0;  // The sequence to go on after.
};

// The role of a file in the manifest, by its name; for people. What a file really is decides its
// content, at load. Pure.
bool LooksLikeWeights(const std::string& path);

using UploadTicket = std::array<uint8_t, 16>;

struct ManagerOptions {
  MemlockPolicy memlock = MemlockPolicy::kBestEffort;
  std::map<std::string, ModelPolicy> model_policies;     // [[models]] of the configuration.
  uint64_t max_leases_per_uid = 4096;                    // Whoever it is.
  absl::Duration admission_timeout = absl::Seconds(60);  // How long a load waits for room.
  absl::Duration ticket_life = absl::Minutes(1);         // Of tickets of publishes and of leases.
  absl::Duration health_interval = absl::Seconds(2);
  absl::Duration device_check_interval = absl::Seconds(10);  // Whether copies are still there.
  std::string file_protection = "file_mode";
  uint32_t own_uid = 0;  // For per-model read_groups, and of what the daemon does by itself.
  RetryPolicy retry;     // Of loads.
  // After a start: what the last daemon had resident is kept this long for clients to come back.
  absl::Duration restart_grace = absl::Seconds(30);
  // The desired state file: read this often though nothing tells of a change, and for how long.
  absl::Duration desired_poll = absl::Seconds(10);
  absl::Duration desired_read_limit = absl::Seconds(30);
};

class ModelManager {
 public:
  struct Deps {
    Os& os;
    Clock& clock;
    ControlLoop& loop;
    Executor& pool;        // For loads, verifications and publishes.
    Executor& short_work;  // For labels, scans, health, freeing: never behind a load.
    Store& store;
    Publisher& publisher;
    Loader& loader;
    VerifiedFiles& verified;
    BudgetPool& host;
    BudgetPool& memlock;
    LabelPublisher& labels;
    const UniqueFd& state_dir;
    const AccessPolicy& access;
    Machine& machine;
    Parking* parking = nullptr;  // Null, as the next: without an fd store.
    RestoredMemory* restored = nullptr;
    DeviceTier* devices = nullptr;  // Null: no device tier.
  };

  // Reads what operations.jsonl in `state_dir` has: blocks.
  ModelManager(Deps deps, ManagerOptions options, LabelFile labels);
  ~ModelManager();

  // Observers outlive the manager. Before Start.
  void AddObserver(Observer* observer);

  // Scans the store and loads what the labels name. Any thread, once; `labels.epoch` is already
  // raised.
  void Start();
  // Stops granting and starting; running work is cancelled, and who waits for it is told. Stop does
  // this too.
  void CancelWork();
  // `done` runs when nothing of ours is left on the executors.
  void Stop(Task done);

  // --- Clients
  // -------------------------------------------------------------------------------------

  // Whether the peer may read anything at all: by the daemon's policy, or by one model's
  // read_groups. What it may read is decided at each Acquire.
  bool MayReadSome(const Peer& peer) const;
  // What an Acquire of this model would say.
  bool MayReadModel(const Peer& peer, const std::string& model) const;

  // Observers hear of a session when it is announced: its name (CommOf) is not worth a client's
  // waiting for.
  SessionId BeginSession(const Peer& peer, const std::string& transport);
  void AnnounceSession(SessionId session, std::string comm);
  void EndSession(SessionId session, const std::string& why);

  // All or none, from one snapshot. NOT_FOUND (with near names), FAILED_PRECONDITION (not READY:
  // says the phase and what to do), PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE (stopping).
  absl::StatusOr<std::vector<Grant>> Acquire(SessionId session, std::span<const AcquireRef> refs);
  // As Acquire, but what may still become READY (loading, or labelled and about to be loaded, or
  // not yet known) is waited for until `timeout`: then DEADLINE_EXCEEDED with the reason it would
  // have been. `done` may run before this returns. Ends silently with the session.
  // kKnownVersions: once the store was read, NOT_FOUND is final: for a client that had the version
  // before the daemon's restart and asks whether it is still there.
  using AcquireDone = std::function<void(absl::StatusOr<std::vector<Grant>>)>;
  enum class WaitFor { kAnything, kKnownVersions };
  void AcquireOrWait(SessionId session, std::vector<AcquireRef> refs, absl::Duration timeout,
                     AcquireDone done, WaitFor wait_for = WaitFor::kAnything);
  // For a transport that carries no descriptors: they come to who redeems the ticket, which is good
  // once, for the holder's uid, for ticket_life and no longer than the lease. `device`: device
  // memory was asked for. A second one for a lease ends the first.
  absl::Duration ticket_life() const;
  absl::StatusOr<LeaseTicket> IssueTicket(SessionId session, const Grant& grant, bool device);
  struct RedeemedGrant {
    Grant grant;
    bool device = false;
  };
  // `session`: of who redeems it. It may fetch more of that lease (Leased), which stays the
  // holder's. PERMISSION_DENIED for any bad ticket.
  absl::StatusOr<RedeemedGrant> Redeem(SessionId session, const LeaseTicket& ticket);
  absl::Status Release(SessionId session, LeaseId lease);
  absl::Status Evict(LeaseId lease);
  // The version that a lease of this session, or one that it has redeemed the ticket of, holds.
  // NOT_FOUND.
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Leased(SessionId session, LeaseId lease);
  // A transport tells how long an attach took, for the metrics.
  void ReportAttach(const std::string& model, const std::string& transport, absl::Duration took,
                    const absl::Status& status);
  // An attempt that access rules or a share refused.
  void ReportRefused(const Peer& peer, const std::string& what,
                     RefusedFor why = RefusedFor::kNoRight);

  // --- Operators
  // -----------------------------------------------------------------------------------

  // Each starts an operation (or joins an identical one under way) and returns its id; an error
  // here means that nothing was started. `by` is the caller's uid. A load of a SUSPECT version
  // loads it again beside the old bytes; a SUSPECT version is no target of a swap.
  absl::StatusOr<OperationId> Load(const VersionKey& key, uint32_t by);
  // Without a time-out the model's drain_timeout and on_drain_deadline hold.
  absl::StatusOr<OperationId> Unload(const VersionKey& key,
                                     std::optional<absl::Duration> drain_timeout,
                                     bool release_on_deadline, uint32_t by);
  absl::StatusOr<OperationId> Swap(const SwapRequest& request, uint32_t by);
  absl::StatusOr<SwapPlan> PlanSwap(const SwapRequest& request);
  // `to` 0: the recorded previous version.
  absl::StatusOr<OperationId> Rollback(const std::string& model, const std::string& label,
                                       uint64_t to, uint32_t by, const std::string& strategy = "",
                                       bool allow_downtime = false);
  absl::StatusOr<OperationId> Verify(const VersionKey& key, uint32_t by);

  // Local publish: descriptors follow with the ticket (OfferUpload), within a minute.
  struct PublishTicket {
    OperationId operation = 0;
    UploadTicket ticket{};
  };
  absl::StatusOr<PublishTicket> PublishFromDescriptors(const PublishRequest& request,
                                                       const Peer& by);
  // One frame of descriptors for files [first, first + fds.size()). Tickets are single-use and
  // bound to the uid that asked. PERMISSION_DENIED for any bad ticket. `fds` are taken, or left to
  // the caller, who may have a better place to close what strangers sent.
  absl::Status OfferUpload(const Peer& peer, const UploadTicket& ticket, uint32_t first,
                           std::vector<UniqueFd>&& fds, bool last);
  // Streamed publish: the caller's own thread stages; the manager only books the operation and, at
  // the end, takes the version up. `Finish` is called on the control thread.
  absl::StatusOr<OperationId> BeginStreamedPublish(const PublishRequest& request, uint32_t by);
  void ReportPublishProgress(OperationId operation, uint64_t bytes_done);
  void FinishStreamedPublish(OperationId operation, absl::StatusOr<PublishResult> result);
  // Whether the existing bytes of this version are known bad (QUARANTINED, or resident and
  // SUSPECT), so that a publish of the same digest may replace them.
  bool IsQuarantined(const VersionKey& key) const;
  bool IsOperationCancelled(OperationId operation) const;
  // What a streamed publish passes before its first rename; null when it was cancelled.
  std::shared_ptr<CommitGate> PublishGate(OperationId operation) const;

  // Removes a version from the store. FAILED_PRECONDITION with a label, a lease, or work under way
  // on it; idle and READY, it is unloaded first.
  absl::StatusOr<OperationId> Delete(const VersionKey& key, uint32_t by);
  void PlanDelete(const VersionKey& key, std::function<void(absl::StatusOr<DeletePlan>)> done);
  // Removes what keep_on_disk does not keep, of one model or (empty) of all, and what crashes and
  // removed versions have left.
  absl::StatusOr<OperationId> CollectGarbage(const std::string& model, uint32_t by);
  // The plan has the models that `may_see` says yes to. `leftovers`: also what belongs to no
  // version any more, whose names may be those of any model.
  void PlanGarbage(const std::string& model,
                   const std::function<bool(const std::string& model)>& may_see, bool leftovers,
                   std::function<void(absl::StatusOr<GarbagePlan>)> done);

  // The version must be READY and not SUSPECT. `if_current` as in SwapRequest. `done` runs when the
  // label is durable.
  void SetLabel(const std::string& model, const std::string& label, uint64_t version,
                std::optional<uint64_t> if_current,
                std::function<void(absl::StatusOr<LabelChange>)> done);
  void RemoveLabel(const std::string& model, const std::string& label,
                   std::optional<uint64_t> if_current,
                   std::function<void(absl::StatusOr<LabelChange>)> done);

  // Looks at the store again. `done` gets the number of versions found new, and of those invalid.
  struct RescanResult {
    uint64_t models = 0;
    uint64_t versions = 0;
    uint64_t added = 0;
    uint64_t gone = 0;
    uint64_t invalid = 0;
  };
  void Rescan(std::function<void(absl::StatusOr<RescanResult>)> done);
  // New [[models]] of the configuration; they hold for loads and grants that start later. Rescan
  // makes them seen.
  void SetModelPolicies(std::map<std::string, ModelPolicy> policies);

  // After the policies, or what is known of the machine, may have changed: loads the labelled
  // versions that FAILED again, and looks at the machine for what is READY. A version that may not
  // be served any more is not granted and gets no label; leases on it go on.
  void ReviewServed();

  // Follows a desired state file from now on (desired_file.h); empty: none any more. Labels that it
  // names are brought there by swaps of the daemon's own, and back when somebody moves them; a file
  // that is missing or broken changes nothing. The same file again is read again. Also before
  // Start.
  void FollowDesired(const std::string& file);
  // A hint that the file may have changed.
  void LookAtDesired();

  absl::StatusOr<OperationSnapshot> GetOperation(OperationId operation) const;
  std::vector<OperationSnapshot> ListOperations()
      const;  // Newest first; finished ones for a day, also of earlier epochs.
  // FAILED_PRECONDITION when it is over; what cannot be undone (a flip under way) goes on.
  absl::Status CancelOperation(OperationId operation);
  // Calls `on_change` with the present state and at every later change, until it is finished or
  // Unsubscribe. NOT_FOUND.
  using OperationWatch = uint64_t;
  absl::StatusOr<OperationWatch> SubscribeOperation(
      OperationId operation, std::function<void(const OperationSnapshot&)> on_change);
  void UnsubscribeOperation(OperationWatch watch);

  // --- Looking
  // -------------------------------------------------------------------------------------

  StatusSnapshot Status() const;
  std::vector<ModelSnapshot> Models() const;
  absl::StatusOr<ModelSnapshot> Model(const std::string& name) const;
  uint64_t epoch() const;
  absl::StatusOr<VersionSnapshot> Version(const VersionKey& key) const;
  // Model and label to a version. NOT_FOUND.
  absl::StatusOr<VersionKey> Resolve(const std::string& model, const std::string& label) const;
  std::vector<Lease> Leases() const;
  std::vector<Session> Sessions() const;
  std::vector<EventRecord> Events(
      const std::string& model) const;  // Oldest first; the last 64 of it.
  // Of all models, or of one: at most `most` events after `sequence`, or not before `since`.
  EventPage EventsAfter(uint64_t sequence, size_t most) const;
  uint64_t SequenceAt(absl::Time since) const;  // The last one before it.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace modelhost
