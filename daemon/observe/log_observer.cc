#include "daemon/observe/log_observer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace modelhost {
namespace {

LogLine ForVersion(absl::string_view event, const VersionKey& key) {
  LogLine line(event);
  line.Add("model", key.model).Add("version", key.version);
  return line;
}

LogLevel LevelOf(const absl::Status& status) {
  const bool expected = status.ok() || absl::IsCancelled(status) || absl::IsAborted(status);
  return expected ? LogLevel::kInfo : LogLevel::kWarning;
}

const char* LeaseChangeName(LeaseChange change) {
  switch (change) {
    case LeaseChange::kGranted:
      return "granted";
    case LeaseChange::kReleased:
      return "released";
    case LeaseChange::kSessionEnded:
      return "session_ended";
    case LeaseChange::kEvicted:
      return "evicted";
  }
  return "unknown";
}

}  // namespace

void LogObserver::OnVersion(const VersionSnapshot& version) {
  if (!version.invalid.empty() && version.key.version == 0) return;  // OnScan counts these.
  // Loaded, and not handed out any more.
  const bool refused = version.phase == Phase::kReady && !version.error.ok();
  const Seen now{version.phase, version.health, version.health_reason, version.invalid, refused};
  auto [it, added] = versions_.try_emplace(version.key, now);
  if (!added) {
    if (it->second == now) return;
    it->second = now;
  }
  LogLine line = ForVersion("version", version.key);
  line.Add("phase", PhaseName(version.phase)).Add("health", HealthName(version.health));
  if (version.health_reason != HealthReason::kNone) {
    line.Add("health_reason", HealthReasonName(version.health_reason));
  }
  if (!version.invalid.empty()) line.Add("invalid", version.invalid);
  line.AddError(version.error);
  const bool bad = version.health != Health::kOk || refused || !version.invalid.empty() ||
                   version.phase == Phase::kQuarantined ||
                   (version.phase == Phase::kFailed && !absl::IsCancelled(version.error));
  logger_.Write(bad ? LogLevel::kWarning : LogLevel::kInfo, line);
}

void LogObserver::OnVersionGone(const VersionKey& key) {
  versions_.erase(key);
  logger_.Write(LogLevel::kInfo, ForVersion("version_gone", key));
}

void LogObserver::OnLoadFinished(const VersionKey& key, const LoadReport& report,
                                 const absl::Status& status, const std::string& phase) {
  LogLine line = ForVersion("load", key);
  line.Add("outcome", status.ok() ? "success" : "failed");
  line.AddSeconds("duration_seconds", report.duration);
  if (!report.source.empty()) line.Add("source", report.source);
  if (!status.ok()) line.Add("phase", phase);
  line.Add("disk_bytes", report.disk_bytes).Add("shared_bytes", report.shared_bytes);
  for (const LoadPhase& part : report.phases) {
    line.AddSeconds(absl::StrCat(part.name, "_seconds"), part.duration);
  }
  line.AddError(status);
  logger_.Write(LevelOf(status), line);
  for (const std::string& warning : report.warnings) {
    logger_.Write(LogLevel::kWarning, ForVersion("load_warning", key).Add("warning", warning));
  }
}

void LogObserver::OnLoadRetry(const VersionKey& key, int attempt, absl::Duration delay,
                              const absl::Status& status) {
  logger_.Write(LogLevel::kInfo, ForVersion("load_retry", key)
                                     .Add("attempt", attempt)
                                     .AddSeconds("delay_seconds", delay)
                                     .AddError(status));
}

void LogObserver::OnJournalError(const absl::Status& status) {
  logger_.Write(LogLevel::kError, LogLine("journal").AddError(status));
}

void LogObserver::OnUnloaded(const VersionKey& key, absl::Duration took) {
  logger_.Write(LogLevel::kInfo, ForVersion("unload", key).AddSeconds("duration_seconds", took));
}

void LogObserver::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) {
  for (const LabelChange& change : changes) {
    logger_.Write(LogLevel::kInfo, LogLine("label_moved")
                                       .Add("model", change.model)
                                       .Add("label", change.label)
                                       .Add("from", change.from)
                                       .Add("to", change.to)
                                       .Add("generation", change.generation)
                                       .AddSeconds("flip_seconds", flip));
  }
}

