// What reads or writes the store: publish, verify, rescan.
#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"

namespace modelhost {

bool LooksLikeWeights(const std::string& path) {
  for (const char* ending :
       {".safetensors", ".gguf", ".onnx", ".pt", ".pth", ".bin", ".engine", ".plan"}) {
    if (absl::EndsWith(path, ending)) return true;
  }
  return false;
}

namespace {

constexpr size_t kMostUploadFiles = 4096;
constexpr absl::Duration kTicketLife = absl::Minutes(1);

absl::Status CheckPublish(const PublishRequest& request) {
  if (!IsValidModelName(request.model)) {
    return absl::InvalidArgumentError(
        absl::StrCat("model \"", request.model, "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
  }
  if (request.version == 0) {
    return absl::InvalidArgumentError("version 0: versions are numbers from 1");
  }
  if (request.files.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.model, "@", request.version, ": nothing to publish, no files"));
  }
  if (!request.residency.empty()) {
    if (auto residency = ParseResidency(request.residency); !residency.ok()) {
      return residency.status();
    }
  }
  return absl::OkStatus();
}

uint64_t TotalBytes(const std::vector<PublishFile>& files) {
  uint64_t bytes = 0;
  for (const PublishFile& file : files) bytes += file.bytes;
  return bytes;
}

absl::StatusOr<PublishResult> StageAll(Publisher& publisher, Store& store,
                                       const PublishRequest& request,
                                       const std::vector<UniqueFd>& fds, bool replace_bad,
                                       const StagedVersion::Progress& progress) {
  auto staged = publisher.Stage(request.model, request.version, request.files);
  if (!staged.ok()) return staged.status();
  for (size_t i = 0; i < fds.size(); ++i) {
    if (auto status = (*staged)->AddFile(request.files[i], fds[i], progress); !status.ok()) {
      return status;
    }
  }
  auto result = (*staged)->Commit(LooksLikeWeights, replace_bad);
  if (!result.ok() || request.residency.empty()) return result;
  if (auto status = store.SetResidency(request.model, *ParseResidency(request.residency));
      !status.ok()) {
    return status;
  }
  return result;
}

}  // namespace

absl::StatusOr<ModelManager::PublishTicket> ModelManager::PublishFromDescriptors(
    const PublishRequest& request, const Peer& by) {
  Impl& impl = *impl_;
  if (impl.stopping) return absl::UnavailableError("the daemon is stopping");
  if (auto status = CheckPublish(request); !status.ok()) return status;
  if (request.files.size() > kMostUploadFiles) {
    return absl::InvalidArgumentError(absl::StrCat(request.files.size(), " files: more than ",
                                                   kMostUploadFiles,
                                                   " do not go by descriptor (stream them)"));
  }
  PublishTicket ticket;
  if (RAND_bytes(ticket.ticket.data(), static_cast<int>(ticket.ticket.size())) != 1) {
    return absl::InternalError("publish: no random numbers to be had for a ticket");
  }
  ticket.operation =
      impl.operations.Begin(OperationKind::kPublish, request.model, request.version, "", by.uid);
  PendingUpload upload;
  upload.ticket = ticket.ticket;
  upload.uid = by.uid;
  upload.request = request;
  upload.timer = impl.deps.loop.PostDelayed(kTicketLife, [&impl, id = ticket.operation] {
    if (impl.uploads.erase(id) == 0) return;
    impl.operations.Finish(id, absl::DeadlineExceededError(absl::StrCat(
                                   "publish: the files' descriptors did not come within ",
                                   absl::FormatDuration(kTicketLife))));
  });
  impl.uploads.emplace(ticket.operation, std::move(upload));
  return ticket;
}

absl::Status ModelManager::OfferUpload(const Peer& peer, const UploadTicket& ticket, uint32_t first,
                                       std::vector<UniqueFd> fds, bool last) {
  Impl& impl = *impl_;
  const auto it = std::ranges::find_if(impl.uploads, [&](const auto& entry) {
    return CRYPTO_memcmp(entry.second.ticket.data(), ticket.data(), ticket.size()) == 0 &&
           entry.second.uid == peer.uid;
  });
  if (it == impl.uploads.end()) {
    return absl::PermissionDeniedError(
        "upload: the ticket is not known (used, too old, or somebody else's)");
  }
  const OperationId id = it->first;
  PendingUpload& upload = it->second;
  if (first != upload.fds.size() || fds.empty() ||
      upload.fds.size() + fds.size() > upload.request.files.size()) {
    return absl::InvalidArgumentError(absl::StrCat("upload: descriptors from ", first, ", but ",
                                                   upload.fds.size(), " of ",
                                                   upload.request.files.size(), " have come"));
  }
  std::move(fds.begin(), fds.end(), std::back_inserter(upload.fds));
  if (!last) return absl::OkStatus();
  if (upload.fds.size() != upload.request.files.size()) {
    const absl::Status status = absl::InvalidArgumentError(absl::StrCat(
        "upload: ", upload.fds.size(), " descriptors for ", upload.request.files.size(), " files"));
    impl.deps.loop.CancelTimer(upload.timer);
    impl.uploads.erase(it);
    impl.operations.Finish(id, status);
    return status;
  }
  impl.StartStaging(id);
  return absl::OkStatus();
}

void ModelManager::Impl::StartStaging(OperationId operation) {
  auto node = uploads.extract(operation);
  PendingUpload upload = std::move(node.mapped());
  deps.loop.CancelTimer(upload.timer);
  auto cancel = std::make_shared<CancelToken>();
  publishes[operation] = {upload.request, cancel};
  const VersionKey key{upload.request.model, upload.request.version};
  const VersionRecord* present = Find(key);
  const bool replace_bad = present != nullptr && present->phase == Phase::kQuarantined;
  const uint64_t total = TotalBytes(upload.request.files);
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.phase = "copy";
    snapshot.bytes_total = total;
  });
  auto fds = std::make_shared<std::vector<UniqueFd>>(std::move(upload.fds));
  OnPool(
      [this, operation, request = upload.request, fds, replace_bad, cancel] {
        absl::Duration told = absl::ZeroDuration();
        auto result =
            StageAll(deps.publisher, deps.store, request, *fds, replace_bad, [&](uint64_t bytes) {
              const absl::Duration now = deps.clock.Monotonic();
              if (now - told >= absl::Milliseconds(100)) {
                told = now;
                deps.loop.Post([this, operation, bytes] {
                  operations.Update(
                      operation, [&](OperationSnapshot& snapshot) { snapshot.bytes_done = bytes; });
                });
              }
              return !cancel->cancelled();
            });
        fds->clear();
        return result;
      },
      [this, operation](absl::StatusOr<PublishResult> result) {
        FinishPublish(operation, std::move(result));
      });
}

