// May what is resident be handed out? Asked again whenever the policies, or what is known of the
// machine, may have changed since it was loaded: it then stays where it is, and so do its leases,
// but nobody gets it anew.
#include <utility>

#include "daemon/region/chunk_pass.h"
#include "daemon/region/requires_check.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

absl::Status ModelManager::Impl::MayServe(const VersionKey& key, const ResidentVersion& resident,
                                          const MachineFacts& facts) const {
  const std::string name = key.ToString();
  const auto book = models.find(key.model);
  absl::Status may = book == models.end()
                         ? absl::OkStatus()
                         : CheckRequiredFiles(book->second.policy, *resident.manifest);
  if (may.ok()) may = CheckStillFits(name, resident.compared, facts);
  return may.ok() ? may : AtPath(may, name);
}

absl::Status ModelManager::Impl::MayServe(const VersionRecord& record) const {
  if (record.resident == nullptr) return absl::OkStatus();  // Its load will say.
  const auto book = models.find(record.key.model);
  const uint64_t policy = book == models.end() ? 0 : book->second.policy_number;
  std::shared_ptr<const MachineFacts> facts = deps.machine.Known();
  VersionRecord::Verdict& last = record.verdict;
  if (last.resident == record.resident.get() && last.facts == facts && last.policy == policy) {
    return last.status;
  }
  absl::Status status = MayServe(record.key, *record.resident, *facts);
  last = {record.resident.get(), std::move(facts), policy, status};
  return status;
}

void ModelManager::Impl::SetPolicy(ModelBook& book, EffectivePolicy policy) {
  book.policy = std::move(policy);
  ++book.policy_number;
}

void ModelManager::ReviewServed() {
  if (impl_->stopping) return;
  impl_->RetryFailed();
  impl_->LookAtMachine();
}

// What the labels name is what is to be served; why it failed may be over.
void ModelManager::Impl::RetryFailed() {
  std::set<VersionKey> failed;
  for (const auto& [name, label] : labels.labels) {
    const VersionRecord* record = Find({name.first, label.version});
    if (record != nullptr && record->phase == Phase::kFailed) failed.insert(record->key);
  }
  for (const VersionKey& key : failed) {
    EnsureReady(key, {0, [this](const absl::Status&) { UpdateReady(); }});
  }
}

// With the answer everything is compared again; until then with what was known before.
void ModelManager::Impl::LookAtMachine() {
  if (look != nullptr) {
    look_again = true;
    return;
  }
  FactsNeeded needed;
  for (const auto& [key, record] : versions) {
    if (record.resident == nullptr) continue;
    const FactsNeeded more = NeededFacts(record.resident->compared);
    needed.tensorrt = needed.tensorrt || more.tensorrt;
    needed.compute_capability = needed.compute_capability || more.compute_capability;
    needed.cuda_driver = needed.cuda_driver || more.cuda_driver;
  }
  if (!needed.any()) return TellRefused();
  look = std::make_shared<CancelToken>();
  OnLongPool(
      [this, needed, token = look] {
        return deps.machine.Facts(needed, [token] { return token->cancelled(); }).status();
      },
      [this](const absl::Status&) {
        look = nullptr;
        TellRefused();
        if (std::exchange(look_again, false) && !stopping) LookAtMachine();
      });
}

void ModelManager::Impl::TellRefused() {
  for (auto& [key, record] : versions) {
    if (record.resident == nullptr) continue;
    if (const absl::Status may = MayServe(record); !may.ok()) {
      Note(key, "not served", std::string(may.message()));
    }
    Changed(record);
  }
  std::vector<std::string> waited_for;
  for (const auto& [model, ids] : pending_by_model) waited_for.push_back(model);
  for (const std::string& model : waited_for) RetryPendingAcquires(model);
  UpdateReady();
}

}  // namespace modelhost
