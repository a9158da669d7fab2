// Writes one log line for each event of the registry. Control thread only.
//
//   info     load, unload, label_moved, draining, drained, operation (start and end), ready,
//   version
//            (phase and health changes), scan
//            load_retry
//   debug    lease, session, attach
//   error    journal (it could not be read or written)
//   warning  refused (a few lines a second of each kind, then a count), failed loads, operations
//   and integrity checks, a version that is not OK error    invalid_transition
#pragma once

#include <map>
#include <string>

#include "daemon/observe/logger.h"
#include "daemon/platform/clock.h"
#include "daemon/registry/events.h"

namespace modelhost {

class LogObserver final : public Observer {
 public:
  static constexpr int kRefusalsPerSecond = 5;  // Of one kind: anybody can cause them.

  // Both outlive this.
  LogObserver(Logger& logger, Clock& clock) : logger_(logger), clock_(clock) {}

  void OnVersion(const VersionSnapshot& version) override;
  void OnVersionGone(const VersionKey& key) override;
  void OnLoadFinished(const VersionKey& key, const LoadReport& report, const absl::Status& status,
                      const std::string& phase) override;
  void OnLoadRetry(const VersionKey& key, int attempt, absl::Duration delay,
                   const absl::Status& status) override;
  void OnJournalError(const absl::Status& status) override;
  void OnUnloaded(const VersionKey& key, absl::Duration took) override;
  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;
  void OnDeviceLost(const VersionKey& key, const std::vector<std::string>& gpus) override;
  void OnDraining(const VersionKey& key) override;
  void OnDrained(const VersionKey& key, absl::Duration took, bool deadline) override;
  void OnLease(const Lease& lease, LeaseChange change) override;
  void OnAttach(const std::string& model, const std::string& transport, absl::Duration took,
                const absl::Status& status) override;
  void OnSession(const Session& session, bool began, const std::string& why) override;
  void OnOperation(const OperationSnapshot& operation) override;
  void OnIntegrityCheck(const std::string& model, const std::string& kind,
                        const absl::Status& status) override;
  void OnRefused(const Peer& peer, const std::string& what, RefusedFor why) override;
  void OnDrainDeadline(const VersionKey& key, uint64_t leases, bool let_go) override;
  void OnEvicted(const VersionKey& victim, const VersionKey& wanted) override;
  void OnReady(bool ready) override;
  void OnInvalidTransition(const VersionKey& key, absl::string_view track, absl::string_view from,
                           absl::string_view to) override;
  void OnRestart(const RestartSnapshot& restart) override;
  void OnRestored(const VersionKey& key, RestoreOutcome outcome) override;
  void OnScan(uint64_t added, uint64_t invalid) override;
  void OnDesiredFile(const DesiredFileReport& report) override;
  void OnDesiredLabel(const DesiredRow& row) override;

 private:
  struct Seen {
    Phase phase = Phase::kStaged;
    Health health = Health::kOk;
    HealthReason reason = HealthReason::kNone;
    std::string invalid;
    bool refused = false;
    friend bool operator==(const Seen&, const Seen&) = default;
  };

  struct Refusals {
    absl::Duration since = -absl::InfiniteDuration();  // The second that is counted.
    int said = 0;
    uint64_t suppressed = 0;
  };

  Logger& logger_;
  Clock& clock_;
  // What was last said, so that a change is said once.
  std::map<VersionKey, Seen> versions_;
  std::map<OperationId, OperationState> operations_;  // Unfinished ones.
  std::map<std::string, Refusals> refusals_;          // By kind: the first word of what.
  uint64_t scan_invalid_ = 0;
  DesiredFileState desired_state_ = DesiredFileState::kOff;
  std::string desired_error_;
};

}  // namespace modelhost
