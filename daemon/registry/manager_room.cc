// Admission: who waits for room in the budgets, in order, and who makes it.
//
// A load books for itself, on its pool thread (region/load_job.cc). What it is refused, it waits
// for here, first come, first served: while somebody waits nobody else starts, so a big load is not
// starved by small ones, unless what it needs is resident already. At most one is let in at a time,
// and the next one not before that one has booked.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {
namespace {

// Most room is announced by whoever makes it. What a transport still holds for a moment is not.
constexpr absl::Duration kRoomLook = absl::Milliseconds(50);
// How long the others wait for the one that was let in to book. It may hang, or hash its files
// first; who starts in spite of it asks the budgets themselves.
constexpr absl::Duration kAdmitPatience = absl::Seconds(2);

bool IsLocked(Residency residency) {
  return residency == Residency::kPinned || residency == Residency::kSealed;
}

uint64_t SumOf(const std::vector<RegionBytes>& regions, size_t pool) {
  uint64_t bytes = 0;
  for (const RegionBytes& region : regions) {
    if (pool < region.bytes.size()) bytes += region.bytes[pool];
  }
  return bytes;
}

}  // namespace

std::vector<RegionBytes> ModelManager::Impl::Regions(const ResidentVersion& resident) const {
  std::vector<RegionBytes> regions;
  for (const auto& region : resident.regions) {
    regions.push_back({{region->digest(), region->residency()},
                       {region->booked_bytes(), region->locked_bytes()}});
  }
  AddDeviceRegions(resident, regions);
  return regions;
}

WantedVersion ModelManager::Impl::Want(const VersionRecord& record) {
  WantedVersion want{record.key, {}, {}};
  if (record.resident != nullptr) return want;
  const Residency residency = PolicyOf(record.key.model).residency;
  const bool locks = IsLocked(residency) && options.memlock != MemlockPolicy::kOff;
  const auto bytes_of = [&](uint64_t bytes) { return PoolBytes{bytes, locks ? bytes : 0}; };
  if (record.manifest == nullptr) {
    want.unnamed = bytes_of(record.file_bytes);
    AddDeviceWant(record, want);
    return want;
  }
  std::set<Digest> seen;
  for (const ManifestFile& file : record.manifest->files) {
    if (!seen.insert(file.sha256).second) continue;
    want.regions.push_back({{file.sha256, residency}, bytes_of(file.bytes)});
  }
  AddDeviceWant(record, want);
  return want;
}

Stay ModelManager::Impl::StayOf(const VersionRecord& record) const {
  if (record.phase == Phase::kDraining || record.phase == Phase::kUnloading) return Stay::kLeaving;
  return MayEvict(FactsOf(record)) ? Stay::kIdle : Stay::kKept;
}

