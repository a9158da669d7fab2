// Looking at the store: what a scan found, and what a verification said, become part of the
// records.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/retry_policy.h"
#include "daemon/registry/swap_policy.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

absl::StatusOr<OperationId> ModelManager::Verify(const VersionKey& key, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return absl::UnavailableError("the daemon is stopping");
  const VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  if (auto status = impl.CheckNotRemoved(key); !status.ok()) return status;
  for (auto& [running, verify] : impl.verifies) {
    if (verify.key != key) continue;
    // Who asks again does not wait for the next try.
    const OperationId id = running;
    if (verify.retry_timer != 0) {
      impl.deps.loop.CancelTimer(std::exchange(verify.retry_timer, 0));
      impl.StartVerify(id);
    }
    return id;
  }
  const OperationId id =
      impl.operations.Begin(OperationKind::kVerify, key.model, key.version, "", by);
  impl.verifies[id] = {key, std::make_shared<CancelToken>()};
  impl.StartVerify(id);
  return id;
}

void ModelManager::Impl::StartVerify(OperationId id) {
  const RunningVerify& verify = verifies.at(id);
  operations.Update(id, [](OperationSnapshot& operation) {
    operation.phase = "queued";
    operation.message.clear();
    operation.next_try = absl::Time();
  });
  const VersionKey key = verify.key;
  LoadRequest request;
  request.model = key.model;
  request.version = key.version;
  request.policy = PolicyOf(key.model);
  request.cancel = verify.cancel;
  request.progress = [this, id](const LoadProgress& progress) {
    deps.loop.Post([this, id, progress] {
      operations.Update(id, [&](OperationSnapshot& snapshot) {
        snapshot.phase = progress.phase;
        snapshot.bytes_done = progress.bytes_done;
        snapshot.bytes_total = progress.bytes_total;
      });
    });
  };
  OnLongPool(
      [this, request = std::move(request)] {
        const absl::Status verified = deps.loader.Verify(request);
        // What was found bad must be known after a restart, too. A record that cannot be
        // written is tried again with the next one.
        (void)deps.verified.Save(deps.state_dir);
        return verified;
      },
      [this, id, key](const absl::Status& status) { FinishVerify(id, key, status); });
}

void ModelManager::Impl::FinishVerify(OperationId id, const VersionKey& key,
                                      const absl::Status& status) {
  if (VerifyLater(id, status)) return;
  // One that was cancelled may have found something before it came to rest.
  if (verifies.erase(id) > 0 || !absl::IsCancelled(status)) {
    Tell([&](Observer& observer) { observer.OnIntegrityCheck(key.model, "full", status); });
    Note(key, "verified", status.ok() ? "good" : std::string(status.message()));
  }
  if (VersionRecord* found = Find(key)) ApplyVerified(*found, status);
  operations.Update(
      id, [&](OperationSnapshot& snapshot) { snapshot.result.bytes = snapshot.bytes_total; });
  operations.Finish(id, status);
  UpdateReady();
}

// True when it will be tried again. It reads and changes nothing, so it always may be.
bool ModelManager::Impl::VerifyLater(OperationId id, const absl::Status& status) {
  const auto found = verifies.find(id);
  if (stopping || found == verifies.end() || found->second.attempts >= options.retry.most ||
      !IsTransient(status, ErrnoOf(status))) {
    return false;
  }
  RunningVerify& verify = found->second;
  ++verify.attempts;
  const double dice = std::uniform_real_distribution<double>(0, 1)(random);
  const absl::Duration delay = RetryDelay(options.retry, verify.attempts, dice);
  const std::string when = absl::FormatDuration(absl::Trunc(delay, absl::Milliseconds(1)));
  Note(verify.key, "verify retry",
       absl::StrCat(verify.attempts, " of ", options.retry.most, " in ", when));
  operations.Update(id, [&](OperationSnapshot& operation) {
    operation.phase = "retry";
    operation.attempts = static_cast<uint32_t>(verify.attempts);
    operation.next_try = deps.clock.Wall() + delay;
    operation.message = absl::StrCat("try ", verify.attempts, " of ", options.retry.most,
                                     " failed: ", status.message(), "; the next one in ", when);
  });
  verify.retry_timer = deps.loop.PostDelayed(delay, [this, id] {
    const auto waiting = verifies.find(id);
    if (stopping || waiting == verifies.end()) return;
    waiting->second.retry_timer = 0;
    StartVerify(id);
  });
  return true;
}

