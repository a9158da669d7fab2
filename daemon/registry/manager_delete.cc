// Removing a version from the store: idle, then moved aside by one rename, then its bytes.
//
//   READY, idle --unload--> STAGED --rename--> gone (the version) --remove--> gone (the bytes)
//
// From the first step on nothing may begin on it; up to the rename it can be cancelled.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

OperationId ModelManager::Impl::RemovedBy(const VersionKey& key) const {
  if (const auto it = deletes.find(key); it != deletes.end()) return it->second.operation;
  for (const auto& [id, gc] : gcs) {
    if (std::ranges::find(gc.versions, key) != gc.versions.end()) return id;
  }
  return 0;
}

absl::Status ModelManager::Impl::CheckNotRemoved(const VersionKey& key) const {
  const OperationId by = RemovedBy(key);
  if (by == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(key.ToString(), ": op-", by,
                   " is removing it (wait for it, or `modelctl ops cancel op-", by, "`)"));
}

absl::Status ModelManager::Impl::CheckDelete(const VersionKey& key) const {
  const std::string name = key.ToString();
  if (auto status = CheckNotRemoved(key); !status.ok()) return status;
  if (const auto labelled = LabelsOf(key); !labelled.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": label ", absl::StrJoin(labelled, ", "),
                     " names it (swap to another version first, or `modelctl label rm`)"));
  }
  for (const auto& [id, running] : publishes) {
    if (running.request.model == key.model && running.request.version == key.version) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": op-", id, " is publishing it (wait for it, or cancel it)"));
    }
  }
  for (const auto& [id, upload] : uploads) {
    if (upload.request.model == key.model && upload.request.version == key.version) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": op-", id, " is about to publish it (wait for it, or cancel it)"));
    }
  }
  for (const auto& [id, verify] : verifies) {
    if (verify.key == key) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": op-", id, " is verifying it (wait for it, or cancel it)"));
    }
  }
  const VersionRecord* record = Find(key);
  if (record == nullptr) {
    const auto book = models.find(key.model);
    const bool invalid =
        book != models.end() &&
        std::ranges::any_of(book->second.invalid, [&](const ScannedVersion& version) {
          return version.number == key.version && version.name == absl::StrCat(key.version);
        });
    return invalid ? absl::OkStatus() : NoSuchVersion(key);
  }
  if (FactsOf(*record).awaits_clients) {
    return absl::FailedPreconditionError(
        absl::StrCat(name,
                     ": the daemon was restarted a moment ago, and clients that use it may "
                     "still come back (try again in half a minute)"));
  }
  switch (MayDelete(FactsOf(*record))) {
    case Verdict::kYes:
      break;
    case Verdict::kNotReady:
      // Idle: it is unloaded first, or is being so.
      if (record->phase == Phase::kReady || record->phase == Phase::kUnloading) break;
      return absl::FailedPreconditionError(absl::StrCat(name, ": it is ", PhaseName(record->phase),
                                                        " (`modelctl unload ", name, "` first)"));
    case Verdict::kLabelled:  // On disk, maybe: a write of the labels failed.
      return absl::FailedPreconditionError(absl::StrCat(
          name, ": a label may name it, whose change could not be made durable (try again)"));
    case Verdict::kLeased: {
      const uint64_t held = leases.CountOf(key);
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": ", held, held == 1 ? " lease is" : " leases are",
                       " on it (`modelctl leases --model ", key.model, "` shows who holds them)"));
    }
    case Verdict::kHeld:
      return absl::FailedPreconditionError(absl::StrCat(name, ": a swap to it is under way"));
    case Verdict::kBusy:
    case Verdict::kSuspect:
      for (const auto& waiter : record->waiters) {
        if (waiter.operation == 0) continue;
        return absl::FailedPreconditionError(absl::StrCat(name, ": op-", waiter.operation,
                                                          " is at work on it (wait for it, or "
                                                          "cancel it)"));
      }
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": it is being loaded (`modelctl unload ", name, "` first)"));
  }
  if (!record->on_disk) return NoSuchVersion(key);
  return absl::OkStatus();
}

std::vector<std::string> ModelManager::Impl::DeleteWarnings(const VersionKey& key) const {
  std::vector<std::string> warnings;
  for (const auto& [name, label] : labels.labels) {
    if (name.first != key.model || label.version == 0 || label.previous != key.version) continue;
    warnings.push_back(absl::StrCat("`modelctl rollback` of ", name.first, ":", name.second,
                                    " goes to it, and will have nowhere to go"));
  }
  const VersionRecord* record = Find(key);
  if (record != nullptr && record->resident != nullptr) {
    warnings.push_back("it is in memory, and will be unloaded");
  }
  return warnings;
}

