#include "daemon/registry/capacity_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/region/memory_budget.h"

namespace modelhost {
namespace {

void AddBytes(PoolBytes& sum, const PoolBytes& more) {
  for (size_t i = 0; i < sum.size() && i < more.size(); ++i) sum[i] += more[i];
}

// What follows when some residents are gone.
class RoomCount {
 public:
  RoomCount(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
            const PoolBytes& least)
      : picture_(picture), wanted_(wanted), least_(least) {}

  // `gone` by number of the resident; `lingering`: with what is about to be freed.
  bool Fits(const std::set<size_t>& gone, bool lingering) {
    Count(gone, lingering);
    for (size_t i = 0; i < picture_.pools.size(); ++i) {
      if (picture_.pools[i].decides && !FitsIn(i)) return false;
    }
    return true;
  }

  // The numbers of the last Count.
  bool FitsIn(size_t pool) const {
    const PoolPicture& picture = picture_.pools[pool];
    if (picture.limit_bytes == UINT64_MAX || need_[pool] == 0) return true;
    const uint64_t stays = picture.reserved_bytes - std::min(picture.reserved_bytes, freed_[pool]);
    return stays <= picture.limit_bytes && need_[pool] <= picture.limit_bytes - stays;
  }
  const PoolBytes& need() const { return need_; }
  const PoolBytes& freed() const { return freed_; }

  void Count(const std::set<size_t>& gone, bool lingering) {
    const size_t pools = picture_.pools.size();
    std::set<RegionId> kept;
    std::map<RegionId, const PoolBytes*> leaving;
    for (size_t i = 0; i < picture_.residents.size(); ++i) {
      for (const RegionBytes& region : picture_.residents[i].regions) {
        if (gone.contains(i)) {
          leaving.emplace(region.id, &region.bytes);
        } else {
          kept.insert(region.id);
        }
      }
    }
    freed_.assign(pools, 0);
    for (const auto& [id, bytes] : leaving) {
      if (!kept.contains(id)) AddBytes(freed_, *bytes);
    }
    if (lingering) {
      for (size_t i = 0; i < pools; ++i) freed_[i] += picture_.pools[i].lingering_bytes;
    }
    need_.assign(pools, 0);
    for (const WantedVersion& version : wanted_) {
      AddBytes(need_, version.unnamed);
      for (const RegionBytes& region : version.regions) {
        if (kept.insert(region.id).second) AddBytes(need_, region.bytes);
      }
    }
    for (size_t i = 0; i < pools && i < least_.size(); ++i) {
      need_[i] = std::max(need_[i], least_[i]);
    }
  }

 private:
  const CapacityPicture& picture_;
  const std::span<const WantedVersion> wanted_;
  const PoolBytes& least_;
  PoolBytes need_;
  PoolBytes freed_;
};

std::string NeedText(const CapacityPicture& picture, const RoomPlan& plan) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < picture.pools.size(); ++i) {
    const RoomPlan::Pool& pool = plan.pools[i];
    if (pool.fits || !picture.pools[i].decides) continue;
    parts.push_back(absl::StrCat("needs ", IecBytes(pool.need_bytes), " of the ",
                                 picture.pools[i].name, " budget, which has ",
                                 IecBytes(pool.free_bytes), " of ",
                                 IecBytes(picture.pools[i].limit_bytes), " left and ",
                                 IecBytes(pool.comes_bytes), " more in what may leave"));
  }
  return absl::StrJoin(parts, "; ");
}

absl::Status NoRoom(const CapacityPicture& picture, const RoomPlan& plan, const std::string& what,
                    const std::string& advice) {
  absl::Status refused = absl::ResourceExhaustedError(absl::StrCat(
      what, ": ", NeedText(picture, plan), "; ", HoldersText(picture), " (", advice, ")"));
  for (size_t i = 0; i < picture.pools.size(); ++i) {
    if (plan.pools[i].fits || !picture.pools[i].decides) continue;
    SetBudgetRefusal(refused,
                     {picture.pools[i].name, plan.pools[i].need_bytes, plan.pools[i].free_bytes,
                      picture.pools[i].limit_bytes, HoldersText(picture)});
    break;
  }
  return refused;
}