void LogObserver::OnDeviceLost(const VersionKey& key, const std::vector<std::string>& gpus) {
  logger_.Write(LogLevel::kError, LogLine("device_lost")
                                      .Add("model", key.model)
                                      .Add("version", key.version)
                                      .Add("gpus", absl::StrJoin(gpus, ",")));
}

void LogObserver::OnDraining(const VersionKey& key) {
  logger_.Write(LogLevel::kInfo, ForVersion("draining", key));
}

void LogObserver::OnDrainDeadline(const VersionKey& key, uint64_t leases, bool let_go) {
  logger_.Write(LogLevel::kWarning, ForVersion("drain_deadline", key)
                                        .Add("leases", leases)
                                        .Add("action", let_go ? "release" : "wait"));
}

void LogObserver::OnEvicted(const VersionKey& victim, const VersionKey& wanted) {
  logger_.Write(LogLevel::kInfo, ForVersion("evicted", victim).Add("for", wanted.ToString()));
}

void LogObserver::OnDrained(const VersionKey& key, absl::Duration took, bool deadline) {
  logger_.Write(deadline ? LogLevel::kWarning : LogLevel::kInfo,
                ForVersion("drained", key)
                    .Add("outcome", deadline ? "deadline" : "drained")
                    .AddSeconds("duration_seconds", took));
}

void LogObserver::OnLease(const Lease& lease, LeaseChange change) {
  const LogLevel level = change == LeaseChange::kEvicted ? LogLevel::kWarning : LogLevel::kDebug;
  if (!logger_.Enabled(level)) return;
  logger_.Write(level, ForVersion("lease", lease.key)
                           .Add("change", LeaseChangeName(change))
                           .Add("lease", lease.id)
                           .Add("session", lease.session)
                           .Add("label", lease.label)
                           .Add("transport", lease.transport));
}

void LogObserver::OnAttach(const std::string& model, const std::string& transport,
                           absl::Duration took, const absl::Status& status) {
  if (!logger_.Enabled(LogLevel::kDebug)) return;
  logger_.Write(LogLevel::kDebug, LogLine("attach")
                                      .Add("model", model)
                                      .Add("transport", transport)
                                      .AddSeconds("duration_seconds", took)
                                      .AddError(status));
}

void LogObserver::OnSession(const Session& session, bool began, const std::string& why) {
  if (!logger_.Enabled(LogLevel::kDebug)) return;
  LogLine line("session");
  line.Add("session", session.id)
      .Add("change", began ? "began" : "ended")
      .Add("transport", session.transport)
      .Add("pid", session.peer.pid)
      .Add("uid", session.peer.uid)
      .Add("comm", session.peer.comm);
  if (!began) line.Add("why", why);
  logger_.Write(LogLevel::kDebug, line);
}

void LogObserver::OnOperation(const OperationSnapshot& operation) {
  // Progress is not news; the start and the end are.
  if (operation.finished_state()) {
    operations_.erase(operation.id);
  } else if (!operations_.try_emplace(operation.id, operation.state).second) {
    return;
  }
  LogLine line("operation");
  line.Add("operation", absl::StrCat("op-", operation.id))
      .Add("kind", OperationKindName(operation.kind))
      .Add("state", OperationStateName(operation.state))
      .Add("model", operation.model)
      .Add("version", operation.version);
  if (!operation.label.empty()) line.Add("label", operation.label);
  line.Add("uid", operation.requested_by_uid);
  if (operation.trigger != kTriggerApi) line.Add("trigger", operation.trigger);
  if (operation.finished_state()) {
    line.AddSeconds("duration_seconds", operation.finished - operation.started);
    if (operation.result.unchanged) line.Add("unchanged", true);
    line.AddError(operation.status);
  }
  logger_.Write(operation.state == OperationState::kFailed ? LogLevel::kWarning : LogLevel::kInfo,
                line);
}