absl::StatusOr<OperationId> ModelManager::Delete(const VersionKey& key, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Impl::StoppingError();
  if (const auto running = impl.deletes.find(key); running != impl.deletes.end()) {
    return running->second.operation;
  }
  if (auto may = impl.CheckDelete(key); !may.ok()) return may;
  const OperationId id =
      impl.operations.Begin(OperationKind::kDelete, key.model, key.version, "", by);
  impl.deletes[key].operation = id;
  VersionRecord* record = impl.Find(key);
  if (record == nullptr) {
    impl.RemoveFromDisk(key);
    return id;
  }
  record->deleting = id;
  impl.StopRetrying(*record);
  switch (record->phase) {
    case Phase::kReady:
      impl.operations.Update(id, [](OperationSnapshot& operation) { operation.phase = "unload"; });
      impl.BeginDrain(*record, 0);  // No lease is left: it is freed at once.
      break;
    case Phase::kUnloading:  // FinishUnload goes on.
      break;
    default:
      impl.RemoveFromDisk(key);
      break;
  }
  return id;
}

void ModelManager::Impl::RemoveFromDisk(const VersionKey& key) {
  const auto running = deletes.find(key);
  if (running == deletes.end()) return;
  const OperationId id = running->second.operation;
  operations.Update(id, [](OperationSnapshot& operation) { operation.phase = "rename"; });
  struct Moved {
    bool cancelled = false;
    bool gone = false;
    absl::Status status;
    std::shared_ptr<RemovedVersion> removed;
  };
  OnShortPool(
      [this, key, gate = running->second.gate] {
        Moved moved;
        if (!gate->Pass()) {
          moved.cancelled = true;
          return moved;
        }
        auto removed = RemovedVersion::MoveAside(deps.store, deps.verified, deps.state_dir,
                                                 key.model, absl::StrCat(key.version), &moved.gone);
        moved.status = removed.status();
        if (removed.ok()) moved.removed = std::make_shared<RemovedVersion>(*std::move(removed));
        return moved;
      },
      [this, key, id](Moved moved) {
        if (moved.cancelled) return;  // All is as it was, and has been said.
        if (moved.gone) {
          // The number is free from here on: what is published and loaded under it is another one.
          deletes.erase(key);
          ForgetDeleted(key);
        } else if (VersionRecord* record = Find(key)) {
          record->deleting = 0;
        }
        if (moved.removed == nullptr) return FinishDelete(key, id, moved.status);
        operations.Update(id, [](OperationSnapshot& operation) { operation.phase = "remove"; });
        // Freeing gigabytes of disk takes a while, and nobody waits for it but this operation.
        OnLongPool(
            [this, removed = moved.removed] {
              const absl::Status status = removed->Remove();
              (void)deps.verified.Save(deps.state_dir);
              return status;
            },
            [this, key, id, removed = moved.removed](const absl::Status& status) {
              operations.Update(id, [&](OperationSnapshot& operation) {
                operation.result.removed = 1;
                operation.result.bytes = removed->use().bytes();
                operation.result.freed_bytes =
                    status.ok() ? FreedBytes(std::span(&removed->use(), 1)) : 0;
              });
              if (status.ok()) return FinishDelete(key, id, status);
              FinishDelete(
                  key, id,
                  absl::Status(
                      status.code(),
                      absl::StrCat(key.ToString(), ": is gone, but not all of its bytes: ",
                                   status.message(), " (`modelctl gc` removes the rest)")));
            });
      });
}

void ModelManager::Impl::ForgetDeleted(const VersionKey& key) {
  if (const auto book = models.find(key.model); book != models.end()) {
    std::erase_if(book->second.invalid, [&](const ScannedVersion& version) {
      return version.number == key.version && version.name == absl::StrCat(key.version);
    });
  }
  Note(key, "deleted", "");
  VersionRecord* record = Find(key);
  if (record == nullptr) return;
  record->deleting = 0;
  record->on_disk = false;
  ForgetIfGone(key);
}

void ModelManager::Impl::FinishDelete(const VersionKey& key, OperationId id,
                                      const absl::Status& status) {
  // A scan that began before may still know it: the last word has one that begins now.
  ScanAgain([this, key, id, status](const absl::StatusOr<RescanResult>&) {
    const auto running = deletes.find(key);
    if (running != deletes.end() && running->second.operation == id) deletes.erase(running);
    operations.Finish(id, status);
  });
}

absl::Status ModelManager::Impl::CancelDelete(OperationId operation,
                                              const absl::Status& cancelled) {
  for (auto it = deletes.begin(); it != deletes.end(); ++it) {
    if (it->second.operation != operation || !it->second.gate->Close()) continue;
    if (VersionRecord* record = Find(it->first)) record->deleting = 0;
    deletes.erase(it);
    operations.Finish(operation, cancelled);
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "op-", operation, ": the version is being removed, it cannot be stopped any more"));
}

void ModelManager::PlanDelete(const VersionKey& key,
                              std::function<void(absl::StatusOr<DeletePlan>)> done) {
  Impl& impl = *impl_;
  if (impl.stopping) return done(Impl::StoppingError());
  if (auto may = impl.CheckDelete(key); !may.ok()) return done(may);
  // A walk over the store, which may be slow: not before label writes.
  impl.OnLongPool(
      [&impl, key] {
        return MeasureVersion(impl.deps.store, key.model, absl::StrCat(key.version));
      },
      [&impl, key, done = std::move(done)](absl::StatusOr<DiskUse> use) {
        if (!use.ok()) return done(use.status());
        done(DeletePlan{key, *std::move(use), impl.DeleteWarnings(key)});
      });
}

}  // namespace modelhost