// Room when the `old` ones are gone before anything is loaded.
RoomPlan PlanWithout(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
                     std::span<const VersionKey> old) {
  const auto is_old = [&](const ResidentPicture& resident) {
    return std::ranges::find(old, resident.key) != old.end();
  };
  std::set<size_t> gone;
  for (size_t i = 0; i < picture.residents.size(); ++i) {
    if (is_old(picture.residents[i])) gone.insert(i);
  }
  const PoolBytes least;
  RoomCount count(picture, {}, least);
  count.Count(gone, false);
  CapacityPicture without = picture;
  std::erase_if(without.residents, is_old);
  for (size_t i = 0; i < without.pools.size(); ++i) {
    uint64_t& reserved_bytes = without.pools[i].reserved_bytes;
    reserved_bytes -= std::min(reserved_bytes, count.freed()[i]);
  }
  RoomPlan plan = PlanRoom(without, wanted);
  const RoomPlan now = PlanRoom(picture, {});
  for (size_t i = 0; i < plan.pools.size(); ++i) {
    plan.pools[i].free_bytes = now.pools[i].free_bytes;
    plan.pools[i].comes_bytes += count.freed()[i];
    plan.pools[i].peak_bytes = std::max(plan.pools[i].peak_bytes, picture.pools[i].reserved_bytes);
  }
  return plan;
}

}  // namespace

RoomPlan PlanRoom(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
                  const PoolBytes& least) {
  RoomCount count(picture, wanted, least);
  std::set<size_t> leaving;
  std::vector<size_t> idle;
  for (size_t i = 0; i < picture.residents.size(); ++i) {
    const ResidentPicture& resident = picture.residents[i];
    const bool is_wanted = std::ranges::any_of(
        wanted, [&](const WantedVersion& version) { return version.key == resident.key; });
    if (resident.stay == Stay::kLeaving) leaving.insert(i);
    if (resident.stay == Stay::kIdle && !is_wanted) idle.push_back(i);
  }
  std::ranges::sort(idle, [&](size_t a, size_t b) {
    const ResidentPicture& one = picture.residents[a];
    const ResidentPicture& other = picture.residents[b];
    return std::tie(one.last_used, one.key) < std::tie(other.last_used, other.key);
  });

  RoomPlan plan;
  std::set<size_t> gone;
  bool lingering = false;
  plan.fits = count.Fits(gone, lingering);
  if (!plan.fits) {  // What leaves by itself costs nobody a place.
    gone = leaving;
    lingering = true;
    plan.fits = count.Fits(gone, lingering);
    plan.waits = true;
    std::vector<size_t> evicted;
    for (size_t i = 0; i < idle.size() && !plan.fits; ++i) {
      gone.insert(idle[i]);
      evicted.push_back(idle[i]);
      plan.fits = count.Fits(gone, lingering);
    }
    if (plan.fits) {
      // The last one was needed; an earlier one may have been too small to matter.
      for (size_t i = evicted.size(); i-- > 0;) {
        gone.erase(evicted[i]);
        if (count.Fits(gone, lingering)) {
          evicted.erase(evicted.begin() + static_cast<ptrdiff_t>(i));
        } else {
          gone.insert(evicted[i]);
        }
      }
      for (const size_t i : evicted) plan.evict.push_back(picture.residents[i].key);
      const std::set<size_t> alone(evicted.begin(), evicted.end());
      if (count.Fits(alone, false)) {
        plan.waits = false;
        gone = alone;
        lingering = false;
      }
    }
  }
  count.Count(gone, lingering);
  for (size_t i = 0; i < picture.pools.size(); ++i) {
    const PoolPicture& pool = picture.pools[i];
    RoomPlan::Pool& row = plan.pools.emplace_back();
    row.need_bytes = count.need()[i];
    row.free_bytes = pool.limit_bytes == UINT64_MAX
                         ? UINT64_MAX
                         : pool.limit_bytes - std::min(pool.limit_bytes, pool.reserved_bytes);
    row.comes_bytes = count.freed()[i];
    const uint64_t stays = pool.reserved_bytes - std::min(pool.reserved_bytes, count.freed()[i]);
    row.peak_bytes = std::max(pool.reserved_bytes, stays + row.need_bytes);
    row.fits = count.FitsIn(i);
  }
  return plan;
}