absl::StatusOr<OperationId> ModelManager::BeginStreamedPublish(const PublishRequest& request,
                                                               uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return absl::UnavailableError("the daemon is stopping");
  if (auto status = CheckPublish(request); !status.ok()) return status;
  const OperationId id =
      impl.operations.Begin(OperationKind::kPublish, request.model, request.version, "", by);
  impl.publishes[id] = {request, std::make_shared<CancelToken>()};
  impl.operations.Update(id, [&](OperationSnapshot& snapshot) {
    snapshot.phase = "copy";
    snapshot.bytes_total = TotalBytes(request.files);
  });
  return id;
}

void ModelManager::ReportPublishProgress(OperationId operation, uint64_t bytes_done) {
  impl_->operations.Update(operation,
                           [&](OperationSnapshot& snapshot) { snapshot.bytes_done = bytes_done; });
}

void ModelManager::FinishStreamedPublish(OperationId operation,
                                         absl::StatusOr<PublishResult> result) {
  Impl& impl = *impl_;
  const auto it = impl.publishes.find(operation);
  if (it == impl.publishes.end()) return;
  const PublishRequest& request = it->second.request;
  if (!result.ok() || request.residency.empty()) {
    return impl.FinishPublish(operation, std::move(result));
  }
  impl.OnPool(
      [&impl, model = request.model, residency = *ParseResidency(request.residency)] {
        return impl.deps.store.SetResidency(model, residency);
      },
      [&impl, operation, result = std::move(result)](const absl::Status& status) mutable {
        if (!status.ok()) result = status;
        impl.FinishPublish(operation, std::move(result));
      });
}

