#include "daemon/registry/model_manager.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"

namespace modelhost {
namespace {

constexpr size_t kNearNames = 64;  // On each side of a wrong one.

}  // namespace

ModelManager::Impl::Impl(Deps deps_in, ManagerOptions options_in, LabelFile labels_in)
    : deps(deps_in),
      options(std::move(options_in)),
      labels(std::move(labels_in)),
      operations(deps_in.clock,
                 [this](const OperationSnapshot& operation) {
                   NoteOperation(operation);
                   JournalOperation(operation);
                   Tell([&](Observer& observer) { observer.OnOperation(operation); });
                   DesiredOperation(operation);
                 }),
      journal(deps_in.os, deps_in.state_dir) {
  RestoreOperations();
}

ModelManager::ModelManager(Deps deps, ManagerOptions options, LabelFile labels)
    : impl_(std::make_unique<Impl>(deps, std::move(options), std::move(labels))) {}

ModelManager::~ModelManager() = default;

void ModelManager::AddObserver(Observer* observer) { impl_->observers.push_back(observer); }

void ModelManager::Start() {
  impl_->deps.loop.Post([impl = impl_.get()] {
    impl->started_wall = impl->deps.clock.Wall();
    impl->TellRestored();
    for (const auto& [name, policy] : impl->options.model_policies) impl->Book(name);
    impl->ScanAgain([impl](const absl::StatusOr<RescanResult>&) {
      // What the labels name was READY when they were written: load it again, then announce it.
      for (const auto& [name, record] : impl->labels.labels) {
        if (record.version == 0) continue;
        const VersionKey key{name.first, record.version};
        impl->Book(key.model);
        impl->EnsureReady(key, {0, [impl](const absl::Status&) { impl->UpdateReady(); }});
      }
      impl->LoadRestored();
      impl->UpdateReady();
    });
    impl->ScheduleHealthCheck();
    impl->ScheduleDeviceCheck();
  });
}

void ModelManager::CancelWork() { impl_->CancelWork(); }

void ModelManager::Stop(Task done) {
  impl_->on_stopped = std::move(done);
  impl_->CancelWork();
  impl_->MaybeStopped();
}

void ModelManager::Impl::CancelWork() {
  if (std::exchange(stopping, true)) return;
  if (health_timer != 0) deps.loop.CancelTimer(health_timer);
  if (device_timer != 0) deps.loop.CancelTimer(device_timer);
  if (journal_timer != 0) {  // One more try, so that the ends of what ends now stand in it.
    deps.loop.CancelTimer(std::exchange(journal_timer, 0));
    FlushJournal();
  }
  StopDesired();
  if (restore_timer != 0) deps.loop.CancelTimer(restore_timer);
  const absl::Status why =
      absl::UnavailableError("the daemon is stopping (connect again when it is back)");
  while (!pending_acquires.empty()) TakePending(pending_acquires.begin()->first).done(why);
  waiting_for_room.clear();
  if (room_timer != 0) deps.loop.CancelTimer(std::exchange(room_timer, 0));
  for (auto& [key, record] : versions) {
    if (record.cancel != nullptr) record.cancel->Cancel();
    if (record.reload != nullptr) record.reload->Cancel();
    StopRetrying(record);
    // A load that runs tells its waiters when it has come to rest; the others have none to do so.
    if (record.cancel == nullptr && record.reload == nullptr) TellWaiters(record, why);
  }
  for (auto& [id, publish] : publishes) publish.cancel->Cancel();
  std::vector<OperationId> idle_publishes;  // Their descriptors have come, or will come in vain.
  for (const auto& [id, upload] : uploads) idle_publishes.push_back(id);
  for (const OperationId id : idle_publishes) {
    DropUpload(id);
    operations.Finish(id, why);
  }
  std::vector<OperationId> idle_verifies;  // Between two tries: nobody else would end them.
  for (auto& [id, verify] : verifies) {
    verify.cancel->Cancel();
    if (verify.retry_timer == 0) continue;
    deps.loop.CancelTimer(verify.retry_timer);
    idle_verifies.push_back(id);
  }
  for (const OperationId id : idle_verifies) {
    verifies.erase(id);
    operations.Finish(id, why);
  }
  for (auto& [id, gc] : gcs) gc.cancel->Cancel();
  if (look != nullptr) look->Cancel();
  UpdateReady();
}

void ModelManager::Impl::Drop(std::shared_ptr<const ResidentVersion> resident) {
  OnShortPool(
      [resident = std::move(resident)]() mutable {
        resident.reset();
        return 0;
      },
      [](int) {});
}

void ModelManager::Impl::MaybeStopped() {
  if (stopping && inflight == 0 && on_stopped) std::exchange(on_stopped, nullptr)();
}

void ModelManager::Impl::Tell(const std::function<void(Observer&)>& what) {
  for (Observer* observer : observers) what(*observer);
}

ModelBook& ModelManager::Impl::Book(const std::string& model) {
  const auto [it, added] = models.try_emplace(model);
  if (added) {
    const auto policy = options.model_policies.find(model);
    it->second.policy = modelhost::Resolve(
        ModelPolicy{}, policy == options.model_policies.end() ? ModelPolicy{} : policy->second);
  }
  return it->second;
}

const EffectivePolicy& ModelManager::Impl::PolicyOf(const std::string& model) {
  return Book(model).policy;
}

VersionRecord* ModelManager::Impl::Find(const VersionKey& key) {
  const auto it = versions.find(key);
  return it == versions.end() ? nullptr : &it->second;
}

const VersionRecord* ModelManager::Impl::Find(const VersionKey& key) const {
  const auto it = versions.find(key);
  return it == versions.end() ? nullptr : &it->second;
}

std::vector<std::string> ModelManager::Impl::LabelsOf(const VersionKey& key) const {
  std::vector<std::string> names;
  for (auto it = labels.labels.lower_bound({key.model, ""});
       it != labels.labels.end() && it->first.first == key.model; ++it) {
    if (it->second.version == key.version) names.push_back(it->first.second);
  }
  return names;
}

VersionFacts ModelManager::Impl::FactsOf(const VersionRecord& record) const {
  VersionFacts facts;
  facts.phase = record.phase;
  facts.health = record.health;
  facts.resident = record.resident != nullptr;
  facts.on_disk = record.on_disk;
  for (auto it = labels.labels.lower_bound({record.key.model, ""});
       it != labels.labels.end() && it->first.first == record.key.model; ++it) {
    if (it->second.version == record.key.version) ++facts.labels;
  }
  facts.maybe_labelled = maybe_labelled.contains(record.key);
  facts.leases = leases.CountOf(record.key);
  facts.holds = record.holds;
  facts.awaited = !record.waiters.empty();
  facts.reloading = record.reload != nullptr;
  facts.awaits_clients =
      record.from_before && record.resident != nullptr && deps.clock.Monotonic() < grace_ends;
  facts.unload_asked = record.unload != 0 || record.leaves_for != 0;
  return facts;
}

VersionSnapshot ModelManager::Impl::Snapshot(const VersionRecord& record) const {
  VersionSnapshot snapshot;
  snapshot.key = record.key;
  snapshot.name = absl::StrCat(record.key.version);
  snapshot.phase = record.phase;
  snapshot.health = record.health;
  snapshot.health_reason = record.health_reason;
  snapshot.error = record.error;
  if (record.resident != nullptr && record.error.ok()) snapshot.error = MayServe(record);
  snapshot.labels = LabelsOf(record.key);
  snapshot.digest = record.digest;
  snapshot.file_bytes = record.file_bytes;
  snapshot.created = record.created;
  if (record.resident != nullptr) {
    snapshot.requirements = record.resident->requirements;
  } else if (record.manifest != nullptr) {
    snapshot.requirements = record.manifest->requires_map;
  }
  snapshot.leases = leases.CountOf(record.key);
  if (const auto book = models.find(record.key.model); book != models.end()) {
    snapshot.residency = book->second.policy.residency;
  }
  snapshot.load_phase = record.progress.phase;
  snapshot.load_bytes_done = record.progress.bytes_done;
  snapshot.load_bytes_total = record.progress.bytes_total;
  snapshot.resident = record.resident;
  snapshot.device_residency = record.device_residency;
  return snapshot;
}

ModelSnapshot ModelManager::Impl::SnapshotModel(const std::string& name,
                                                const ModelBook& book) const {
  ModelSnapshot snapshot;
  snapshot.name = name;
  snapshot.policy = book.policy;
  snapshot.policy_error = book.policy_error;
  for (auto it = labels.labels.lower_bound({name, ""});
       it != labels.labels.end() && it->first.first == name; ++it) {
    if (it->second.version != 0) snapshot.labels[it->first.second] = it->second;
  }
  for (auto it = versions.lower_bound({name, 0}); it != versions.end() && it->first.model == name;
       ++it) {
    snapshot.versions.push_back(Snapshot(it->second));
  }
  for (const ScannedVersion& invalid : book.invalid) {
    VersionSnapshot entry;
    entry.key = {name, invalid.number};
    entry.name = invalid.name;
    entry.invalid = invalid.invalid;
    entry.file_bytes = invalid.bytes;
    entry.created = invalid.created;
    if (invalid.manifest != nullptr) entry.requirements = invalid.manifest->requires_map;
    snapshot.versions.push_back(std::move(entry));
  }
  return snapshot;
}

void ModelManager::Impl::Changed(const VersionRecord& record) {
  const VersionSnapshot snapshot = Snapshot(record);
  Tell([&](Observer& observer) { observer.OnVersion(snapshot); });
  ReviewDesired();
}

std::vector<std::string> ModelManager::Impl::NotReadyReasons() const {
  if (stopping) return {"stopping"};
  if (!scanned) return {"the store has not been read yet"};
  std::vector<std::string> reasons;
  for (const auto& [name, book] : models) {
    if (!book.policy.required) continue;
    const uint64_t version = LabelVersion(name, kDefaultLabel);
    if (version == 0) {
      reasons.push_back(
          absl::StrCat(name, ": required, but its label ", kDefaultLabel, " is not set"));
      continue;
    }
    const VersionRecord* record = Find({name, version});
    if (withdrawn.contains({name, kDefaultLabel})) {
      reasons.push_back(
          absl::StrCat("required, but ", WithdrawnError(name, kDefaultLabel).message()));
    } else if (record == nullptr) {
      reasons.push_back(absl::StrCat(name, "@", version, ": required, but not in the store"));
    } else if (record->resident == nullptr) {
      reasons.push_back(absl::StrCat(name, "@", version, ": required, but ",
                                     PhaseName(record->phase), record->error.ok() ? "" : ": ",
                                     record->error.message()));
    } else if (const absl::Status may = MayServe(*record); !may.ok()) {
      reasons.push_back(absl::StrCat("required, but not served: ", may.message()));
    }
  }
  return reasons;
}

void ModelManager::Impl::UpdateReady() {
  const bool ready = NotReadyReasons().empty();
  if (ready == was_ready) return;
  was_ready = ready;
  Tell([&](Observer& observer) { observer.OnReady(ready); });
}

absl::Status ModelManager::Impl::NoSuchModel(const std::string& model, bool near) const {
  if (!near) return absl::NotFoundError(absl::StrCat("model ", model, ": not in the store"));
  // Only those around it in the order of names: typing errors are rarely in the first letters, and
  // this thread has better things to do.
  std::vector<std::string> names;
  const auto at = models.lower_bound(model);
  auto before = at;
  for (size_t i = 0; i < kNearNames && before != models.begin(); ++i) {
    names.push_back((--before)->first);
  }
  auto after = at;
  for (size_t i = 0; i < kNearNames && after != models.end(); ++i) {
    names.push_back((after++)->first);
  }
  const auto nearest = NearestName(model, names);
  return absl::NotFoundError(absl::StrCat("model ", model, ": not in the store (",
                                          nearest.has_value()
                                              ? absl::StrCat("did you mean ", *nearest, "?")
                                              : "`modelctl ls` shows what is there",
                                          ")"));
}

absl::Status ModelManager::Impl::StoppingError() {
  return absl::UnavailableError("the daemon is stopping (try again when it is back)");
}

absl::Status ModelManager::Impl::SuspectError(const VersionRecord& record) const {
  const std::string name = record.key.ToString();
  return absl::FailedPreconditionError(
      absl::StrCat(name, ": SUSPECT, ", HealthReasonName(record.health_reason),
                   ": its files changed under it (swap to a good version; or publish the same "
                   "bytes again, which "
                   "repairs it; or `modelctl load ",
                   name, "`, which checks the files as they are now)"));
}

absl::Status ModelManager::Impl::NoSuchVersion(const VersionKey& key) const {
  const auto book = models.find(key.model);
  if (book == models.end()) return NoSuchModel(key.model);
  for (const ScannedVersion& invalid : book->second.invalid) {
    if (invalid.number == key.version) {
      return absl::FailedPreconditionError(
          absl::StrCat(key.ToString(), ": cannot be used as it is on disk: ", invalid.invalid));
    }
  }
  return absl::NotFoundError(absl::StrCat(key.ToString(),
                                          ": no such version in the store (`modelctl versions ",
                                          key.model, "` shows them)"));
}

// --- Looking
// ---------------------------------------------------------------------------------------

uint64_t ModelManager::epoch() const { return impl_->labels.epoch; }

StatusSnapshot ModelManager::Status() const {
  const Impl& impl = *impl_;
  StatusSnapshot status;
  status.epoch = impl.labels.epoch;
  status.started = impl.started_wall;
  status.not_ready = impl.NotReadyReasons();
  status.ready = status.not_ready.empty();
  status.store_root = impl.deps.store.root();
  status.store_error = impl.store_error;
  for (const BudgetPool* pool : impl.Pools()) {
    status.pools.push_back({pool->name(), pool->limit(), pool->reserved()});
  }
  switch (impl.options.memlock) {
    case MemlockPolicy::kRequired:
      status.memlock_policy = "required";
      break;
    case MemlockPolicy::kBestEffort:
      status.memlock_policy = "best_effort";
      break;
    case MemlockPolicy::kOff:
      status.memlock_policy = "off";
      break;
  }
  status.file_protection = impl.options.file_protection;
  status.clients = impl.leases.sessions().size();
  status.leases = impl.leases.leases().size();
  status.models = impl.models.size();
  status.invalid_transitions = impl.invalid_transitions;
  status.journal_error = std::string(impl.journal_status.message());
  status.restart = impl.SnapshotRestart();
  status.desired = impl.SnapshotDesired();
  for (const auto& [id, lease] : impl.leases.leases()) {
    if (!lease.gpu.empty()) ++status.importers[lease.gpu];
  }
  if (impl.deps.devices != nullptr) {
    status.devices = impl.deps.devices->Snapshot();
  } else {
    status.devices.known = true;
    status.devices.reason = "there is no device tier";
  }
  return status;
}

std::vector<ModelSnapshot> ModelManager::Models() const {
  std::vector<ModelSnapshot> list;
  for (const auto& [name, book] : impl_->models) list.push_back(impl_->SnapshotModel(name, book));
  return list;
}

absl::StatusOr<ModelSnapshot> ModelManager::Model(const std::string& name) const {
  const auto it = impl_->models.find(name);
  if (it == impl_->models.end()) return impl_->NoSuchModel(name);
  return impl_->SnapshotModel(name, it->second);
}

absl::StatusOr<VersionSnapshot> ModelManager::Version(const VersionKey& key) const {
  const VersionRecord* record = impl_->Find(key);
  if (record == nullptr) return impl_->NoSuchVersion(key);
  return impl_->Snapshot(*record);
}

absl::StatusOr<VersionKey> ModelManager::Resolve(const std::string& model,
                                                 const std::string& label) const {
  return impl_->ResolveRef({model, label.empty() ? kDefaultLabel : label, 0, Digest{}});
}

std::vector<Session> ModelManager::Sessions() const {
  std::vector<Session> list;
  for (const auto& [id, session] : impl_->leases.sessions()) {
    list.push_back(session);
    list.back().kept.clear();  // The last reference must not be dropped by who looks.
  }
  return list;
}

}  // namespace modelhost