void ModelManager::Impl::ApplyVerified(VersionRecord& record, const absl::Status& status) {
  if (status.ok()) {
    // A sealed copy whose files were bad, and are good again.
    if (record.resident != nullptr && record.health == Health::kDegraded &&
        record.health_reason == HealthReason::kSourceChanged) {
      SetHealth(record, GoodHealth(record), HealthCause::kVerify);
    }
    return;
  }
  if (ClassifyLoadFailure(status, ErrnoOf(status)) != LoadFailure::kBadBytes) return;
  if (record.phase == Phase::kStaged || record.phase == Phase::kFailed) {
    record.error = status;
    Move(record, Phase::kQuarantined);
    // Who waits for room for it, or for the next try, would wait for ever.
    const VersionKey key = record.key;
    StopRetrying(record);
    std::erase_if(waiting_for_room, [&](const RoomWaiter& waiter) { return waiter.key == key; });
    TellWaiters(record, status);
    RetryPendingAcquires(key.model);
    if (!waiting_for_room.empty()) deps.loop.Post([this] { LookForRoom(); });
  } else if (record.resident != nullptr && record.health != Health::kSuspect) {
    // A sealed copy was checked when it was made, and no disk can change it.
    SetHealth(record,
              {record.resident->all_sealed() ? Health::kDegraded : Health::kSuspect,
               HealthReason::kSourceChanged},
              HealthCause::kVerify, std::string(status.message()));
  }
}

void ModelManager::Rescan(std::function<void(absl::StatusOr<RescanResult>)> done) {
  impl_->ScanAgain(std::move(done));
}

void ModelManager::SetModelPolicies(std::map<std::string, ModelPolicy> policies) {
  Impl& impl = *impl_;
  impl.options.model_policies = std::move(policies);
  for (const auto& [name, policy] : impl.options.model_policies) impl.Book(name);
  for (auto& [name, book] : impl.models) {
    const auto over = impl.options.model_policies.find(name);
    impl.SetPolicy(book,
                   modelhost::Resolve(book.file_policy, over == impl.options.model_policies.end()
                                                            ? ModelPolicy{}
                                                            : over->second));
  }
  impl.UpdateReady();
}

void ModelManager::Impl::ScanAgain(ScanDone done) {
  // One at a time: an older picture applied after a newer one would take versions away.
  scan_waiters.push_back(std::move(done));
  if (!scanning) RunScan();
}

void ModelManager::Impl::RunScan() {
  scanning = true;
  struct Scanned {
    ScanResult models = std::vector<ScannedModel>{};
    ModelAccess access;
  };
  OnShortPool(
      [this, policies = options.model_policies] {
        Scanned scanned_now;
        scanned_now.models = deps.store.Scan();
        if (!scanned_now.models.ok()) return scanned_now;
        for (const ScannedModel& model : *scanned_now.models) {
          const auto over = policies.find(model.name);
          const EffectivePolicy policy = modelhost::Resolve(
              model.policy, over == policies.end() ? ModelPolicy{} : over->second);
          // With an unreadable model.toml these are the read_groups of the configuration, if any.
          if (!policy.read_groups.has_value()) continue;
          // Group look-ups may go to a directory server: here, not on the control thread.
          std::vector<std::string> unknown;
          scanned_now.access[model.name] = std::make_shared<const AccessPolicy>(
              AccessPolicy::Make(*policy.read_groups, {}, options.own_uid, &unknown));
        }
        return scanned_now;
      },
      [this, waiters = std::exchange(scan_waiters, {})](Scanned result) {
        scanning = false;
        absl::StatusOr<RescanResult> applied = TakeScan(std::move(result.models), result.access);
        for (const ScanDone& done : waiters) done(applied);
        if (!scan_waiters.empty() && !scanning) RunScan();
        RetryAfterScan();
        UpdateReady();
      });
}

absl::StatusOr<ModelManager::RescanResult> ModelManager::Impl::TakeScan(ScanResult scan,
                                                                        const ModelAccess& access) {
  if (!scan.ok()) {
    // Absence is not an instruction: what is resident stays, and says that its source is gone.
    store_error = std::string(scan.status().message());
    for (auto& [key, record] : versions) {
      if (record.resident != nullptr && record.health == Health::kOk) {
        SetHealth(record, {Health::kDegraded, HealthReason::kSourceGone}, HealthCause::kScan,
                  store_error);
      }
    }
    return scan.status();
  }
  FaultPoint("start.scanned");
  store_error.clear();
  scanned = true;
  const RescanResult applied = ApplyScan(*std::move(scan), access);
  Tell([&](Observer& observer) { observer.OnScan(applied.added, applied.invalid); });
  ReviewDesired();
  return applied;
}