CapacityPicture ModelManager::Impl::Picture(const std::set<OperationId>& leaving) {
  CapacityPicture picture;
  for (BudgetPool* pool : Pools()) {
    PoolPicture& added = picture.pools.emplace_back();
    added.name = pool->name();
    added.limit_bytes = pool->limit();
    added.reserved_bytes = pool->reserved();
    added.decides = pool != &deps.memlock || options.memlock == MemlockPolicy::kRequired;
  }
  PoolBytes known(picture.pools.size(), 0);
  std::set<RegionId> counted;
  const auto count = [&](const std::vector<RegionBytes>& regions) {
    for (const RegionBytes& region : regions) {
      if (!counted.insert(region.id).second) continue;
      for (size_t i = 0; i < known.size() && i < region.bytes.size(); ++i) {
        known[i] += region.bytes[i];
      }
    }
  };
  for (auto& [key, record] : versions) {
    // What is being loaded, first or again, may have booked all of it; what is cancelled gives it
    // back in a moment.
    const auto goes_on = [](const std::shared_ptr<CancelToken>& load) {
      return load != nullptr && !load->cancelled();
    };
    const bool unwanted = !leaving.empty() && !record.waiters.empty() &&
                          std::ranges::all_of(record.waiters, [&](const auto& waiter) {
                            return waiter.wants_load && leaving.contains(waiter.operation);
                          });
    if (!unwanted && (goes_on(record.cancel) || goes_on(record.reload))) {
      for (uint64_t& pool : known) pool += record.file_bytes;
    }
    if (record.resident == nullptr && record.freeing.empty()) continue;
    ResidentPicture& resident = picture.residents.emplace_back();
    resident.key = key;
    resident.stay = StayOf(record);
    resident.last_used = record.last_used;
    resident.regions = record.resident != nullptr ? Regions(*record.resident) : record.freeing;
    const auto names = LabelsOf(key);
    const uint64_t held = leases.CountOf(key);
    std::string on_gpus;
    for (size_t i = 2; i < picture.pools.size(); ++i) {
      const uint64_t bytes = SumOf(resident.regions, i);
      if (bytes == 0) continue;
      absl::StrAppend(&on_gpus, " + ", IecBytes(bytes), " on ", picture.pools[i].name);
    }
    resident.holder =
        absl::StrCat(key.ToString(), " ", IecBytes(SumOf(resident.regions, 0)), on_gpus,
                     names.empty() ? "" : absl::StrCat(" ", absl::StrJoin(names, ",")), " ", held,
                     held == 1 ? " lease" : " leases");
    count(resident.regions);
  }
  // Let go of, and mapped by clients that stay: nobody gets it back by waiting a moment.
  const auto hold = [&](const VersionKey& key, const DeviceImage& image, const char* why,
                        LeaseId lease) {
    ResidentPicture& held = picture.residents.emplace_back();
    AddImageRegions(image, held.regions);
    held.holder = absl::StrCat(key.ToString(), " on ", image.gpu, ", ", why, ", lease ", lease);
    count(held.regions);
  };
  for (const auto& [id, lease] : leases.leases()) {
    for (const auto& image : lease.device_memory) {
      if (IsCurrent(Find(lease.key), *image)) continue;
      hold(lease.key, *image, lease.released ? "released" : "an earlier copy", id);
    }
  }
  for (const auto& [id, session] : leases.sessions()) {
    for (const Session::Kept& kept : session.kept) {
      // Also what is its version's own still: it does not become free with that.
      hold(kept.key, *kept.image, "evicted", *kept.leases.begin());
    }
  }
  for (size_t i = 0; i < known.size(); ++i) {
    PoolPicture& pool = picture.pools[i];
    pool.lingering_bytes = pool.reserved_bytes - std::min(pool.reserved_bytes, known[i]);
  }
  return picture;
}

absl::Status ModelManager::Impl::WithHolders(const absl::Status& status) {
  const std::string holders = HoldersText(Picture());
  absl::Status told(status.code(), absl::StrCat(status.message(), "; ", holders));
  if (auto refusal = BudgetRefusalOf(status); refusal.has_value()) {
    refusal->holders = holders;
    SetBudgetRefusal(told, *refusal);
  }
  return told;
}

bool ModelManager::Impl::WaitsForRoom(const VersionKey& key) const {
  return std::ranges::any_of(waiting_for_room,
                             [&](const RoomWaiter& waiter) { return waiter.key == key; });
}

void ModelManager::Impl::AskForRoom(VersionRecord& record) {
  if (WaitsForRoom(record.key)) return;
  const bool others_wait = !waiting_for_room.empty() || admitting.has_value();
  const bool unlimited = std::ranges::all_of(
      Pools(), [](const BudgetPool* pool) { return pool->limit() == UINT64_MAX; });
  if (unlimited && !others_wait) return StartLoad(record);
  const WantedVersion want = Want(record);
  const CapacityPicture picture = Picture();
  const RoomPlan room = PlanRoom(picture, std::span(&want, 1));
  const bool needs_any = std::ranges::any_of(
      room.pools, [](const RoomPlan::Pool& pool) { return pool.need_bytes > 0; });
  // What is known not to fit yet need not be opened. A refusal, though, is for the load to find:
  // it knows each content, and the books only each file's digest.
  const bool would_wait = room.fits && (room.waits || !room.evict.empty());
  bool too_big = false;  // It will be told at once.
  for (size_t i = 0; i < room.pools.size(); ++i) {
    too_big = too_big || (record.manifest != nullptr && picture.pools[i].decides &&
                          room.pools[i].need_bytes > picture.pools[i].limit_bytes);
  }
  if (!needs_any || too_big || (!others_wait && !would_wait)) return StartLoad(record);
  QueueForRoom(record.key, /*first=*/false);
  LookForRoom();
}