void ModelManager::Impl::FinishPublish(OperationId operation,
                                       absl::StatusOr<PublishResult> result) {
  const auto it = publishes.find(operation);
  if (it == publishes.end()) return;
  const PublishRequest request = it->second.request;
  publishes.erase(it);
  if (!result.ok()) return operations.Finish(operation, result.status());
  const VersionKey key{request.model, request.version};
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.result.digest = result->digest.Hex();
    snapshot.result.bytes = result->bytes;
    snapshot.result.linked_bytes = result->linked_bytes;
    snapshot.result.unchanged = result->already_there;
    snapshot.bytes_done = snapshot.bytes_total;
    snapshot.phase = "rescan";
  });
  if (VersionRecord* record = Find(key);
      record != nullptr && record->phase == Phase::kQuarantined && result->repaired) {
    record->error = absl::OkStatus();
    Move(*record, Phase::kStaged);
  }
  // The operation ends when the version can be used, so a scan comes first.
  ScanAgain([this, operation, key, digest = result->digest](absl::StatusOr<RescanResult> scan) {
    Note(key, "published", digest.Short());
    if (scan.ok() && Find(key) == nullptr) {
      return operations.Finish(operation, NoSuchVersion(key));
    }
    operations.Finish(operation, scan.ok() ? absl::OkStatus() : scan.status());
  });
}

bool ModelManager::IsQuarantined(const VersionKey& key) const {
  const VersionRecord* record = impl_->Find(key);
  return record != nullptr && record->phase == Phase::kQuarantined;
}

bool ModelManager::IsOperationCancelled(OperationId operation) const {
  const auto it = impl_->publishes.find(operation);
  return it == impl_->publishes.end() || it->second.cancel->cancelled();
}

// --- Verify
// ----------------------------------------------------------------------------------------

absl::StatusOr<OperationId> ModelManager::Verify(const VersionKey& key, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return absl::UnavailableError("the daemon is stopping");
  const VersionRecord* record = impl.Find(key);
  if (record == nullptr) return impl.NoSuchVersion(key);
  for (const OperationSnapshot& running : impl.operations.List()) {
    if (!running.finished_state() && running.kind == OperationKind::kVerify &&
        running.model == key.model && running.version == key.version) {
      return running.id;
    }
  }
  const OperationId id =
      impl.operations.Begin(OperationKind::kVerify, key.model, key.version, "", by);
  auto cancel = std::make_shared<CancelToken>();
  impl.verifies[id] = cancel;
  LoadRequest request;
  request.model = key.model;
  request.version = key.version;
  request.policy = impl.PolicyOf(key.model);
  request.cancel = cancel;
  request.progress = [&impl, id](const LoadProgress& progress) {
    impl.deps.loop.Post([&impl, id, progress] {
      impl.operations.Update(id, [&](OperationSnapshot& snapshot) {
        snapshot.phase = progress.phase;
        snapshot.bytes_done = progress.bytes_done;
        snapshot.bytes_total = progress.bytes_total;
      });
    });
  };
  impl.OnPool([&impl, request = std::move(request)] { return impl.deps.loader.Verify(request); },
              [&impl, id, key](const absl::Status& status) {
                impl.verifies.erase(id);
                impl.Tell([&](Observer& observer) {
                  observer.OnIntegrityCheck(key.model, "full", status);
                });
                impl.Note(key, "verified", status.ok() ? "good" : std::string(status.message()));
                VersionRecord* found = impl.Find(key);
                if (found != nullptr &&
                    ClassifyLoadFailure(status, ErrnoOf(status)) == LoadFailure::kBadBytes &&
                    !status.ok()) {
                  if (found->phase == Phase::kStaged || found->phase == Phase::kFailed) {
                    found->error = status;
                    impl.Move(*found, Phase::kQuarantined);
                  } else if (found->resident != nullptr) {
                    impl.SetHealth(*found, Health::kSuspect, HealthReason::kSourceChanged);
                  }
                }
                impl.operations.Update(id, [&](OperationSnapshot& snapshot) {
                  snapshot.result.bytes = snapshot.bytes_total;
                });
                impl.operations.Finish(id, status);
                impl.UpdateReady();
              });
  return id;
}

