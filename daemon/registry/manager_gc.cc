// Garbage: versions beyond keep_on_disk, and what crashes and removed versions have left behind.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

std::vector<VersionKey> ModelManager::Impl::Garbage(const std::string& model) const {
  std::set<VersionKey> previous;
  for (const auto& [name, label] : labels.labels) {
    if (label.version != 0 && label.previous != 0) previous.insert({name.first, label.previous});
  }
  std::vector<GarbageCandidate> candidates;
  std::map<std::string, int64_t> keep;
  for (const auto& [name, book] : models) {
    if (!model.empty() && name != model) continue;
    keep[name] = book.policy.keep_on_disk;
    for (const ScannedVersion& invalid : book.invalid) {
      if (invalid.number == 0 || invalid.name != absl::StrCat(invalid.number)) continue;
      const VersionKey key{name, invalid.number};
      candidates.push_back({key, invalid.created, !CheckDelete(key).ok()});
    }
  }
  for (const auto& [key, record] : versions) {
    if (!keep.contains(key.model) || !record.on_disk) continue;
    candidates.push_back(
        {key, record.created,
         !AtRest(record.phase) || previous.contains(key) || !CheckDelete(key).ok()});
  }
  return ChooseGarbage(candidates, keep);
}

absl::StatusOr<OperationId> ModelManager::CollectGarbage(const std::string& model, uint32_t by) {
  Impl& impl = *impl_;
  if (impl.stopping) return Impl::StoppingError();
  if (!model.empty() && !impl.models.contains(model)) return impl.NoSuchModel(model);
  if (!impl.scanned) {
    return absl::FailedPreconditionError(
        "gc: the daemon is still reading its store (wait, or try again)");
  }
  for (const auto& [id, running] : impl.gcs) {
    if (running.model == model && !running.cancel->cancelled()) return id;
  }
  const OperationId id = impl.operations.Begin(OperationKind::kGc, model, 0, "", by);
  Impl::RunningGc& gc = impl.gcs[id];
  gc.model = model;
  gc.versions = impl.Garbage(model);
  for (const VersionKey& key : gc.versions) {
    if (VersionRecord* record = impl.Find(key)) {
      record->deleting = id;
      impl.StopRetrying(*record);
    }
  }
  impl.operations.Update(id, [&](OperationSnapshot& operation) {
    operation.phase = "remove";
    operation.message = absl::StrCat(gc.versions.size(), " versions");
  });
  FaultPoint("gc.planned");
  impl.StartGc(id);
  return id;
}

// On the pool. Goes on after an error with the next version, and tells the first.
ModelManager::Impl::GcOutcome ModelManager::Impl::RunGc(OperationId id, const RunningGc& gc) {
  GcOutcome outcome;
  std::vector<DiskUse> freed;
  const auto failed = [&](const absl::Status& status) {
    if (!absl::IsNotFound(status)) outcome.status.Update(status);
  };
  for (const VersionKey& key : gc.versions) {
    if (gc.cancel->cancelled()) break;
    bool gone = false;
    auto removed = RemovedVersion::MoveAside(deps.store, deps.verified, deps.state_dir, key.model,
                                             absl::StrCat(key.version), &gone);
    if (gone) ++outcome.removed;
    deps.loop.Post([this, id, key, gone, done = outcome.removed] { GcMoved(id, key, gone, done); });
    if (!removed.ok()) {
      failed(removed.status());
      continue;
    }
    outcome.bytes += removed->use().bytes();
    const absl::Status status = removed->Remove();
    if (status.ok()) freed.push_back(removed->use());
    failed(status);
    FaultPoint("gc.removed");
  }
  if (gc.model.empty() && !gc.cancel->cancelled()) {
    if (auto stale = FindStaleStaging(deps.store); stale.ok()) {
      const absl::Status swept = deps.publisher.SweepIncoming();
      FaultPoint("gc.swept");
      for (StaleStaging& staging : *stale) {
        outcome.bytes += staging.use.bytes();
        if (swept.ok()) freed.push_back(std::move(staging.use));
      }
      failed(swept);
    } else {
      failed(stale.status());
    }
    if (auto orphans = FindOrphanManifests(deps.store, deps.state_dir); orphans.ok()) {
      for (const std::string& name : *orphans) {
        failed(RemoveOrphanManifest(deps.store, deps.state_dir, name));
        FaultPoint("gc.orphans");
      }
    } else {
      failed(orphans.status());
    }
    // What is published in between is not among these, and read once more when it is loaded.
    if (auto files = AllVersionFiles(deps.store); files.ok()) {
      (void)deps.verified.ForgetOthers(*files, /*only_count=*/false);
    } else {
      failed(files.status());
    }
  }
  (void)deps.verified.Save(deps.state_dir);
  outcome.freed_bytes = FreedBytes(freed);
  FaultPoint("gc.done");
  return outcome;
}

