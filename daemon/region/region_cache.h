// Which contents are resident now, and which are on their way. Holds no region alive. Thread-safe.
//
//   Claim(key) -> a region          it is resident: use it
//              -> kMine             make it, then Insert or Abandon
//              -> kElsewhere        another load is making it: Wait, then Claim again
//
// A load makes everything that it has claimed before it waits for others, so no two loads can wait
// for each other.
#pragma once

#include <map>
#include <memory>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/region/host_region.h"

namespace modelhost {

class RegionCache {
 public:
  enum class Claimed { kResident, kMine, kElsewhere };

  // `region` is set for kResident. A region whose source changed in place is not offered again.
  Claimed Claim(const RegionKey& key, std::shared_ptr<const HostRegion>* region);
  // Ends the claim with the region that it was for.
  void Insert(const std::shared_ptr<const HostRegion>& region);
  // Ends the claim without one: somebody else may try.
  void Abandon(const RegionKey& key);
  // Until nobody has a claim on `key`, at most `timeout`. True when nobody has.
  bool Wait(const RegionKey& key, absl::Duration timeout);

  // The resident region, or null.
  std::shared_ptr<const HostRegion> Find(const RegionKey& key);

 private:
  absl::Mutex mutex_;
  std::map<RegionKey, std::weak_ptr<const HostRegion>> regions_ ABSL_GUARDED_BY(mutex_);
  std::set<RegionKey> claims_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
