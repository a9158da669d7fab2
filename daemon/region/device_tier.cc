#include "daemon/region/device_tier.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/region/device_copy_job.h"

namespace modelhost {
namespace {

constexpr absl::Duration kKnownLook = absl::Milliseconds(20);

}  // namespace

DeviceTier::DeviceTier(DeviceFinder& finder, Clock& clock, BudgetPool& host,
                       DeviceTierOptions options)
    : finder_(finder), clock_(clock), host_(host), options_(std::move(options)) {}

DeviceTier::~DeviceTier() = default;

void DeviceTier::Discover() {
  std::string reason;
  std::vector<std::unique_ptr<DeviceGpu>> gpus;
  if (!options_.enabled) {
    reason = "switched off in the configuration ([device] enabled)";
  } else if (auto listed = finder_.List(); !listed.ok()) {
    reason = std::string(listed.status().message());
  } else {
    for (DeviceInfo& info : *listed) {
      auto service = finder_.Open(info.uuid);
      gpus.push_back(std::make_unique<DeviceGpu>(std::move(info), std::move(service)));
    }
    if (gpus.empty()) reason = "the driver finds no GPU";
    // All at once: one that hangs keeps nobody from knowing of the others for longer than that.
    ThreadPool threads("mh-gpu-look", static_cast<int>(gpus.size()));
    for (const auto& gpu : gpus) threads.Post([&gpu] { gpu->Look(); });
  }
  for (const auto& gpu : gpus) gpu->MakePool(options_.budget_bytes);
  absl::MutexLock lock(&mutex_);
  if (known_) return;
  reason_ = std::move(reason);
  gpus_ = std::move(gpus);
  known_ = true;
}

void DeviceTier::Stop() { finder_.End(); }

std::vector<DeviceGpu*> DeviceTier::Gpus() const {
  absl::MutexLock lock(&mutex_);
  std::vector<DeviceGpu*> gpus;
  for (const auto& gpu : gpus_) gpus.push_back(gpu.get());
  return gpus;
}

DeviceGpu* DeviceTier::Find(const std::string& uuid) const {
  const auto gpus = Gpus();
  const auto found =
      std::ranges::find_if(gpus, [&](const DeviceGpu* gpu) { return gpu->uuid() == uuid; });
  return found == gpus.end() ? nullptr : *found;
}

DeviceTierSnapshot DeviceTier::Snapshot() const {
  DeviceTierSnapshot snapshot;
  {
    absl::MutexLock lock(&mutex_);
    snapshot.known = known_;
    snapshot.reason = known_ ? reason_ : "still looking for GPUs";
  }
  for (const DeviceGpu* gpu : Gpus()) {
    DeviceGpu::State state = gpu->state();
    DeviceTierSnapshot::Gpu& shown = snapshot.gpus.emplace_back();
    shown.report = std::move(state.report);
    shown.mode = state.mode;
    shown.usable = state.usable;
    shown.problem = std::move(state.problem);
    shown.lost = state.lost;
    if (gpu->pool() != nullptr) {
      shown.limit_bytes = gpu->pool()->limit();
      shown.reserved_bytes = gpu->pool()->reserved();
    }
    const DeviceCache::Sum sum = cache_.SumOn(gpu->uuid());
    shown.copies = sum.copies;
    shown.copied_bytes = sum.bytes;
  }
  const bool any = std::ranges::any_of(snapshot.gpus, [](const DeviceTierSnapshot::Gpu& gpu) {
    return gpu.mode != abi::DeviceMode::kNone;
  });
  if (snapshot.known && !any && snapshot.reason.empty()) {
    const DeviceTierSnapshot::Gpu& first = snapshot.gpus.front();
    snapshot.reason = absl::StrCat(first.report.info.uuid, ": ",
                                   first.usable ? first.report.reason : first.problem);
  }
  return snapshot;
}

std::vector<BudgetPool*> DeviceTier::Pools() const {
  std::vector<BudgetPool*> pools;
  for (const DeviceGpu* gpu : Gpus()) {
    if (gpu->pool() != nullptr) pools.push_back(gpu->pool());
  }
  return pools;
}

std::vector<std::string> DeviceTier::NamedGpus(
    const DevicePolicy& policy, absl::FunctionRef<bool(abi::DeviceMode)> fits) const {
  std::vector<std::string> uuids;
  if (!policy.wanted) return uuids;
  for (const DeviceGpu* gpu : Gpus()) {
    const DeviceGpu::State state = gpu->state();
    const bool named = policy.gpu.empty() || policy.gpu == gpu->uuid();
    if (named && state.usable && fits(state.mode)) uuids.push_back(gpu->uuid());
  }
  return uuids;
}

std::vector<std::string> DeviceTier::GpusOf(const DevicePolicy& policy) const {
  return NamedGpus(policy, TakesDeviceMemory);
}

std::vector<std::string> DeviceTier::UsableGpus(const DevicePolicy& policy) const {
  return NamedGpus(policy, [](abi::DeviceMode mode) { return mode != abi::DeviceMode::kNone; });
}

bool DeviceTier::AnyUnusable() const {
  const auto gpus = Gpus();
  return std::ranges::any_of(gpus, [](const DeviceGpu* gpu) { return !gpu->state().usable; });
}

absl::StatusOr<DeviceTier::Targets> DeviceTier::Choose(const DevicePolicy& policy,
                                                       const CancelToken& cancel) const {
  Targets targets;
  if (!policy.wanted) return targets;
  const std::string asked = absl::StrCat("device = ", DevicePolicyText(policy));
  const auto host_only = [&](const auto&... why) {
    targets.warnings.push_back(absl::StrCat(asked, ": ", why..., "; it stays on the host"));
    return targets;
  };
  const absl::Duration deadline = clock_.Monotonic() + options_.discovery;
  std::string reason;
  while (true) {
    if (cancel.cancelled()) return absl::CancelledError("the load was cancelled");
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&known_), kKnownLook)) {
      reason = reason_;
      break;
    }
    if (clock_.Monotonic() < deadline) continue;
    return host_only("the GPUs were not found within ", absl::FormatDuration(options_.discovery));
  }
  const std::vector<DeviceGpu*> gpus = Gpus();
  if (gpus.empty()) return host_only(reason);
  targets.limits.max_segment_bytes = options_.segment_bytes;
  std::vector<std::string> others;
  std::vector<std::string> problems;
  for (const DeviceGpu* gpu : gpus) {
    if (!policy.gpu.empty() && policy.gpu != gpu->uuid()) {
      others.push_back(gpu->uuid());
      continue;
    }
    const DeviceGpu::State state = gpu->state();
    if (!state.usable) {
      problems.push_back(absl::StrCat(gpu->uuid(), " does not answer: ", state.problem));
    } else if (state.mode == abi::DeviceMode::kNone) {
      problems.push_back(absl::StrCat(gpu->uuid(), " is host_only: ", state.report.reason));
    } else {
      targets.gpus.push_back(gpu->uuid());
      if (!HasSegments(state.mode)) continue;
      targets.segments = true;
      if (state.report.granularity > 0) {
        targets.limits.granularity = std::lcm(targets.limits.granularity, state.report.granularity);
      }
    }
  }
  if (targets.gpus.empty() && problems.empty()) {
    return host_only("this machine has no such GPU, it has ", absl::StrJoin(others, ", "));
  }
  if (targets.gpus.empty()) return host_only(absl::StrJoin(problems, "; "));
  for (const std::string& problem : problems) {
    targets.warnings.push_back(absl::StrCat(asked, ": ", problem));
  }
  return targets;
}

