// Publishing, by descriptors or by a stream.
#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/region/chunk_pass.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

bool LooksLikeWeights(const std::string& path) {
  for (const char* ending :
       {".safetensors", ".gguf", ".onnx", ".pt", ".pth", ".bin", ".engine", ".plan", ".trt"}) {
    if (absl::EndsWith(path, ending)) return true;
  }
  return false;
}

namespace {

constexpr size_t kMostUploadFiles = 4096;

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
                                       CommitGate& gate, const StagedVersion::Progress& progress) {
  auto staged =
      publisher.Stage(request.model, request.version, request.files, request.requirements);
  if (!staged.ok()) return staged.status();
  (*staged)->OnProgress(progress);
  (*staged)->BeforeRename([&gate] { return gate.Pass(); });
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
  if (auto status = impl.CheckNotRemoved({request.model, request.version}); !status.ok()) {
    return status;
  }
  if (request.files.size() > kMostUploadFiles) {
    return absl::InvalidArgumentError(absl::StrCat(request.files.size(), " files: more than ",
                                                   kMostUploadFiles,
                                                   " do not go into one version"));
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
  upload.timer =
      impl.deps.loop.PostDelayed(impl.options.ticket_life, [&impl, id = ticket.operation] {
        if (!impl.DropUpload(id)) return;
        impl.operations.Finish(id, absl::DeadlineExceededError(absl::StrCat(
                                       "publish: the files' descriptors did not come within ",
                                       absl::FormatDuration(impl.options.ticket_life))));
      });
  impl.uploads.emplace(ticket.operation, std::move(upload));
  return ticket;
}

absl::Status ModelManager::OfferUpload(const Peer& peer, const UploadTicket& ticket, uint32_t first,
                                       std::vector<UniqueFd>&& fds, bool last) {
  Impl& impl = *impl_;
  const auto it = std::ranges::find_if(impl.uploads, [&](const auto& entry) {
    return CRYPTO_memcmp(entry.second.ticket.data(), ticket.data(), ticket.size()) == 0 &&
           entry.second.uid == peer.uid && !entry.second.complete;
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
  fds.clear();
  if (!last) return absl::OkStatus();
  if (upload.fds.size() != upload.request.files.size()) {
    const absl::Status status = absl::InvalidArgumentError(absl::StrCat(
        "upload: ", upload.fds.size(), " descriptors for ", upload.request.files.size(), " files"));
    impl.deps.loop.CancelTimer(upload.timer);
    impl.DropUpload(id);
    impl.operations.Finish(id, status);
    return status;
  }
  impl.StartStaging(id);
  return absl::OkStatus();
}

bool ModelManager::Impl::DropUpload(OperationId operation) {
  auto node = uploads.extract(operation);
  if (node.empty()) return false;
  // Closing what a client sent may take long.
  deps.pool.Post([fds = std::move(node.mapped().fds)]() mutable { fds.clear(); });
  return true;
}

OperationId ModelManager::Impl::PublishedBy(const VersionKey& key) const {
  for (const auto& [id, publish] : publishes) {
    if (publish.streamed) continue;
    if (publish.request.model == key.model && publish.request.version == key.version) return id;
  }
  for (const auto& [id, version] : settling) {
    if (version == key) return id;
  }
  return 0;
}

void ModelManager::Impl::StartNextPublish(const VersionKey& key) {
  if (stopping) return;
  std::vector<OperationId> next;
  for (const auto& [id, upload] : uploads) {
    const bool same = upload.request.model == key.model && upload.request.version == key.version;
    if (upload.complete && same) next.push_back(id);
  }
  // The first begins; the others say that they wait for it.
  for (const OperationId id : next) StartStaging(id);
}

void ModelManager::Impl::StartStaging(OperationId operation) {
  PendingUpload& waiting = uploads.at(operation);
  deps.loop.CancelTimer(std::exchange(waiting.timer, 0));
  // Two at once would both read everything, and only then would one of them learn what the other
  // has put there. Whether they are the same nobody knows before the bytes are read.
  if (const OperationId at_it = PublishedBy({waiting.request.model, waiting.request.version});
      at_it != 0) {
    waiting.complete = true;
    operations.Update(operation, [&](OperationSnapshot& snapshot) {
      snapshot.phase = "wait";
      snapshot.bytes_total = TotalBytes(waiting.request.files);
      snapshot.message = absl::StrCat("waiting for op-", at_it, ", which publishes this version");
    });
    return;
  }
  auto node = uploads.extract(operation);
  PendingUpload upload = std::move(node.mapped());
  auto cancel = std::make_shared<CancelToken>();
  publishes[operation] = {upload.request, cancel};
  const auto gate = publishes[operation].gate;
  const bool replace_bad = KnownBad({upload.request.model, upload.request.version});
  const uint64_t total = TotalBytes(upload.request.files);
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.phase = "copy";
    snapshot.message.clear();
    snapshot.bytes_total = total;
  });
  auto fds = std::make_shared<std::vector<UniqueFd>>(std::move(upload.fds));
  OnLongPool(
      [this, operation, request = upload.request, fds, replace_bad, cancel, gate] {
        absl::Duration told = absl::ZeroDuration();
        auto result = StageAll(
            deps.publisher, deps.store, request, *fds, replace_bad, *gate, [&](uint64_t bytes) {
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
  if (auto status = impl.CheckNotRemoved({request.model, request.version}); !status.ok()) {
    return status;
  }
  const OperationId id =
      impl.operations.Begin(OperationKind::kPublish, request.model, request.version, "", by);
  impl.publishes[id] = {request, std::make_shared<CancelToken>()};
  impl.publishes[id].streamed = true;
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
  impl.OnShortPool(
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
  const VersionKey key{request.model, request.version};
  settling.emplace(operation, key);
  publishes.erase(it);
  const auto end = [this, operation, key](const absl::Status& status) {
    settling.erase(operation);
    operations.Finish(operation, status);
    StartNextPublish(key);
  };
  if (!result.ok()) return end(result.status());
  operations.Update(operation, [&](OperationSnapshot& snapshot) {
    snapshot.result.digest = result->digest.Hex();
    snapshot.result.bytes = result->bytes;
    snapshot.result.linked_bytes = result->linked_bytes;
    snapshot.result.unchanged = result->already_there;
    snapshot.bytes_done = snapshot.bytes_total;
    snapshot.phase = "rescan";
  });
  for (auto& [id, verify] : verifies) {
    // One between two tries opens the files anew anyway.
    if (result->repaired && verify.key == key) verify.stale = verify.retry_timer == 0;
  }
  if (VersionRecord* record = Find(key);
      record != nullptr && record->phase == Phase::kQuarantined && result->repaired) {
    record->error = absl::OkStatus();
    Move(*record, Phase::kStaged);
  }
  // The operation ends when the version can be used, so a scan comes first.
  ScanAgain([this, operation, key, end, digest = result->digest,
             repaired = result->repaired](absl::StatusOr<RescanResult> scan) {
    Note(key, repaired ? "repaired" : "published", digest.Short());
    if (!scan.ok()) return end(scan.status());
    VersionRecord* record = Find(key);
    if (record == nullptr) return end(NoSuchVersion(key));
    if (repaired && record->phase == Phase::kStaged && !stopping && !LabelsOf(key).empty()) {
      EnsureReady(key, {0, [this](const absl::Status&) { UpdateReady(); }});
    }
    if (!repaired || record->phase != Phase::kReady || stopping) {
      return end(absl::OkStatus());
    }
    // What is resident still has the files that went bad.
    record->waiters.push_back(
        {operation, [end, key](const absl::Status& status) {
           end(status.ok() ? status
                           : AtPath(status, absl::StrCat(key.ToString(),
                                                         " is repaired on disk, but could not be "
                                                         "loaded again")));
         }});
    if (record->reload == nullptr) StartReload(*record);
  });
}

bool ModelManager::Impl::KnownBad(const VersionKey& key) const {
  const VersionRecord* record = Find(key);
  return record != nullptr &&
         (record->phase == Phase::kQuarantined || record->health == Health::kSuspect ||
          record->health_reason == HealthReason::kSourceChanged);
}

bool ModelManager::IsQuarantined(const VersionKey& key) const { return impl_->KnownBad(key); }

std::shared_ptr<CommitGate> ModelManager::PublishGate(OperationId operation) const {
  const auto it = impl_->publishes.find(operation);
  return it == impl_->publishes.end() ? nullptr : it->second.gate;
}

bool ModelManager::IsOperationCancelled(OperationId operation) const {
  const auto it = impl_->publishes.find(operation);
  return it == impl_->publishes.end() || it->second.cancel->cancelled();
}

}  // namespace modelhost