PoolBytes NeedOf(const CapacityPicture& picture, std::span<const WantedVersion> wanted) {
  const PoolBytes least;
  RoomCount count(picture, wanted, least);
  count.Count({}, false);
  return count.need();
}

absl::string_view SwapStrategyName(SwapStrategy strategy) {
  switch (strategy) {
    case SwapStrategy::kAvailability:
      return "availability";
    case SwapStrategy::kResource:
      return "resource";
    case SwapStrategy::kAuto:
      return "auto";
  }
  return "unknown";
}

absl::StatusOr<SwapStrategy> ParseSwapStrategy(absl::string_view name) {
  for (const SwapStrategy strategy :
       {SwapStrategy::kAvailability, SwapStrategy::kResource, SwapStrategy::kAuto}) {
    if (name == SwapStrategyName(strategy)) return strategy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("strategy \"", name.substr(0, 32),
                   "\": not one of \"availability\", \"resource\" and \"auto\""));
}

StrategyChoice ChooseStrategy(const CapacityPicture& picture, std::span<const WantedVersion> wanted,
                              std::span<const VersionKey> old, SwapStrategy asked,
                              bool allow_downtime, const std::string& what) {
  StrategyChoice choice;
  choice.room = PlanRoom(picture, wanted);
  const RoomPlan resource = PlanWithout(picture, wanted, old);
  std::vector<std::string> names;
  for (const VersionKey& key : old) names.push_back(key.ToString());
  const std::string leaves = absl::StrJoin(names, ", ");

  if (asked == SwapStrategy::kResource) {
    choice.strategy = SwapStrategy::kResource;
    choice.room = resource;
    if (!allow_downtime) {
      choice.refused = absl::FailedPreconditionError(absl::StrCat(
          what, ": --strategy resource unloads ", old.empty() ? "the old version" : leaves,
          " before it loads what comes after, and nothing serves in between (add --allow-downtime",
          PlanRoom(picture, wanted).fits ? "; both fit, so --strategy availability needs none" : "",
          ")"));
    } else if (!resource.fits) {
      choice.refused = NoRoom(picture, resource, what,
                              "unload a version, or raise the budget; not even without the old "
                              "version is there room");
    }
    return choice;
  }
  if (choice.room.fits) return choice;
  if (!resource.fits) {
    choice.refused = NoRoom(picture, choice.room, what, "unload a version, or raise the budget");
    return choice;
  }
  if (asked == SwapStrategy::kAuto && allow_downtime) {
    choice.strategy = SwapStrategy::kResource;
    choice.room = resource;
    return choice;
  }
  choice.refused = NoRoom(
      picture, choice.room, what,
      absl::StrCat("unload a version, or raise the budget; --strategy resource --allow-downtime "
                   "would unload ",
                   leaves, " first"));
  return choice;
}

std::string HoldersText(const CapacityPicture& picture) {
  std::vector<std::string> holders;
  for (const ResidentPicture& resident : picture.residents) {
    if (resident.stay == Stay::kKept) holders.push_back(resident.holder);
  }
  return absl::StrCat("held by: ",
                      holders.empty() ? "nothing of ours" : absl::StrJoin(holders, ", "));
}

}  // namespace modelhost