void LogObserver::OnIntegrityCheck(const std::string& model, const std::string& kind,
                                   const absl::Status& status) {
  logger_.Write(LevelOf(status), LogLine("integrity_check")
                                     .Add("model", model)
                                     .Add("kind", kind)
                                     .Add("outcome", status.ok() ? "success" : "failed")
                                     .AddError(status));
}

void LogObserver::OnRefused(const Peer& peer, const std::string& what, RefusedFor why) {
  constexpr size_t kMostKinds = 64;
  std::string kind = what.substr(0, what.find_first_of(" :"));
  if (!refusals_.contains(kind) && refusals_.size() >= kMostKinds) kind = "other";
  Refusals& refusals = refusals_[kind];
  if (clock_.Monotonic() - refusals.since >= absl::Seconds(1)) {
    refusals.since = clock_.Monotonic();
    refusals.said = 0;
  }
  if (refusals.said >= kRefusalsPerSecond) {
    ++refusals.suppressed;
    return;
  }
  ++refusals.said;
  LogLine line("refused");
  line.Add("what", what)
      .Add("reason", RefusedForName(why))
      .Add("pid", peer.pid)
      .Add("uid", peer.uid)
      .Add("comm", peer.comm);
  if (refusals.suppressed > 0) line.Add("suppressed", std::exchange(refusals.suppressed, 0));
  logger_.Write(LogLevel::kWarning, line);
}

void LogObserver::OnReady(bool ready) {
  logger_.Write(ready ? LogLevel::kInfo : LogLevel::kWarning, LogLine("ready").Add("ready", ready));
}

void LogObserver::OnInvalidTransition(const VersionKey& key, absl::string_view track,
                                      absl::string_view from, absl::string_view to) {
  logger_.Write(
      LogLevel::kError,
      ForVersion("invalid_transition", key).Add("track", track).Add("from", from).Add("to", to));
}

void LogObserver::OnRestart(const RestartSnapshot& restart) {
  LogLine line("restart");
  line.Add("descriptors", restart.received).Add("foreign", restart.foreign);
  line.Add("lost_versions", restart.failed_versions);
  if (!restart.problem.empty()) line.Add("refused", restart.problem);
  const bool good = restart.problem.empty() && restart.failed_versions == 0;
  logger_.Write(good ? LogLevel::kInfo : LogLevel::kWarning, line);
}

void LogObserver::OnRestored(const VersionKey& key, RestoreOutcome outcome) {
  logger_.Write(outcome == RestoreOutcome::kSuccess ? LogLevel::kInfo : LogLevel::kWarning,
                ForVersion("restored", key).Add("outcome", RestoreOutcomeName(outcome)));
}

void LogObserver::OnScan(uint64_t added, uint64_t invalid) {
  if (added == 0 && invalid == scan_invalid_) return;  // Nothing new.
  scan_invalid_ = invalid;
  logger_.Write(invalid == 0 ? LogLevel::kInfo : LogLevel::kWarning,
                LogLine("scan").Add("added", added).Add("invalid", invalid));
}

void LogObserver::OnDesiredFile(const DesiredFileReport& report) {
  // Looked at every few seconds: only what is new is said.
  if (!report.changed && report.state == desired_state_ && report.error == desired_error_) return;
  desired_state_ = report.state;
  desired_error_ = report.error;
  LogLine line("desired_file");
  line.Add("file", report.file).Add("state", DesiredFileStateName(report.state));
  line.Add("wanted", report.wanted);
  if (!report.error.empty()) {
    line.Add("error", report.error).Add("note", "nothing is started until the file is good");
  }
  logger_.Write(report.error.empty() ? LogLevel::kInfo : LogLevel::kWarning, line);
}

void LogObserver::OnDesiredLabel(const DesiredRow& row) {
  LogLine line(row.drifting ? "desired_drift" : "desired_label");
  line.Add("model", row.model)
      .Add("label", row.label)
      .Add("want", row.want)
      .Add("have", row.have)
      .Add("state", DesiredLabelStateName(row.state));
  if (!row.reason.empty()) line.Add("reason", row.reason);
  const bool bad = row.drifting || row.state == DesiredLabelState::kFailed;
  logger_.Write(bad ? LogLevel::kWarning : LogLevel::kInfo, line);
}

}  // namespace modelhost
