// Values that the manager hands out: copies, good on any thread, true at one moment.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "daemon/region/device_tier.h"
#include "daemon/region/resident_version.h"
#include "daemon/registry/desired_plan.h"
#include "daemon/registry/ids.h"
#include "daemon/registry/lease_table.h"
#include "daemon/registry/version_state.h"
#include "daemon/store/labels.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

struct VersionSnapshot {
  VersionKey key;
  std::string name;     // On disk; differs from the number only in an invalid entry.
  std::string invalid;  // Why it can never be loaded; empty for a usable one.
  Phase phase = Phase::kStaged;
  Health health = Health::kOk;
  HealthReason health_reason = HealthReason::kNone;
  absl::Status error;  // Of the last failed load, in FAILED and QUARANTINED.
  std::vector<std::string> labels;
  std::optional<Digest> digest;
  uint64_t file_bytes = 0;
  absl::Time created;
  // What it is bound to: all of it once it is resident, before that what its manifest says.
  std::map<std::string, std::string> requirements;
  uint64_t leases = 0;
  Residency residency = Residency::kPinned;  // Asked for.
  std::string load_phase;                    // In LOADING.
  uint64_t load_bytes_done = 0;
  uint64_t load_bytes_total = 0;
  // Null unless bytes are resident (READY, DRAINING).
  std::shared_ptr<const ResidentVersion> resident;
  DeviceResidency device_residency = DeviceResidency::kNone;
};

struct ModelSnapshot {
  std::string name;
  std::map<std::string, LabelRecord> labels;  // Removed ones are not in it.
  EffectivePolicy policy;
  std::string policy_error;
  std::vector<VersionSnapshot> versions;  // By number; invalid entries last.
};

// What came of the memory that the last daemon left in the fd store.
struct RestartSnapshot {
  bool fd_store = false;           // There is one.
  uint64_t parked = 0;             // Descriptors in it now.
  uint64_t received = 0;           // That came back at the start.
  uint64_t foreign = 0;            // Of these, that were none of ours.
  uint64_t restored_versions = 0;  // READY without a read from disk.
  uint64_t restored_bytes = 0;
  uint64_t reread_versions = 0;  // Were resident, and (partly) had to be read again.
  uint64_t failed_versions = 0;  // Were resident, and are not.
  std::string problem;           // Why what came back was not taken.
};
// What became of a version that was resident before the restart.
enum class RestoreOutcome : uint8_t { kSuccess, kReread, kFailed };
absl::string_view RestoreOutcomeName(RestoreOutcome outcome);

// The desired state file, and how the labels that it names stand.
struct DesiredSnapshot {
  std::string file;
  DesiredFileState state = DesiredFileState::kOff;
  std::string error;                                 // In kMissing and kBroken.
  absl::Time last_read = absl::InfinitePast();       // Of a good file.
  absl::Time last_converged = absl::InfinitePast();  // When all came to be in sync.
  uint64_t in_sync = 0;
  uint64_t pending = 0;
  uint64_t failed = 0;
  uint64_t drifting = 0;         // Of those that are not in sync.
  std::vector<DesiredRow> rows;  // By model and label; those of the last good file.
};

// One look at the file.
struct DesiredFileReport {
  std::string file;
  DesiredFileState state = DesiredFileState::kOff;
  std::string error;
  uint64_t wanted = 0;             // Labels.
  bool changed = false;            // It says something else than before.
  std::vector<std::string> watch;  // Directories to watch for the next change; empty: no news.
};

struct StatusSnapshot {
  uint64_t epoch = 0;
  absl::Time started;
  bool ready = false;
  std::vector<std::string> not_ready;  // Reasons, one per required model.
  std::string store_root;
  std::string store_error;  // The store cannot be read now; empty when it can.
  struct Pool {
    std::string name;
    uint64_t limit = 0;  // UINT64_MAX: none.
    uint64_t reserved = 0;
  };
  std::vector<Pool> pools;
  std::string memlock_policy;
  // Who stops a process from writing store files: "read_only_mount" (also root) or "file_mode".
  std::string file_protection;
  uint64_t clients = 0;
  uint64_t leases = 0;
  uint64_t models = 0;
  uint64_t invalid_transitions = 0;
  std::string journal_error;  // Of the last write of operations.jsonl; empty when it went well.
  RestartSnapshot restart;
  DesiredSnapshot desired;
  DeviceTierSnapshot devices;
  std::map<std::string, uint64_t> importers;  // Leases that have memory of a GPU, by its UUID.
};

enum class OperationKind : uint8_t {
  kLoad,
  kUnload,
  kSwap,
  kRollback,
  kVerify,
  kPublish,
  kDelete,
  kGc,
};
// Who asked for an operation: a caller, or the desired state file.
inline constexpr char kTriggerApi[] = "api";
inline constexpr char kTriggerDesired[] = "desired";
// ABORTED is not the asker's doing: a newer operation took its place (its `successor`), or the
// daemon ended.
enum class OperationState : uint8_t {
  kQueued,
  kRunning,
  kSucceeded,
  kFailed,
  kCancelled,
  kAborted,
};
absl::string_view OperationKindName(OperationKind kind);     // "load"
absl::string_view OperationStateName(OperationState state);  // "RUNNING"

struct LabelChange {
  std::string model;
  std::string label;
  uint64_t from = 0;  // 0: it was not set.
  uint64_t to = 0;    // 0: removed.
  uint64_t generation = 0;
};

// What an operation has come to; which fields mean something depends on its kind.
struct OperationResult {
  bool unchanged = false;            // It was so already.
  std::vector<LabelChange> changes;  // swap, rollback
  absl::Duration load;               // load, swap: the longest of its loads.
  absl::Duration flip;               // swap
  std::string strategy;              // swap: "availability" or "resource".
  absl::Duration gap;                // swap: how long nothing served; 0: something always did.
  uint64_t draining_leases = 0;      // swap: leases on the versions that lost a label.
  std::string digest;                // publish
  uint64_t bytes = 0;                // publish, load, verify
  uint64_t linked_bytes = 0;         // publish
  uint64_t removed = 0;              // delete, gc: versions that are gone.
  uint64_t freed_bytes = 0;          // delete, gc: on disk; a file that has other names frees none.
};

struct OperationSnapshot {
  OperationId id = 0;
  OperationKind kind = OperationKind::kLoad;
  OperationState state = OperationState::kQueued;
  std::string model;
  uint64_t version = 0;
  std::string label;
  uint32_t requested_by_uid = 0;
  std::string trigger = kTriggerApi;
  absl::Time started;
  absl::Time finished;
  uint64_t sequence = 0;  // +1 at every change of this operation.
  std::string phase;      // "load", "verify", "labels", "flip", ... lower case.
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  std::string message;
  absl::Status status;        // When finished.
  OperationId successor = 0;  // Of an ABORTED one: what took its place; 0: nothing did.
  uint32_t attempts = 0;      // Failed so far, while it tries again.
  absl::Time next_try;        // Set while it waits for that.
  OperationResult result;
  bool finished_state() const { return state >= OperationState::kSucceeded; }
};

// One line of history, for describe and for logs.
struct EventRecord {
  absl::Time when;
  std::string what;  // "ready", "swap", "quarantined", ...
  std::string model;
  uint64_t version = 0;
  std::string detail;
  uint64_t sequence = 0;  // From 1 in each epoch, of all models together.
};

}  // namespace modelhost
