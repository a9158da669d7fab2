#include "daemon/observe/metrics.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"

namespace modelhost {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

const Buckets& LoadBuckets() {
  static const Buckets buckets{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
                               2.5,   5,     10,   30,    60,   120, 300,  600};
  return buckets;
}
const Buckets& PhaseBuckets() {
  static const Buckets buckets{0.001, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300};
  return buckets;
}
const Buckets& AttachBuckets() {
  static const Buckets buckets{0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
                               0.01,   0.05,    0.1,    0.5,   1,      5};
  return buckets;
}
const Buckets& FlipBuckets() {
  static const Buckets buckets{1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 0.1};
  return buckets;
}
const Buckets& DrainBuckets() {
  static const Buckets buckets{0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600};
  return buckets;
}
const Buckets& RpcBuckets() {
  static const Buckets buckets{0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5};
  return buckets;
}

prometheus::Family<prometheus::Counter>& MakeCounter(prometheus::Registry& registry,
                                                     const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}
prometheus::Family<prometheus::Gauge>& MakeGauge(prometheus::Registry& registry, const char* name,
                                                 const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
prometheus::Family<prometheus::Histogram>& MakeHistogram(prometheus::Registry& registry,
                                                         const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry);
}

double Seconds(absl::Duration duration) {
  return std::max(0.0, absl::ToDoubleSeconds(duration));  // A wall clock may have been set back.
}

template <size_t size>
std::string OneOf(const std::string& value, const char* const (&known)[size]) {
  const bool found = std::find(std::begin(known), std::end(known), value) != std::end(known);
  return found ? value : "other";
}

std::string PhaseLabel(const std::string& phase) {
  if (phase == "device_create") return "gpu_alloc";
  if (phase == "device_upload") return "gpu_copy";
  if (phase == "device_verify") return "gpu_verify";
  return OneOf(phase, {"wait", "open", "reserve", "verify", "map", "prewarm", "pin", "copy", "seal",
                       "index", "gpu_alloc", "gpu_copy", "probe"});
}

std::string SourceLabel(const std::string& source) {
  return source.empty() ? "cold" : OneOf(source, {"cold", "warm", "gpu_only", "restore"});
}

// The kernel ends the connection of a killed client as it ends any other, so "clean" includes those
// whose stream just ended.
std::string DisconnectLabel(const std::string& why) {
  if (why == "closed") return "clean";
  if (why == "error") return "crash";
  if (why == "violation") return "protocol_error";
  if (why == "stopping") return "shutdown";
  if (why == "slow" || why == "hello_timeout") return "timeout";
  return OneOf(why, {"clean", "crash", "protocol_error", "evicted", "shutdown", "timeout"});
}

std::string TransportLabel(const std::string& transport) {
  return OneOf(transport, {"native", "grpc", "host_file", "host_memfd", "cuda_vmm", "cuda_ipc"});
}

bool WasCancelled(const absl::Status& status) {
  return absl::IsCancelled(status) || absl::IsAborted(status);
}

const char* OutcomeLabel(const absl::Status& status) {
  if (status.ok()) return "success";
  return WasCancelled(status) ? "cancelled" : "error";
}

std::string ReasonLabel(const absl::Status& status) {
  return absl::AsciiStrToLower(absl::StatusCodeToString(status.code()));
}

}  // namespace

