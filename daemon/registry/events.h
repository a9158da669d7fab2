// Who is told what. Everything here is called on the control thread and must not block.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/registry/snapshots.h"

namespace modelhost {

// The shared page, as the manager sees it. Implemented by publish/catalogue_writer.
class LabelPublisher {
 public:
  virtual ~LabelPublisher() = default;
  // Makes all `changes` visible in one seqlock write. The versions are READY and leases can be
  // granted.
  virtual void Publish(std::span<const LabelChange> changes) = 0;
  // The slot of a label in the page; abi::kNoSlot when the page is full.
  virtual uint32_t SlotOf(const std::string& model, const std::string& label) = 0;
};

enum class LeaseChange : uint8_t { kGranted, kReleased, kSessionEnded, kEvicted };

// Why somebody was refused something.
enum class RefusedFor : uint8_t {
  kNoRight,  // Its groups do not have it.
  kTicket,   // An upload ticket that is not its own, or not any more.
  kLeases,   // Its share of each of these is used up.
  kConnections,
  kDescriptors,  // That wait to be closed.
  kCalls,        // Under way at one time.
  kWaiting,      // Requests that wait for a version.
};
absl::string_view RefusedForName(RefusedFor why);  // "no_right", ...

class Observer {
 public:
  virtual ~Observer() = default;

  // After any change of phase, health, labels or residency of a version.
  virtual void OnVersion(const VersionSnapshot& /*version*/) {}
  // The version left the books (its directory is gone and nothing is resident).
  virtual void OnVersionGone(const VersionKey& /*key*/) {}
  // A load ended. `phase` is where a failed one stopped.
  virtual void OnLoadFinished(const VersionKey& /*key*/, const LoadReport& /*report*/,
                              const absl::Status& /*status*/, const std::string& /*phase*/) {}
  // A load failed and will be tried again, the `attempt`th time.
  virtual void OnLoadRetry(const VersionKey& /*key*/, int /*attempt*/, absl::Duration /*delay*/,
                           const absl::Status& /*status*/) {}
  virtual void OnUnloaded(const VersionKey& /*key*/, absl::Duration /*took*/) {}
  // After the flip. `flip` is the time of the page write.
  virtual void OnLabelsMoved(std::span<const LabelChange> /*changes*/, absl::Duration /*flip*/) {}
  // Its copies on these GPUs are gone; they are made again.
  virtual void OnDeviceLost(const VersionKey& /*key*/, const std::vector<std::string>& /*gpus*/) {}
  // A version is on its way out: its leases should move on.
  virtual void OnDraining(const VersionKey& /*key*/) {}
  // Its leases have not ended in time; `let_go`: the daemon goes on without them.
  virtual void OnDrainDeadline(const VersionKey& /*key*/, uint64_t /*leases*/, bool /*let_go*/) {}
  // `victim`, which nobody needed, makes room.
  virtual void OnEvicted(const VersionKey& /*victim*/, const VersionKey& /*wanted*/) {}
  // A budget refused: "no_room", "timeout" (of a load) or "swap" (before it began).
  virtual void OnRoomRefused(const std::string& /*pool*/, const std::string& /*reason*/) {}
  virtual void OnDrained(const VersionKey& /*key*/, absl::Duration /*took*/, bool /*deadline*/) {}
  virtual void OnLease(const Lease& /*lease*/, LeaseChange /*change*/) {}
  // One acquire was answered; `took` from its receipt.
  virtual void OnAttach(const std::string& /*model*/, const std::string& /*transport*/,
                        absl::Duration /*took*/, const absl::Status& /*status*/) {}
  virtual void OnSession(const Session& /*session*/, bool /*began*/, const std::string& /*why*/) {}
  virtual void OnOperation(const OperationSnapshot& /*operation*/) {}
  virtual void OnIntegrityCheck(const std::string& /*model*/, const std::string& /*kind*/,
                                const absl::Status& /*status*/) {}
  virtual void OnRefused(const Peer& /*peer*/, const std::string& /*what*/, RefusedFor /*why*/) {}
  virtual void OnReady(bool /*ready*/) {}
  // A change that the tables of version_state.h forbid was asked for, and refused. `track` is
  // "phase", "health", "residency" or "device residency".
  virtual void OnInvalidTransition(const VersionKey& /*key*/, absl::string_view /*track*/,
                                   absl::string_view /*from*/, absl::string_view /*to*/) {}
  // operations.jsonl could not be read or written; what it is about goes on.
  virtual void OnJournalError(const absl::Status& /*status*/) {}
  // Once at the start, when something came back from the fd store.
  virtual void OnRestart(const RestartSnapshot& /*restart*/) {}
  // For each version that was resident before the restart.
  virtual void OnRestored(const VersionKey& /*key*/, RestoreOutcome /*outcome*/) {}
  // After each look at the desired state file.
  virtual void OnDesiredFile(const DesiredFileReport& /*report*/) {}
  // How a label that it names stands, when that is another than before.
  virtual void OnDesiredLabel(const DesiredRow& /*row*/) {}
  virtual void OnScan(uint64_t /*staged*/, uint64_t /*invalid*/) {}
};

}  // namespace modelhost