absl::StatusOr<std::vector<DeviceImage>> DeviceTier::Make(const Work& work) {
  return DeviceCopyJob(*this, work).Run();
}

void DeviceTier::Offer(DeviceRegionKey key, DeviceRegion::Parts parts) {
  absl::MutexLock lock(&mutex_);
  // `parts` outlives the lock: what is not kept, this or what was there before, is freed without
  // it.
  if (offers_over_) return;
  const auto [at, added] = offered_.try_emplace(std::move(key));
  std::swap(at->second, parts);
}

void DeviceTier::DropOffered() {
  std::map<DeviceRegionKey, DeviceRegion::Parts> dropped;  // Freed without the lock.
  absl::MutexLock lock(&mutex_);
  dropped.swap(offered_);
  offers_over_ = true;
}

std::optional<DeviceRegion::Parts> DeviceTier::TakeOffered(const DeviceRegionKey& key) {
  absl::MutexLock lock(&mutex_);
  const auto found = offered_.find(key);
  if (found == offered_.end()) return std::nullopt;
  return std::move(offered_.extract(found).mapped());
}

bool DeviceTier::DropOfferedOn(const std::string& gpu) {
  std::vector<DeviceRegion::Parts> dropped;
  absl::MutexLock lock(&mutex_);
  for (auto it = offered_.begin(); it != offered_.end();) {
    if (it->first.gpu != gpu) {
      ++it;
      continue;
    }
    dropped.push_back(std::move(it->second));
    it = offered_.erase(it);
  }
  return !dropped.empty();
}

bool DeviceTier::CheckCopies() {
  const std::vector<DeviceGpu*> gpus = Gpus();
  for (DeviceGpu* gpu : gpus) gpu->StartCheck(cache_);
  const absl::Duration give_up = clock_.Monotonic() + kCheckWait;
  bool any = false;
  for (DeviceGpu* gpu : gpus) {
    if (gpu->AwaitCheck(std::max(give_up - clock_.Monotonic(), absl::ZeroDuration()))) any = true;
  }
  return any;
}

}  // namespace modelhost