// --- Rescan
// ----------------------------------------------------------------------------------------

void ModelManager::Rescan(std::function<void(absl::StatusOr<RescanResult>)> done) {
  impl_->ScanAgain(std::move(done));
}

void ModelManager::SetModelPolicies(std::map<std::string, ModelPolicy> policies) {
  Impl& impl = *impl_;
  impl.options.model_policies = std::move(policies);
  for (const auto& [name, policy] : impl.options.model_policies) impl.Book(name);
  for (auto& [name, book] : impl.models) {
    const auto over = impl.options.model_policies.find(name);
    book.policy = modelhost::Resolve(
        book.file_policy, over == impl.options.model_policies.end() ? ModelPolicy{} : over->second);
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
    std::map<std::string, std::shared_ptr<const AccessPolicy>> access;
  };
  OnPool(
      [this, policies = options.model_policies] {
        Scanned scanned_now;
        scanned_now.models = deps.store.Scan();
        if (!scanned_now.models.ok()) return scanned_now;
        for (const ScannedModel& model : *scanned_now.models) {
          const auto over = policies.find(model.name);
          const EffectivePolicy policy = modelhost::Resolve(
              model.policy, over == policies.end() ? ModelPolicy{} : over->second);
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
        RetryPendingAcquires();
        UpdateReady();
      });
}

absl::StatusOr<ModelManager::RescanResult> ModelManager::Impl::TakeScan(
    ScanResult scan, const std::map<std::string, std::shared_ptr<const AccessPolicy>>& access) {
  if (!scan.ok()) {
    // Absence is not an instruction: what is resident stays, and says that its source is gone.
    store_error = std::string(scan.status().message());
    for (auto& [key, record] : versions) {
      if (record.resident != nullptr && record.health == Health::kOk) {
        SetHealth(record, Health::kDegraded, HealthReason::kSourceGone);
      }
    }
    return scan.status();
  }
  store_error.clear();
  scanned = true;
  const RescanResult applied = ApplyScan(*std::move(scan));
  for (auto& [name, book] : models) {
    const auto it = access.find(name);
    book.access = it == access.end() ? nullptr : it->second;
  }
  Tell([&](Observer& observer) { observer.OnScan(applied.added, applied.invalid); });
  return applied;
}

ModelManager::RescanResult ModelManager::Impl::ApplyScan(std::vector<ScannedModel> scanned_models) {
  RescanResult result;
  std::set<VersionKey> seen;
  for (auto& [name, book] : models) book.invalid.clear();
  for (ScannedModel& model : scanned_models) {
    ++result.models;
    ModelBook& book = Book(model.name);
    book.file_policy = model.policy;
    book.policy_error = model.policy_error;
    const auto over = options.model_policies.find(model.name);
    book.policy = modelhost::Resolve(
        model.policy, over == options.model_policies.end() ? ModelPolicy{} : over->second);
    if (!model.versions_error.empty()) {
      // Unknown is not absent.
      for (const auto& [key, record] : versions) {
        if (key.model == model.name) seen.insert(key);
      }
    }
    for (const ScannedVersion& version : model.versions) {
      if (!version.invalid.empty()) {
        ++result.invalid;
        // One that is in use stays in use: a scan reports, it never takes away.
        const VersionRecord* record = Find({model.name, version.number});
        if (record != nullptr && record->resident != nullptr) {
          seen.insert(record->key);
          SetHealth(*Find(record->key), Health::kSuspect, HealthReason::kSourceChanged);
        } else {
          book.invalid.push_back(version);
        }
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
    if (record.resident != nullptr) SetHealth(record, Health::kDegraded, HealthReason::kSourceGone);
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
  } else if (record.health == Health::kDegraded &&
             record.health_reason == HealthReason::kSourceGone) {
    SetHealth(record, Health::kOk, HealthReason::kNone);
  }
  if (!added && !returned) return;
  record.created = version.created;
  Changed(record);
  // A label may have been waiting for it since the start.
  if (scanned && record.phase == Phase::kStaged && !LabelsOf(key).empty()) {
    EnsureReady(key, {0, [this](const absl::Status&) { UpdateReady(); }});
  }
}

}  // namespace modelhost