void ModelManager::Impl::QueueForRoom(const VersionKey& key, bool first) {
  std::erase_if(waiting_for_room, [&](const RoomWaiter& one) { return one.key == key; });
  RoomWaiter waiter{key, deps.clock.Monotonic(), {}, absl::OkStatus()};
  if (first) {
    waiting_for_room.push_front(std::move(waiter));
  } else {
    waiting_for_room.push_back(std::move(waiter));
  }
  ArmRoomTimer();
}

void ModelManager::Impl::ArmRoomTimer() {
  if (room_timer != 0) return;
  room_timer = deps.loop.PostDelayed(kRoomLook, [this] {
    room_timer = 0;
    ExpireRoomWaiters();
    LookForRoom();
    if (!waiting_for_room.empty()) ArmRoomTimer();
  });
}

void ModelManager::Impl::ExpireRoomWaiters() {
  const absl::Duration now = deps.clock.Monotonic();
  std::vector<RoomWaiter> late;
  for (const RoomWaiter& waiter : waiting_for_room) {
    if (now - waiter.since >= options.admission_timeout) late.push_back(waiter);
  }
  for (const RoomWaiter& waiter : late) {
    std::erase_if(waiting_for_room, [&](const RoomWaiter& one) { return one.key == waiter.key; });
    VersionRecord* record = Find(waiter.key);
    if (record == nullptr || record->phase != Phase::kStaged) continue;
    RefuseRoom(*record, waiter,
               absl::StrCat("not within ", absl::FormatDuration(options.admission_timeout),
                            " ([load] admission_timeout): "));
  }
}

void ModelManager::Impl::RefuseRoom(VersionRecord& record, const RoomWaiter& waiter,
                                    const std::string& why) {
  const WantedVersion want = Want(record);
  const CapacityPicture picture = Picture();
  const RoomPlan room = PlanRoom(picture, std::span(&want, 1), waiter.least);
  absl::Status refused = waiter.refused;
  if (refused.ok()) {
    // It never came to ask: the first pool that has too little now says why.
    for (size_t i = 0; i < room.pools.size() && refused.ok(); ++i) {
      const RoomPlan::Pool& pool = room.pools[i];
      if (pool.need_bytes <= pool.free_bytes || !picture.pools[i].decides) continue;
      refused = absl::ResourceExhaustedError(absl::StrCat(
          "load of ", record.key.ToString(), ": needs ", IecBytes(pool.need_bytes), " of the ",
          picture.pools[i].name, " budget, which has ", IecBytes(pool.free_bytes), " of ",
          IecBytes(picture.pools[i].limit_bytes), " left"));
      SetBudgetRefusal(refused, {picture.pools[i].name, pool.need_bytes, pool.free_bytes,
                                 picture.pools[i].limit_bytes, ""});
    }
    if (refused.ok()) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("load of ", record.key.ToString(), ": others waited for room before it"));
    }
  }
  absl::Status told(refused.code(), absl::StrCat(why, refused.message()));
  const auto refusal = BudgetRefusalOf(refused);
  const std::string pool = refusal.has_value() ? refusal->pool : deps.host.name();
  const char* reason = why.empty() ? "no_room" : "timeout";
  Tell([&](Observer& observer) { observer.OnRoomRefused(pool, reason); });
  RefusedLoad(record, WithBudgetRefusal(std::move(told), refused));
}

