// What loads would book, what could be given back for them, and what follows from that: one picture
// of the budgets for the dry run, the swap and every load that waits. Pure; any thread. Bytes.
//
// A region (one content with one residency) is booked once, whoever shares it: what is resident
// already costs nothing, and evicting one of two versions that share bytes frees none of them.
//
// Pools are a list, "host" and "memlock" today; every list of numbers here runs parallel to it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/registry/ids.h"
#include "daemon/store/digest.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

using PoolBytes = std::vector<uint64_t>;  // One number per pool.

struct PoolPicture {
  std::string name;
  uint64_t limit_bytes = UINT64_MAX;  // UINT64_MAX: none.
  uint64_t reserved_bytes = 0;
  // Booked by nobody that the books know: versions that were let go and are about to be freed.
  uint64_t lingering_bytes = 0;
  // False: what does not fit is loaded all the same, and not locked (memlock = "best_effort").
  bool decides = true;
};

using RegionId = std::pair<Digest, Residency>;
struct RegionBytes {
  RegionId id;
  PoolBytes bytes;
};

// Whether a resident version could make room.
enum class Stay : uint8_t {
  kKept,     // Labelled, leased or held.
  kIdle,     // READY, and nobody needs it.
  kLeaving,  // DRAINING or UNLOADING: its bytes come by themselves.
};

struct ResidentPicture {
  VersionKey key;
  Stay stay = Stay::kKept;
  absl::Time last_used;
  std::vector<RegionBytes> regions;
  std::string holder;  // For people: "planner@7 3.0 GiB stable 2 leases".
};

struct CapacityPicture {
  std::vector<PoolPicture> pools;
  std::vector<ResidentPicture> residents;
};

// What a load of one version books when nothing of it is resident.
struct WantedVersion {
  VersionKey key;
  std::vector<RegionBytes> regions;
  PoolBytes unnamed;  // Of files whose digests are not known yet: never shared. May be empty.
};

struct RoomPlan {
  struct Pool {
    uint64_t need_bytes = 0;   // To be booked: without what is resident already.
    uint64_t free_bytes = 0;   // Now; UINT64_MAX: no limit.
    uint64_t comes_bytes = 0;  // Given back by what leaves and what is evicted.
    uint64_t peak_bytes = 0;   // The most that is booked at one time.
    bool fits = true;
  };
  std::vector<Pool> pools;
  std::vector<VersionKey> evict;  // Least recently used first; no one of them could be left out.
  bool waits = false;             // For what is leaving already.
  bool fits = true;               // In all pools that decide.
};

// Room for all of `wanted` at once. `least` (may be empty) is a need that is known better: the plan
// needs at least that much of each pool.
RoomPlan PlanRoom(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
                  const PoolBytes& least = {});

// What `wanted` would book beside the residents as they are.
PoolBytes NeedOf(const CapacityPicture& picture, std::span<const WantedVersion> wanted);

// How a swap makes room. kAuto is only asked for, never chosen.
enum class SwapStrategy : uint8_t { kAvailability, kResource, kAuto };
absl::string_view SwapStrategyName(SwapStrategy strategy);
// INVALID_ARGUMENT: none of the three.
absl::StatusOr<SwapStrategy> ParseSwapStrategy(absl::string_view name);

struct StrategyChoice {
  SwapStrategy strategy = SwapStrategy::kAvailability;
  RoomPlan room;
  // OK, or why the swap is refused: RESOURCE_EXHAUSTED with the numbers and the holders, or
  // FAILED_PRECONDITION where only --allow-downtime is missing.
  absl::Status refused;
};

// `old` are the versions that the swap's label moves away from and that nothing else keeps.
// Downtime is never chosen unless `allow_downtime`, nor where both versions fit, unless asked for.
StrategyChoice ChooseStrategy(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
                              std::span<const VersionKey> old, SwapStrategy asked,
                              bool allow_downtime, const std::string& what);

// "held by: planner@7 3.0 GiB stable 2 leases, ..."; what leaves or is idle does not hold.
std::string HoldersText(const CapacityPicture& picture);

}  // namespace modelhost
