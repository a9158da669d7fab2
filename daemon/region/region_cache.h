// Which contents are resident now: (digest, residency) -> region. Holds no region alive.
// Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/region/host_region.h"

namespace modelhost {

class RegionCache {
 public:
  std::shared_ptr<const HostRegion> Find(const Digest& digest, Residency residency);
  // The region that is there already wins, if there is one: two loads may race.
  std::shared_ptr<const HostRegion> Insert(std::shared_ptr<const HostRegion> region);

 private:
  absl::Mutex mutex_;
  std::map<std::pair<Digest, Residency>, std::weak_ptr<const HostRegion>> regions_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