Metrics::Metrics(const BuildInfo& build)
    : registry_(std::make_shared<prometheus::Registry>()),
      load_duration_(MakeHistogram(*registry_, "modelhost_model_load_duration_seconds",
                                   "Time from a load being accepted until READY or failure.")),
      load_phase_duration_(MakeHistogram(*registry_, "modelhost_model_load_phase_duration_seconds",
                                         "Time of each phase of a load.")),
      load_failures_(MakeCounter(*registry_, "modelhost_model_load_failures_total",
                                 "Loads that failed, by the phase and the kind of failure.")),
      load_bytes_(MakeCounter(*registry_, "modelhost_model_load_bytes_total",
                              "Bytes read from disk, and bytes made resident, by loads.")),
      load_retries_(
          MakeCounter(*registry_, "modelhost_load_retries_total",
                      "Loads that failed for a reason that may pass, to be tried again.")),
      journal_errors_(MakeCounter(*registry_, "modelhost_journal_errors_total",
                                  "Times that the journal of operations could not be read or "
                                  "written.")
                          .Add({})),
      unload_duration_(MakeHistogram(*registry_, "modelhost_model_unload_duration_seconds",
                                     "Time to free the memory of a version.")),
      swaps_(MakeCounter(*registry_, "modelhost_swaps_total", "Swaps and rollbacks that ended.")),
      swap_duration_(MakeHistogram(*registry_, "modelhost_swap_duration_seconds",
                                   "Time from a swap being accepted until its labels moved.")),
      flip_duration_(MakeHistogram(*registry_, "modelhost_swap_flip_duration_seconds",
                                   "Time of the write that makes new versions visible.")
                         .Add({}, FlipBuckets())),
      drain_duration_(MakeHistogram(*registry_, "modelhost_swap_drain_duration_seconds",
                                    "Time from draining until the last lease ended.")),
      rollbacks_(MakeCounter(*registry_, "modelhost_rollbacks_total", "Rollbacks that succeeded.")),
      disconnects_(MakeCounter(*registry_, "modelhost_client_disconnects_total",
                               "Sessions that ended, by why.")),
      attach_duration_(MakeHistogram(*registry_, "modelhost_attach_duration_seconds",
                                     "Time from the receipt of an acquire until its answer.")),
      integrity_checks_(MakeCounter(*registry_, "modelhost_integrity_checks_total",
                                    "Checks of stored bytes against their digests.")),
      refused_(MakeCounter(*registry_, "modelhost_refused_total",
                           "Attempts that access rules or a user's share refused, by why.")),
      drain_deadlines_(MakeCounter(*registry_, "modelhost_drain_deadlines_total",
                                   "Drains whose leases did not end in time.")),
      evictions_(MakeCounter(*registry_, "modelhost_evictions_total",
                             "Idle versions that made room for others.")),
      admission_rejections_(MakeCounter(*registry_, "modelhost_admission_rejections_total",
                                        "Loads and swaps that a budget had no room for.")),
      invalid_transitions_(MakeCounter(*registry_, "modelhost_invalid_transitions_total",
                                       "State changes that the table forbids; must stay 0.")
                               .Add({})),
      restores_(MakeCounter(*registry_, "modelhost_restores_total",
                            "Versions that were resident before a restart, by what came of them.")),
      rpc_duration_(MakeHistogram(*registry_, "modelhost_rpc_duration_seconds",
                                  "Time to answer a call; of a stream, its first message.")),
      rpc_in_flight_(
          MakeGauge(*registry_, "modelhost_rpc_in_flight", "Calls and streams that are open.")) {
  MakeGauge(*registry_, "modelhost_build_info", "What this daemon was built from; always 1.")
      .Add({{"version", build.version},
            {"revision", build.revision},
            {"cuda", build.cuda},
            {"grpc", grpc::Version()}})
      .Set(1);
}

std::string Metrics::KnownModel(const std::string& model) const {
  return models_.contains(model) ? model : "other";
}

std::string Metrics::KnownMethod(const std::string& method) {
  constexpr size_t kMaxMethods = 64;
  absl::MutexLock lock(&mutex_);
  if (methods_.contains(method)) return method;
  if (methods_.size() >= kMaxMethods) return "other";
  methods_.insert(method);
  return method;
}

void Metrics::RpcStarted(const std::string& method) {
  rpc_in_flight_.Add({{"method", KnownMethod(method)}}).Increment();
}

void Metrics::RpcAnswered(const std::string& method, const std::string& code, absl::Duration took) {
  rpc_duration_.Add({{"method", KnownMethod(method)}, {"code", code}}, RpcBuckets())
      .Observe(Seconds(took));
}

void Metrics::RpcEnded(const std::string& method) {
  rpc_in_flight_.Add({{"method", KnownMethod(method)}}).Decrement();
}

void Metrics::OnVersion(const VersionSnapshot& version) {
  models_.insert(version.key.model);
  if (version.resident == nullptr) {
    resident_.erase(version.key);
  } else if (resident_.insert(version.key).second) {
    const uint64_t host = version.resident->host_bytes();
    const uint64_t shared = std::min(host, version.resident->report.shared_bytes);
    load_bytes_.Add({{"model", version.key.model}, {"tier", "host"}})
        .Increment(static_cast<double>(host - shared));
  }
}

void Metrics::OnVersionGone(const VersionKey& key) { resident_.erase(key); }

void Metrics::OnLoadFinished(const VersionKey& key, const LoadReport& report,
                             const absl::Status& status, const std::string& phase) {
  models_.insert(key.model);
  load_duration_
      .Add({{"model", key.model},
            {"source", SourceLabel(report.source)},
            {"outcome", OutcomeLabel(status)}},
           LoadBuckets())
      .Observe(Seconds(report.duration));
  for (const LoadPhase& part : report.phases) {
    load_phase_duration_
        .Add({{"model", key.model}, {"phase", PhaseLabel(part.name)}}, PhaseBuckets())
        .Observe(Seconds(part.duration));
  }
  load_bytes_.Add({{"model", key.model}, {"tier", "disk"}})
      .Increment(static_cast<double>(report.disk_bytes));
  if (!status.ok() && !WasCancelled(status)) {
    load_failures_
        .Add({{"model", key.model}, {"phase", PhaseLabel(phase)}, {"reason", ReasonLabel(status)}})
        .Increment();
  }
}

