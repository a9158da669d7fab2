// Which copies are on GPUs now, and which are on their way. Holds none alive. Thread-safe.
//
//   Claim(key) -> kResident     `copy` is set: use it
//              -> kMine         make it, then Insert or Abandon
//              -> kElsewhere    another load is making it: Wait, then Claim again
//
// As in RegionCache, a load makes all that it has claimed before it waits for others.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/region/device_region.h"
#include "daemon/region/region_cache.h"

namespace modelhost {

class DeviceCache {
 public:
  using Claimed = RegionCache::Claimed;

  // A lost copy is not offered again.
  Claimed Claim(const DeviceRegionKey& key, std::shared_ptr<const DeviceRegion>* copy);
  // Ends the claim with the copy that it was for.
  void Insert(const std::shared_ptr<const DeviceRegion>& copy);
  // Ends the claim without one: somebody else may try.
  void Abandon(const DeviceRegionKey& key);
  // Until nobody has a claim on `key`, at most `timeout`. True when nobody has.
  bool Wait(const DeviceRegionKey& key, absl::Duration timeout);

  // Those on `gpu`, without lost ones.
  std::vector<std::shared_ptr<const DeviceRegion>> On(const std::string& gpu) const;
  // False: it was lost already.
  bool MarkLost(const DeviceRegion& copy);
  // How many On has, and their bytes. Holds none for it: dropping the last reference may take long.
  struct Sum {
    uint64_t copies = 0;
    uint64_t bytes = 0;
  };
  Sum SumOn(const std::string& gpu) const;

 private:
  struct Entry {
    std::weak_ptr<const DeviceRegion> copy;
    const DeviceRegion* which = nullptr;  // To compare with; may be gone.
    uint64_t bytes = 0;
    bool lost = false;
  };

  mutable absl::Mutex mutex_;
  std::map<DeviceRegionKey, Entry> copies_ ABSL_GUARDED_BY(mutex_);
  std::set<DeviceRegionKey> claims_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