// Control thread, whenever something was given back, and every kRoomLook besides.
void ModelManager::Impl::LookForRoom() {
  if (admitting.has_value() && deps.clock.Monotonic() - admitted_at >= kAdmitPatience) {
    admitting.reset();
  }
  while (!waiting_for_room.empty() && !admitting.has_value() && !stopping) {
    RoomWaiter waiter = waiting_for_room.front();
    VersionRecord* record = Find(waiter.key);
    const bool wanted =
        record != nullptr && record->phase == Phase::kStaged &&
        std::ranges::any_of(record->waiters, [](const auto& each) { return each.wants_load; });
    if (!wanted) {
      waiting_for_room.pop_front();
      continue;
    }
    const WantedVersion want = Want(*record);
    const RoomPlan room = PlanRoom(Picture(), std::span(&want, 1), waiter.least);
    if (room.fits && room.evict.empty() && !room.waits) {
      waiting_for_room.pop_front();
      admitting = std::move(waiter);
      admitted_at = deps.clock.Monotonic();
      StartLoad(*record);
      return;
    }
    if (!room.fits) {
      waiting_for_room.pop_front();
      RefuseRoom(*record, waiter, "");
      continue;
    }
    EvictVersions(room.evict, record->key);
    // Versions without leases are let go at once, and told when their memory is free.
    return;
  }
}

void ModelManager::Impl::EvictVersions(const std::vector<VersionKey>& victims,
                                       const VersionKey& wanted) {
  for (const VersionKey& victim : victims) {
    VersionRecord* record = Find(victim);
    if (record == nullptr || StayOf(*record) != Stay::kIdle) continue;
    Note(victim, "evicted", absl::StrCat("to make room for ", wanted.ToString()));
    Tell([&](Observer& observer) { observer.OnEvicted(victim, wanted); });
    BeginDrain(*record, 0);
  }
}

void ModelManager::Impl::Admitted(const VersionKey& key) {
  if (!admitting.has_value() || admitting->key != key) return;
  admitting.reset();
  // Not from here: its own load goes on first.
  deps.loop.Post([this] { LookForRoom(); });
}

bool ModelManager::Impl::WaitForRoom(VersionRecord& record, const absl::Status& status) {
  const auto refusal = BudgetRefusalOf(status);
  const bool was_first = admitting.has_value() && admitting->key == record.key;
  RoomWaiter waiter{record.key, deps.clock.Monotonic(), {}, absl::OkStatus()};
  if (was_first) waiter = *std::exchange(admitting, std::nullopt);
  if (!refusal.has_value()) return false;
  // It may have been let in, and refused, many times.
  record.room_since = std::min(record.room_since, waiter.since);
  waiter.since = record.room_since;
  if (deps.clock.Monotonic() - record.room_since >= options.admission_timeout) {
    Tell([&](Observer& observer) { observer.OnRoomRefused(refusal->pool, "timeout"); });
    return false;
  }
  const std::vector<BudgetPool*> pools = Pools();
  waiter.least.assign(pools.size(), 0);
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i]->name() == refusal->pool) waiter.least[i] = refusal->need_bytes;
  }
  waiter.refused = status;
  const WantedVersion want = Want(record);
  const bool first = was_first || waiting_for_room.empty();
  // What can never fit must not cost the others their place.
  if (first && !PlanRoom(Picture(), std::span(&want, 1), waiter.least).fits) {
    Tell([&](Observer& observer) { observer.OnRoomRefused(refusal->pool, "no_room"); });
    return false;
  }
  if (record.phase == Phase::kLoading) Move(record, Phase::kFailed);
  Move(record, Phase::kStaged);
  if (first) {
    waiting_for_room.push_front(std::move(waiter));
  } else {
    waiting_for_room.push_back(std::move(waiter));
  }
  ArmRoomTimer();
  LookForRoom();
  return true;
}

}  // namespace modelhost