void Metrics::OnLoadRetry(const VersionKey& key, int /*attempt*/, absl::Duration /*delay*/,
                          const absl::Status& /*status*/) {
  load_retries_.Add({{"model", key.model}}).Increment();
}

void Metrics::OnJournalError(const absl::Status& /*status*/) { journal_errors_.Increment(); }

void Metrics::OnUnloaded(const VersionKey& key, absl::Duration took) {
  unload_duration_.Add({{"model", key.model}, {"outcome", "success"}}, PhaseBuckets())
      .Observe(Seconds(took));
}

void Metrics::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) {
  // Labels that are announced at start have moved nowhere.
  const bool moved = std::any_of(changes.begin(), changes.end(), [](const LabelChange& change) {
    return change.from != change.to;
  });
  if (moved) flip_duration_.Observe(Seconds(flip));
}

void Metrics::OnDrained(const VersionKey& key, absl::Duration took, bool deadline) {
  drain_duration_
      .Add({{"model", key.model}, {"outcome", deadline ? "deadline" : "drained"}}, DrainBuckets())
      .Observe(Seconds(took));
}

void Metrics::OnAttach(const std::string& model, const std::string& transport, absl::Duration took,
                       const absl::Status& status) {
  attach_duration_
      .Add({{"model", KnownModel(model)},
            {"transport", TransportLabel(transport)},
            {"outcome", status.ok() ? "success" : "error"}},
           AttachBuckets())
      .Observe(Seconds(took));
}

void Metrics::OnSession(const Session& /*session*/, bool began, const std::string& why) {
  if (!began) disconnects_.Add({{"reason", DisconnectLabel(why)}}).Increment();
}

void Metrics::OnOperation(const OperationSnapshot& operation) {
  const bool swap = operation.kind == OperationKind::kSwap;
  const bool rollback = operation.kind == OperationKind::kRollback;
  if ((!swap && !rollback) || !operation.finished_state()) return;

  const std::string model = KnownModel(operation.model);
  const std::string trigger = OneOf(operation.trigger, {kTriggerApi, kTriggerDesired});
  const char* outcome = rollback ? "rolled_back" : "success";
  if (operation.state == OperationState::kFailed) {
    outcome = WasCancelled(operation.status) ? "cancelled" : "failed";
  } else if (operation.state == OperationState::kCancelled ||
             operation.state == OperationState::kAborted) {
    outcome = "cancelled";
  }
  swaps_.Add({{"outcome", outcome}, {"model", model}, {"trigger", trigger}}).Increment();
  swap_duration_.Add({{"model", model}, {"outcome", outcome}}, LoadBuckets())
      .Observe(Seconds(operation.finished - operation.started));
  if (rollback && operation.state == OperationState::kSucceeded) {
    rollbacks_.Add({{"model", model}, {"trigger", trigger}}).Increment();
  }
}

void Metrics::OnIntegrityCheck(const std::string& model, const std::string& kind,
                               const absl::Status& status) {
  integrity_checks_
      .Add({{"model", KnownModel(model)},
            {"kind", OneOf(kind, {"manifest", "full", "scrub"})},
            {"outcome", OutcomeLabel(status)}})
      .Increment();
}

void Metrics::OnRefused(const Peer& /*peer*/, const std::string& /*what*/, RefusedFor why) {
  refused_.Add({{"reason", std::string(RefusedForName(why))}}).Increment();
}

void Metrics::OnDrainDeadline(const VersionKey& key, uint64_t /*leases*/, bool let_go) {
  drain_deadlines_.Add({{"model", key.model}, {"action", let_go ? "release" : "wait"}}).Increment();
}

void Metrics::OnEvicted(const VersionKey& victim, const VersionKey& /*wanted*/) {
  evictions_.Add({{"model", victim.model}}).Increment();
}

void Metrics::OnRoomRefused(const std::string& pool, const std::string& reason) {
  admission_rejections_
      .Add({{"pool", OneOf(pool, {"host", "memlock", "gpu"})},
            {"reason", OneOf(reason, {"no_room", "timeout", "swap"})}})
      .Increment();
}

void Metrics::OnInvalidTransition(const VersionKey& /*key*/, absl::string_view /*track*/,
                                  absl::string_view /*from*/, absl::string_view /*to*/) {
  invalid_transitions_.Increment();
}

void Metrics::OnRestart(const RestartSnapshot& restart) {
  // Dropped before they had a load of their own.
  if (restart.failed_versions == 0) return;
  restores_.Add({{"outcome", std::string(RestoreOutcomeName(RestoreOutcome::kFailed))}})
      .Increment(static_cast<double>(restart.failed_versions));
}

void Metrics::OnRestored(const VersionKey& /*key*/, RestoreOutcome outcome) {
  restores_.Add({{"outcome", std::string(RestoreOutcomeName(outcome))}}).Increment();
}

}  // namespace modelhost
