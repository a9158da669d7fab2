// After a restart: what the last daemon had resident, and the clients that come back for it.
#include <utility>

#include "daemon/registry/manager_impl.h"

namespace modelhost {

absl::string_view RestoreOutcomeName(RestoreOutcome outcome) {
  switch (outcome) {
    case RestoreOutcome::kSuccess:
      return "success";
    case RestoreOutcome::kReread:
      return "reread";
    case RestoreOutcome::kFailed:
      return "failed";
  }
  return "failed";
}

void ModelManager::Impl::LoadRestored() {
  grace_ends = deps.clock.Monotonic() + options.restart_grace;
  deps.loop.PostDelayed(options.restart_grace, [this] { EndGrace(); });
  if (deps.restored == nullptr) return;
  const RestoreReport report = deps.restored->report();
  restart.received = report.received;
  restart.foreign = report.foreign;
  restart.failed_versions = report.refused + report.incomplete;
  if (report.received > 0) Tell([&](Observer& observer) { observer.OnRestart(SnapshotRestart()); });
  // Labelled ones are on their way already.
  for (const auto& [model, version] : deps.restored->versions()) {
    restoring.insert({model, version});
  }
  // A store that cannot be read yet is no loss of theirs: they are loaded when a scan finds them.
  if (!scanned) return;
  for (const VersionKey& key : std::set<VersionKey>(restoring)) LoadFromBefore(key);
}

void ModelManager::Impl::LoadFromBefore(const VersionKey& key) {
  VersionRecord* record = Find(key);
  if (record != nullptr) record->from_before = true;
  EnsureReady(key, {0, [this, key](const absl::Status& status) {
                      if (!status.ok()) NoteRestored(key, status);
                    }});
}

void ModelManager::Impl::LoadDeclared(SessionId session, std::span<const AcquireRef> refs) {
  // Later on a client may only take what is there: a declaration is no way to command loads.
  if (!in_grace || stopping) return;
  const auto holder = leases.sessions().find(session);
  if (holder == leases.sessions().end()) return;
  for (const AcquireRef& ref : refs) {
    const auto book = models.find(ref.model);
    if (ref.version == 0 || book == models.end()) continue;
    if (!MayRead(book->second, holder->second.peer)) continue;
    const VersionRecord* record = Find({ref.model, ref.version});
    if (record == nullptr || record->phase != Phase::kStaged) continue;
    const bool other =
        !ref.digest.IsZero() && record->digest.has_value() && *record->digest != ref.digest;
    if (!other) LoadFromBefore(record->key);
  }
}

void ModelManager::Impl::NoteRestored(const VersionKey& key,
                                      const absl::StatusOr<const LoadReport*>& report) {
  if (restoring.erase(key) == 0) return;
  RestoreOutcome outcome = RestoreOutcome::kFailed;
  if (!report.ok()) {
    ++restart.failed_versions;
  } else {
    const LoadReport& load = **report;
    restart.restored_bytes += load.restored_bytes;
    // Files are not in the store: with their index, the page cache is all that could be kept.
    const bool kept = load.source == "restore" || (load.restored_index && load.source != "cold");
    outcome = kept ? RestoreOutcome::kSuccess : RestoreOutcome::kReread;
    ++(kept ? restart.restored_versions : restart.reread_versions);
  }
  Tell([&](Observer& observer) { observer.OnRestored(key, outcome); });
}

void ModelManager::Impl::EndGrace() {
  if (stopping) return;
  if (!scanned) {
    // Nobody could look for it: a store that cannot be read is no reason to let go.
    deps.loop.PostDelayed(options.restart_grace, [this] { EndGrace(); });
    return;
  }
  in_grace = false;
  if (deps.restored == nullptr) return;
  OnShortPool([restored = deps.restored] { return restored->DropRest(); }, [](uint64_t) {});
}

RestartSnapshot ModelManager::Impl::SnapshotRestart() const {
  RestartSnapshot snapshot = restart;
  // A load may have found more than the start did.
  if (deps.restored != nullptr) snapshot.problem = deps.restored->report().problem;
  if (deps.parking != nullptr) {
    snapshot.fd_store = true;
    snapshot.parked = deps.parking->parked();
  }
  return snapshot;
}

}  // namespace modelhost
