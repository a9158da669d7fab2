// Who is told what. Everything here is called on the control thread and must not block.
#pragma once

#include <span>
#include <string>

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
  virtual void OnUnloaded(const VersionKey& /*key*/, absl::Duration /*took*/) {}
  // After the flip. `flip` is the time of the page write.
  virtual void OnLabelsMoved(std::span<const LabelChange> /*changes*/, absl::Duration /*flip*/) {}
  // A version is on its way out: its leases should move on.
  virtual void OnDraining(const VersionKey& /*key*/) {}
  virtual void OnDrained(const VersionKey& /*key*/, absl::Duration /*took*/, bool /*deadline*/) {}
  virtual void OnLease(const Lease& /*lease*/, LeaseChange /*change*/) {}
  // One acquire was answered; `took` from its receipt.
  virtual void OnAttach(const std::string& /*model*/, const std::string& /*transport*/,
                        absl::Duration /*took*/, const absl::Status& /*status*/) {}
  virtual void OnSession(const Session& /*session*/, bool /*began*/, const std::string& /*why*/) {}
  virtual void OnOperation(const OperationSnapshot& /*operation*/) {}
  virtual void OnIntegrityCheck(const std::string& /*model*/, const std::string& /*kind*/,
                                const absl::Status& /*status*/) {}
  virtual void OnRefused(const Peer& /*peer*/, const std::string& /*what*/) {}
  virtual void OnReady(bool /*ready*/) {}
  // A change that the tables of version_state.h forbid was asked for, and refused. `track` is
  // "phase", "health" or "residency".
  virtual void OnInvalidTransition(const VersionKey& /*key*/, absl::string_view /*track*/,
                                   absl::string_view /*from*/, absl::string_view /*to*/) {}
  virtual void OnScan(uint64_t /*staged*/, uint64_t /*invalid*/) {}
};

}  // namespace modelhost
