#include "daemon/region/device_cache.h"

#include <iterator>
#include <utility>

namespace modelhost {

DeviceCache::Claimed DeviceCache::Claim(const DeviceRegionKey& key,
                                        std::shared_ptr<const DeviceRegion>* copy) {
  std::shared_ptr<const DeviceRegion> lost;  // Its last reference is dropped outside the lock.
  absl::MutexLock lock(&mutex_);
  if (const auto found = copies_.find(key); found != copies_.end()) {
    *copy = found->second.copy.lock();
    if (*copy != nullptr && !(*copy)->lost()) return Claimed::kResident;
    lost = std::exchange(*copy, nullptr);
  }
  return claims_.insert(key).second ? Claimed::kMine : Claimed::kElsewhere;
}

void DeviceCache::Insert(const std::shared_ptr<const DeviceRegion>& copy) {
  absl::MutexLock lock(&mutex_);
  // Entries of what is gone go as others come, so the map is never much larger than what lives.
  for (auto it = copies_.begin(); it != copies_.end();) {
    it = it->second.copy.expired() ? copies_.erase(it) : std::next(it);
  }
  copies_[copy->key()] = {copy, copy.get(), copy->bytes(), false};
  claims_.erase(copy->key());
}

void DeviceCache::Abandon(const DeviceRegionKey& key) {
  absl::MutexLock lock(&mutex_);
  claims_.erase(key);
}

bool DeviceCache::Wait(const DeviceRegionKey& key, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto free = [this, &key]()
                        ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !claims_.contains(key); };
  return mutex_.AwaitWithTimeout(absl::Condition(&free), timeout);
}

std::vector<std::shared_ptr<const DeviceRegion>> DeviceCache::On(const std::string& gpu) const {
  std::vector<std::shared_ptr<const DeviceRegion>> found;
  absl::MutexLock lock(&mutex_);
  for (const auto& [key, entry] : copies_) {
    if (key.gpu != gpu || entry.lost) continue;
    if (auto copy = entry.copy.lock()) found.push_back(std::move(copy));
  }
  return found;
}

bool DeviceCache::MarkLost(const DeviceRegion& copy) {
  absl::MutexLock lock(&mutex_);
  if (copy.lost()) return false;
  copy.MarkLost();
  // Another one may have its place by now. It is not held for the comparison: the last reference
  // must not be dropped here.
  const auto found = copies_.find(copy.key());
  if (found != copies_.end() && found->second.which == &copy) found->second.lost = true;
  return true;
}

DeviceCache::Sum DeviceCache::SumOn(const std::string& gpu) const {
  Sum sum;
  absl::MutexLock lock(&mutex_);
  for (const auto& [key, entry] : copies_) {
    if (key.gpu != gpu || entry.lost || entry.copy.expired()) continue;
    ++sum.copies;
    sum.bytes += entry.bytes;
  }
  return sum;
}

}  // namespace modelhost
