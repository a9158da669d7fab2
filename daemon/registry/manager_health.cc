// Whether what is resident is still what was loaded.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

HealthState ModelManager::Impl::GoodHealth(const VersionRecord& record) {
  const Residency residency = PolicyOf(record.key.model).residency;
  const bool partly_pinned = options.memlock != MemlockPolicy::kOff &&
                             (residency == Residency::kPinned || residency == Residency::kSealed) &&
                             record.resident != nullptr &&
                             record.resident->tier != HostTier::kPinned &&
                             record.resident->host_bytes() > 0;
  return partly_pinned ? HealthState{Health::kDegraded, HealthReason::kPinPartial} : HealthState{};
}

bool ModelManager::Impl::SetHealth(VersionRecord& record, HealthState to, HealthCause cause,
                                   const std::string& detail) {
  const HealthState from = record.health_state();
  if (from == to) return true;
  if (!Took(record, "health", HealthStateName(from), HealthStateName(to),
            record.SetHealth(to, cause))) {
    return false;
  }
  Note(record.key, absl::StrCat("health ", HealthName(to.health)),
       absl::StrCat(HealthReasonName(to.reason), detail.empty() ? "" : ": ", detail));
  Changed(record);
  return true;
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
            SetHealth(*record, {Health::kSuspect, HealthReason::kSourceChanged},
                      HealthCause::kHealthCheck);
          }
          if (!stopping) ScheduleHealthCheck();
        });
  });
}

}  // namespace modelhost
