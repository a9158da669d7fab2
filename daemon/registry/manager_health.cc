// Whether what is resident is still what was loaded.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

bool ModelManager::Impl::PartlyPinned(const VersionRecord& record) {
  const Residency residency = PolicyOf(record.key.model).residency;
  return options.memlock != MemlockPolicy::kOff &&
         (residency == Residency::kPinned || residency == Residency::kSealed) &&
         record.resident->tier != HostTier::kPinned && record.resident->host_bytes() > 0;
}

void ModelManager::Impl::SetGoodHealth(VersionRecord& record) {
  const bool partly = PartlyPinned(record);
  SetHealth(record, partly ? Health::kDegraded : Health::kOk,
            partly ? HealthReason::kPinPartial : HealthReason::kNone);
}

void ModelManager::Impl::SetHealth(VersionRecord& record, Health health, HealthReason reason,
                                   const std::string& detail) {
  if (record.health == health && record.health_reason == reason) return;
  record.health = health;
  record.health_reason = reason;
  Note(record.key, absl::StrCat("health ", HealthName(health)),
       absl::StrCat(HealthReasonName(reason), detail.empty() ? "" : ": ", detail));
  Changed(record);
}

void ModelManager::Impl::ScheduleHealthCheck() {
  health_timer = deps.loop.PostDelayed(options.health_interval, [this] {
    std::vector<std::pair<VersionKey, std::shared_ptr<const ResidentVersion>>> resident;
    for (const auto& [key, record] : versions) {
      if (record.resident != nullptr && record.health != Health::kSuspect) {
        resident.emplace_back(key, record.resident);
      }
    }
    OnShortPool(
        [resident = std::move(resident)]() mutable {
          std::vector<std::pair<VersionKey, std::shared_ptr<const ResidentVersion>>> changed;
          for (const auto& [key, version] : resident) {
            if (std::ranges::any_of(version->regions, [](const auto& region) {
                  return !region->SourceUnchanged();
                })) {
              changed.emplace_back(key, version);
            }
          }
          resident.clear();  // Maybe the last owner: not on the control thread.
          return changed;
        },
        [this](std::vector<std::pair<VersionKey, std::shared_ptr<const ResidentVersion>>> changed) {
          for (auto& [key, version] : changed) {
            VersionRecord* record = Find(key);
            // What has been loaded again meanwhile is not what was looked at.
            if (record == nullptr || record->resident != version) {
              Drop(std::move(version));
              continue;
            }
            SetHealth(*record, Health::kSuspect, HealthReason::kSourceChanged);
          }
          if (!stopping) ScheduleHealthCheck();
        });
  });
}

}  // namespace modelhost