void ModelManager::Impl::StartGc(OperationId id) {
  OnLongPool([this, id, gc = gcs.at(id)] { return RunGc(id, gc); },
             [this, id](const GcOutcome& outcome) {
               const auto node = gcs.extract(id);
               if (!node.empty()) {
                 for (const VersionKey& key : node.mapped().versions) {
                   VersionRecord* record = Find(key);
                   if (record != nullptr && record->deleting == id) record->deleting = 0;
                 }
               }
               operations.Update(id, [&](OperationSnapshot& operation) {
                 operation.result.removed = outcome.removed;
                 operation.result.bytes = outcome.bytes;
                 operation.result.freed_bytes = outcome.freed_bytes;
                 operation.result.unchanged = outcome.removed == 0 && outcome.bytes == 0;
               });
               ScanAgain([this, id, outcome](const absl::StatusOr<RescanResult>&) {
                 operations.Finish(id, outcome.status);
               });
             });
}

void ModelManager::Impl::GcMoved(OperationId id, const VersionKey& key, bool gone,
                                 uint64_t removed) {
  if (const auto gc = gcs.find(id); gc != gcs.end()) std::erase(gc->second.versions, key);
  if (VersionRecord* record = Find(key); record != nullptr && record->deleting == id) {
    record->deleting = 0;
  }
  if (gone) ForgetDeleted(key);
  operations.Update(id, [&](OperationSnapshot& operation) {
    operation.result.removed = removed;
    operation.message = absl::StrCat(key.ToString(), gone ? " removed" : " could not be removed");
  });
}

void ModelManager::PlanGarbage(const std::string& model,
                               const std::function<bool(const std::string& model)>& may_see,
                               bool leftovers,
                               std::function<void(absl::StatusOr<GarbagePlan>)> done) {
  Impl& impl = *impl_;
  if (impl.stopping) return done(Impl::StoppingError());
  if (!model.empty() && !impl.models.contains(model)) return done(impl.NoSuchModel(model));
  struct Asked {
    VersionKey key;
    std::string reason;
  };
  std::vector<Asked> versions;
  for (const VersionKey& key : impl.Garbage(model)) {
    if (!may_see(key.model)) continue;
    const VersionRecord* record = impl.Find(key);
    const bool bad = record == nullptr || record->phase == Phase::kQuarantined;
    versions.push_back(
        {key, absl::StrCat("beyond keep_on_disk = ", impl.models.at(key.model).policy.keep_on_disk,
                           bad ? ", and of no use as it is" : "")});
  }
  impl.OnLongPool(
      [&impl, versions = std::move(versions),
       all = model.empty() && leftovers]() -> absl::StatusOr<GarbagePlan> {
        Store& store = impl.deps.store;
        GarbagePlan plan;
        std::vector<DiskUse> uses;
        for (const Asked& version : versions) {
          auto use = MeasureVersion(store, version.key.model, absl::StrCat(version.key.version));
          if (absl::IsNotFound(use.status())) continue;
          if (!use.ok()) return use.status();
          plan.items.push_back({"version", version.key, "", use->bytes(), version.reason});
          uses.push_back(*std::move(use));
        }
        if (all) {
          auto stale = FindStaleStaging(store);
          if (!stale.ok()) return stale.status();
          for (StaleStaging& staging : *stale) {
            plan.items.push_back({"staging",
                                  {},
                                  absl::StrCat("incoming/", staging.name),
                                  staging.use.bytes(),
                                  "nobody works on it any more"});
            uses.push_back(std::move(staging.use));
          }
          auto orphans = FindOrphanManifests(store, impl.deps.state_dir);
          if (!orphans.ok()) return orphans.status();
          for (const std::string& name : *orphans) {
            plan.items.push_back({"computed_manifest",
                                  {},
                                  absl::StrCat("manifests/", name),
                                  0,
                                  "its version is not in the store"});
          }
          auto files = AllVersionFiles(store);
          if (!files.ok()) return files.status();
          const size_t others = impl.deps.verified.ForgetOthers(*files, /*only_count=*/true);
          if (others > 0) {
            plan.items.push_back({"verified_record",
                                  {},
                                  absl::StrCat(others, " of verified.json"),
                                  0,
                                  "of files that are not in the store"});
          }
        }
        for (const GarbageItem& item : plan.items) plan.bytes += item.bytes;
        plan.freed_bytes = FreedBytes(uses);
        return plan;
      },
      std::move(done));
}

}  // namespace modelhost
