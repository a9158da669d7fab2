// What happens, as counters and histograms for Prometheus. What *is* (gauges) comes from
// state_metrics.h at the time of a scrape.
//
// Names, labels and buckets are a promise to dashboards and alerts. `version` is never a label of a
// counter or histogram, and label values that a peer could choose are checked against what is
// known, so the number of series is bounded by the models and by closed sets.
//
// Observer calls come on the control thread; Rpc* calls and Collect on any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/registry/events.h"

namespace modelhost {

struct BuildInfo {
  std::string version;
  std::string revision;
  std::string cuda;  // "none" where the build has no device support.
};

class Metrics final : public Observer {
 public:
  explicit Metrics(const BuildInfo& build);

  // For the endpoint.
  std::shared_ptr<prometheus::Registry> registry() const { return registry_; }

  // One RPC. `method` is "Service/Method" of a registered method.
  void RpcStarted(const std::string& method);
  // `code` is a canonical name, "OK", "NOT_FOUND", ...
  void RpcAnswered(const std::string& method, const std::string& code, absl::Duration took);
  void RpcEnded(const std::string& method);

  void OnVersion(const VersionSnapshot& version) override;
  void OnVersionGone(const VersionKey& key) override;
  void OnLoadFinished(const VersionKey& key, const LoadReport& report, const absl::Status& status,
                      const std::string& phase) override;
  void OnLoadRetry(const VersionKey& key, int attempt, absl::Duration delay,
                   const absl::Status& status) override;
  void OnJournalError(const absl::Status& status) override;
  void OnUnloaded(const VersionKey& key, absl::Duration took) override;
  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;
  void OnDrained(const VersionKey& key, absl::Duration took, bool deadline) override;
  void OnAttach(const std::string& model, const std::string& transport, absl::Duration took,
                const absl::Status& status) override;
  void OnSession(const Session& session, bool began, const std::string& why) override;
  void OnOperation(const OperationSnapshot& operation) override;
  void OnIntegrityCheck(const std::string& model, const std::string& kind,
                        const absl::Status& status) override;
  void OnRefused(const Peer& peer, const std::string& what, RefusedFor why) override;
  void OnDrainDeadline(const VersionKey& key, uint64_t leases, bool let_go) override;
  void OnEvicted(const VersionKey& victim, const VersionKey& wanted) override;
  void OnRoomRefused(const std::string& pool, const std::string& reason) override;
  void OnInvalidTransition(const VersionKey& key, absl::string_view track, absl::string_view from,
                           absl::string_view to) override;
  void OnRestart(const RestartSnapshot& restart) override;
  void OnRestored(const VersionKey& key, RestoreOutcome outcome) override;

 private:
  template <typename Metric>
  using Family = prometheus::Family<Metric>;
  using Counter = prometheus::Counter;
  using Gauge = prometheus::Gauge;
  using Histogram = prometheus::Histogram;

  // `model` when the registry has told of it, else "other".
  std::string KnownModel(const std::string& model) const;
  // `method` while there are few of them, else "other".
  std::string KnownMethod(const std::string& method);

  std::shared_ptr<prometheus::Registry> registry_;
  Family<Histogram>& load_duration_;
  Family<Histogram>& load_phase_duration_;
  Family<Counter>& load_failures_;
  Family<Counter>& load_bytes_;
  Family<Counter>& load_retries_;
  Counter& journal_errors_;
  Family<Histogram>& unload_duration_;
  Family<Counter>& swaps_;
  Family<Histogram>& swap_duration_;
  Histogram& flip_duration_;
  Family<Histogram>& drain_duration_;
  Family<Counter>& rollbacks_;
  Family<Counter>& disconnects_;
  Family<Histogram>& attach_duration_;
  Family<Counter>& integrity_checks_;
  Family<Counter>& refused_;
  Family<Counter>& drain_deadlines_;
  Family<Counter>& evictions_;
  Family<Counter>& admission_rejections_;
  Counter& invalid_transitions_;
  Family<Counter>& restores_;
  Family<Histogram>& rpc_duration_;
  Family<Gauge>& rpc_in_flight_;

  // Control thread.
  std::set<std::string> models_;
  std::set<VersionKey> resident_;

  absl::Mutex mutex_;
  std::set<std::string> methods_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
