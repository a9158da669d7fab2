#include "daemon/region/region_cache.h"

namespace modelhost {

std::shared_ptr<const HostRegion> RegionCache::Find(const RegionKey& key) {
  std::shared_ptr<const HostRegion> region;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(key);
    if (found == regions_.end()) return nullptr;
    region = found->second.lock();
    if (region == nullptr) regions_.erase(found);
  }
  // The system call is made, and a last reference dropped, outside the lock.
  return region != nullptr && region->SourceUnchanged() ? region : nullptr;
}

RegionCache::Claimed RegionCache::Claim(const RegionKey& key,
                                        std::shared_ptr<const HostRegion>* region) {
  *region = Find(key);
  if (*region != nullptr) return Claimed::kResident;
  {
    absl::MutexLock lock(&mutex_);
    if (!claims_.insert(key).second) return Claimed::kElsewhere;
  }
  // Its last maker may have finished between the look and the claim.
  *region = Find(key);
  if (*region == nullptr) return Claimed::kMine;
  Abandon(key);
  return Claimed::kResident;
}

void RegionCache::Insert(const std::shared_ptr<const HostRegion>& region) {
  absl::MutexLock lock(&mutex_);
  // Entries of dead regions go as others come, so the map is never much larger than what lives.
  for (auto it = regions_.begin(); it != regions_.end();) {
    it = it->second.expired() ? regions_.erase(it) : std::next(it);
  }
  regions_[region->key()] = region;
  claims_.erase(region->key());
}

void RegionCache::Abandon(const RegionKey& key) {
  absl::MutexLock lock(&mutex_);
  claims_.erase(key);
}

bool RegionCache::Wait(const RegionKey& key, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto free = [this, &key]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !claims_.contains(key); };
  return mutex_.AwaitWithTimeout(absl::Condition(&free), timeout);
}

}  // namespace modelhost