// Who may read must never widen because a file could not be read: the rules of the last good scan
// stay, and without one only the daemon's own uid and root may.
void ModelManager::Impl::ApplyScannedPolicy(const ScannedModel& model, const ModelAccess& access) {
  ModelBook& book = Book(model.name);
  book.policy_error = model.policy_error;
  if (model.policy_error.empty()) {
    book.file_policy = model.policy;
    book.policy_known = true;
  }
  const auto over = options.model_policies.find(model.name);
  const ModelPolicy configured =
      over == options.model_policies.end() ? ModelPolicy{} : over->second;
  SetPolicy(book, modelhost::Resolve(book.file_policy, configured));
  if (model.policy_error.empty() || configured.read_groups.has_value()) {
    const auto it = access.find(model.name);
    book.access = it == access.end() ? nullptr : it->second;
  } else if (!book.policy_known) {
    book.access =
        std::make_shared<const AccessPolicy>(AccessPolicy::Make({}, {}, options.own_uid, nullptr));
  }
}

// One that is in use stays in use: a scan reports, it never takes away. Whether its bytes are still
// good is the health check's to say, which looks at the very files that are mapped.
void ModelManager::Impl::ApplyInvalidVersion(ModelBook& book, const std::string& model,
                                             const ScannedVersion& version) {
  VersionRecord* record = Find({model, version.number});
  if (record == nullptr || (record->resident == nullptr && record->cancel == nullptr)) {
    book.invalid.push_back(version);
    return;
  }
  const bool may_tell = record->health == Health::kOk ||
                        record->health_reason == HealthReason::kPinPartial ||
                        record->health_reason == HealthReason::kSourceGone;
  if (record->resident != nullptr && may_tell && !record->resident->all_sealed()) {
    SetHealth(*record, {Health::kDegraded, HealthReason::kSourceInvalid}, HealthCause::kScan,
              version.invalid);
  }
}

ModelManager::RescanResult ModelManager::Impl::ApplyScan(std::vector<ScannedModel> scanned_models,
                                                         const ModelAccess& access) {
  RescanResult result;
  std::set<VersionKey> seen;
  for (auto& [name, book] : models) book.invalid.clear();
  for (ScannedModel& model : scanned_models) {
    ++result.models;
    ModelBook& book = Book(model.name);
    ApplyScannedPolicy(model, access);
    if (!model.versions_error.empty()) {
      // Unknown is not absent.
      for (const auto& [key, record] : versions) {
        if (key.model == model.name) seen.insert(key);
      }
    }
    for (const ScannedVersion& version : model.versions) {
      if (!version.invalid.empty()) {
        ++result.invalid;
        const VersionRecord* record = Find({model.name, version.number});
        if (record != nullptr && (record->resident != nullptr || record->cancel != nullptr)) {
          seen.insert(record->key);
        }
        ApplyInvalidVersion(book, model.name, version);
        continue;
      }
      ++result.versions;
      seen.insert({model.name, version.number});
      ApplyScannedVersion(model.name, version, result);
    }
  }
  std::vector<VersionKey> gone;
  for (auto& [key, record] : versions) {
    if (seen.contains(key) || !record.on_disk) continue;
    record.on_disk = false;
    gone.push_back(key);
  }
  for (const VersionKey& key : gone) {
    ++result.gone;
    VersionRecord& record = *Find(key);
    if (record.resident != nullptr && record.health != Health::kSuspect) {
      SetHealth(record, {Health::kDegraded, HealthReason::kSourceGone}, HealthCause::kScan);
    }
    ForgetIfGone(key);
  }
  return result;
}

void ModelManager::Impl::ApplyScannedVersion(const std::string& model,
                                             const ScannedVersion& version, RescanResult& result) {
  const VersionKey key{model, version.number};
  const auto [it, added] = versions.try_emplace(key);
  VersionRecord& record = it->second;
  if (added) {
    record.key = key;
    ++result.added;
  }
  const bool returned = !std::exchange(record.on_disk, true);
  if (record.resident == nullptr) {
    record.file_bytes = version.bytes;
    if (version.digest.has_value()) record.digest = version.digest;
    record.created = version.created;
    // It was gone, and is back.
    if (record.host_tier == HostTier::kNone) SetHealth(record, {}, HealthCause::kScan);
  } else if (record.health == Health::kDegraded &&
             (record.health_reason == HealthReason::kSourceGone ||
              record.health_reason == HealthReason::kSourceInvalid)) {
    SetHealth(record, GoodHealth(record), HealthCause::kScan);
  }
  record.manifest = version.manifest;
  if (!added && !returned) return;
  record.created = version.created;
  Changed(record);
  if (restoring.contains(key)) LoadFromBefore(key);
  // A label may have been waiting for it since the start.
  if (scanned && record.phase == Phase::kStaged && !LabelsOf(key).empty()) {
    EnsureReady(key, {0, [this](const absl::Status&) { UpdateReady(); }});
  }
}

}  // namespace modelhost
