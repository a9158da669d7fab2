// The copies on GPUs, as the books see them: what they take of which budget, who is given them, and
// what happens when a GPU is lost. The copies themselves are the loader's (region/device_tier.h).
#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {
namespace {

// Of a refusal that no waiting cures.
constexpr char kNeverUrl[] = "modelhost/no_device_copy";
// Of the interval between tries: an hour and a half at 10 s.
constexpr int kMostDoubled = 9;
// That the fd store has no descriptors of lost copies any more.
constexpr absl::Duration kStoreTold = absl::Seconds(2);

size_t PoolNumber(const std::vector<BudgetPool*>& pools, const std::string& name) {
  for (size_t i = 0; i < pools.size(); ++i) {
    if (pools[i]->name() == name) return i;
  }
  return pools.size();
}

// A copy that host pages stand for (host_registered) is booked there.
size_t PoolOf(const std::vector<BudgetPool*>& pools, const DeviceRegion& region) {
  return region.mode() == abi::DeviceMode::kHostRegistered ? 0
                                                           : PoolNumber(pools, region.key().gpu);
}

}  // namespace

std::vector<BudgetPool*> ModelManager::Impl::Pools() const {
  std::vector<BudgetPool*> pools{&deps.host, &deps.memlock};
  if (deps.devices != nullptr) {
    for (BudgetPool* pool : deps.devices->Pools()) pools.push_back(pool);
  }
  return pools;
}

void ModelManager::Impl::AddDeviceRegions(const ResidentVersion& resident,
                                          std::vector<RegionBytes>& regions) const {
  for (const DeviceImage& image : resident.devices) AddImageRegions(image, regions);
}

void ModelManager::Impl::AddImageRegions(const DeviceImage& image,
                                         std::vector<RegionBytes>& regions) const {
  const std::vector<BudgetPool*> pools = Pools();
  for (const auto& region : image.regions) {
    PoolBytes bytes(pools.size(), 0);
    if (const size_t pool = PoolOf(pools, *region); pool < pools.size()) {
      bytes[pool] = region->booked_bytes();
    }
    regions.push_back({{region->planned(), Residency::kMapped}, std::move(bytes)});
  }
}

void ModelManager::Impl::AddDeviceWant(const VersionRecord& record, WantedVersion& want) {
  const DevicePolicy& policy = PolicyOf(record.key.model).device;
  if (!policy.wanted || deps.devices == nullptr) return;
  const std::vector<BudgetPool*> pools = Pools();
  const std::string text = DevicePolicyText(policy);
  const std::vector<std::string> gpus = deps.devices->GpusOf(policy);
  if (!gpus.empty()) {  // The ring, while the copies are made.
    want.unnamed.resize(pools.size(), 0);
    want.unnamed.front() += deps.devices->ring_bytes();
  }
  if (record.manifest == nullptr) return;
  for (const std::string& gpu : gpus) {
    const size_t pool = PoolNumber(pools, gpu);
    if (pool == pools.size()) continue;
    for (const ManifestFile& file : record.manifest->files) {
      if (!LooksLikeWeights(file.path)) continue;
      // What a pattern picks is known once the file was parsed: the load then asks for it.
      PoolBytes bytes(pools.size(), 0);
      if (policy.tensors.empty()) bytes[pool] = file.bytes;
      want.regions.push_back(
          {{PlannedDeviceId(gpu, file.sha256, text), Residency::kMapped}, std::move(bytes)});
    }
  }
}

bool ModelManager::Impl::SetDeviceResidency(VersionRecord& record, DeviceResidency to) {
  const DeviceResidency from = record.device_residency;
  if (from == to) return true;
  // What other versions had there already was not copied for this one.
  if (to == DeviceResidency::kResident && from != DeviceResidency::kCopying &&
      !SetDeviceResidency(record, DeviceResidency::kCopying)) {
    return false;
  }
  return Took(record, "device residency", DeviceResidencyName(record.device_residency),
              DeviceResidencyName(to), record.SetDeviceResidency(to));
}

DeviceResidency ModelManager::Impl::DeviceResidencyOf(const ResidentVersion& resident) {
  if (resident.devices.empty()) return DeviceResidency::kNone;
  const bool lost = std::ranges::any_of(resident.devices, &DeviceImage::lost);
  return lost ? DeviceResidency::kLost : DeviceResidency::kResident;
}

absl::StatusOr<const DeviceImage*> ModelManager::Impl::DeviceFor(const VersionRecord& record,
                                                                 const AcquireRef& ref) const {
  if (ref.device == AcquireRef::Device::kNone) return nullptr;
  const DeviceImage* image = record.resident->DeviceOf(ref.gpu);
  if (image != nullptr && !image->lost()) return image;
  if (ref.device == AcquireRef::Device::kIfAny) return nullptr;
  if (image != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(record.key.ToString(), ": its copy on ", ref.gpu,
                     " was lost with the GPU and is being made again (wait for it)"));
  }
  const auto book = models.find(record.key.model);
  std::string why;
  if (book == models.end() || !book->second.policy.device.wanted) {
    why = "its policy keeps it on the host (set device = \"all\" for the model, and load it again)";
  } else if (!record.resident->devices.empty()) {
    std::vector<std::string> gpus;
    for (const DeviceImage& other : record.resident->devices) gpus.push_back(other.gpu);
    why = absl::StrCat("it is on ", absl::StrJoin(gpus, ", "), " (run there, or set its device)");
  } else {
    why =
        "it was loaded without one (`modelctl status` says what the GPUs of this machine can do, "
        "`modelctl describe` how it was loaded; unload it and load it again)";
  }
  absl::Status refused = absl::FailedPreconditionError(
      absl::StrCat(record.key.ToString(), ": no copy on ", ref.gpu, ": ", why));
  refused.SetPayload(kNeverUrl, absl::Cord());
  return refused;
}

bool ModelManager::Impl::NeverOnDevice(const absl::Status& status) {
  return status.GetPayload(kNeverUrl).has_value();
}

const char* ModelManager::Impl::DeviceTransport(abi::DeviceMode mode) {
  switch (mode) {
    case abi::DeviceMode::kVmmFd:
      return "device_vmm_fd";
    case abi::DeviceMode::kHostDirect:
      return "device_host_direct";
    case abi::DeviceMode::kHostRegistered:
      return "device_host_registered";
    case abi::DeviceMode::kCudaIpc:
      return "device_cuda_ipc";
    case abi::DeviceMode::kNone:
      break;
  }
  return "device_none";
}

bool ModelManager::Impl::IsCurrent(const VersionRecord* record, const DeviceImage& image) {
  if (record == nullptr || record->resident == nullptr) return false;
  const DeviceImage* now = record->resident->DeviceOf(image.gpu);
  return now != nullptr && now->regions == image.regions;
}

void ModelManager::Impl::DropImages(LeaseTable::Images images) {
  if (images.empty()) return;
  OnShortPool(
      [images = std::move(images)]() mutable {
        images.clear();
        return 0;
      },
      [this](int) { LookForRoom(); });
}

void ModelManager::Impl::ScheduleDeviceCheck() {
  if (deps.devices == nullptr) return;
  device_timer = deps.loop.PostDelayed(options.device_check_interval, [this] {
    device_timer = 0;
    const bool any = std::ranges::any_of(versions, [this](const auto& entry) {
      return entry.second.resident != nullptr &&
             (!entry.second.resident->devices.empty() || PolicyOf(entry.first.model).device.wanted);
    });
    if (!any && !deps.devices->AnyUnusable()) return ScheduleDeviceCheck();
    OnShortPool([this] { return deps.devices->CheckCopies(); },
                [this](bool /*lost*/) {
                  if (stopping) return;
                  TakeLostDevices();
                  ScheduleDeviceCheck();
                });
  });
}

// Of what is lost nothing is kept, here or in the fd store, before it is made again: the GPU may
// have the memory all the same, and then there is no room for both.
bool ModelManager::Impl::LetGoOfLost() {
  struct Dropped {
    std::vector<std::shared_ptr<const ResidentVersion>> versions;
    LeaseTable::Images images;
  };
  Dropped dropped;
  for (auto& [key, record] : versions) {
    if (record.resident == nullptr) continue;
    std::vector<const DeviceRegion*> lost;
    for (const DeviceImage& image : record.resident->devices) {
      for (const auto& region : image.regions) {
        if (region->lost()) lost.push_back(region.get());
      }
    }
    if (lost.empty()) continue;
    auto left = WithoutLostCopies(*record.resident);
    if (left == nullptr) continue;  // With the next look.
    for (const DeviceRegion* region : lost) {
      if (deps.parking != nullptr) deps.parking->Forget(*region);
    }
    dropped.versions.push_back(std::exchange(record.resident, std::move(left)));
  }
  dropped.images = leases.TakeLost();
  if (dropped.versions.empty() && dropped.images.empty()) return false;
  letting_go = true;
  OnShortPool(
      [this, dropped = std::move(dropped)]() mutable {
        dropped = {};
        if (deps.parking != nullptr) (void)deps.parking->Settle(kStoreTold);
        return 0;
      },
      [this](int) {
        letting_go = false;
        if (!stopping) TakeLostDevices();
      });
  return true;
}

void ModelManager::Impl::TakeLostDevices() {
  bool lost_any = false;
  for (auto& entry : versions) {
    const VersionKey& key = entry.first;
    VersionRecord& record = entry.second;
    if (record.resident == nullptr) continue;
    const bool lost = DeviceResidencyOf(*record.resident) == DeviceResidency::kLost;
    if (lost && record.device_residency == DeviceResidency::kResident) {
      lost_any = true;
      std::vector<std::string> gpus;
      for (const DeviceImage& image : record.resident->devices) {
        if (image.lost()) gpus.push_back(image.gpu);
      }
      SetDeviceResidency(record, DeviceResidency::kLost);
      Note(key, "device lost", absl::StrCat("its copy on ", absl::StrJoin(gpus, ", ")));
      Tell([&](Observer& observer) { observer.OnDeviceLost(key, gpus); });
      Changed(record);
    }
    if (record.renew_labels && record.reload == nullptr) RenewLabels(key);
  }
  if (lost_any) LookForRoom();  // Their bookings were given back.
  if (letting_go || LetGoOfLost()) return;
  for (auto& [key, record] : versions) {
    if (record.resident != nullptr && WantsCopy(record)) StartReload(record);
  }
}

// A copy was lost, or a GPU that the policy names has come since the load: and now it could be
// made. What failed is tried again ever more rarely.
bool ModelManager::Impl::WantsCopy(VersionRecord& record) {
  if (record.phase != Phase::kReady || record.reload != nullptr ||
      deps.clock.Monotonic() < record.next_device_try) {
    return false;
  }
  const ResidentVersion& resident = *record.resident;
  const auto usable = deps.devices->UsableGpus(PolicyOf(record.key.model).device);
  const bool missing = std::ranges::any_of(usable, [&](const std::string& gpu) {
    const DeviceImage* image = resident.DeviceOf(gpu);
    if (image != nullptr) return image->lost();
    return std::ranges::find(resident.device_targets, gpu) == resident.device_targets.end();
  });
  if (!missing) return false;
  record.next_device_try =
      deps.clock.Monotonic() +
      options.device_check_interval * (int64_t{1} << std::min(record.device_tries++, kMostDoubled));
  return true;
}

// Who has the lost copy mapped must come for the new one: the labels get another generation. Each
// for itself: one that moves meanwhile is no reason for the others to stay.
void ModelManager::Impl::RenewLabels(const VersionKey& key) {
  Find(key)->renew_labels = false;
  for (const std::string& label : LabelsOf(key)) {
    if (withdrawn.contains({key.model, label})) continue;
    LabelTransaction transaction;
    LabelTransaction::Move& move = transaction.moves.emplace_back();
    move.model = key.model;
    move.label = label;
    move.to = key.version;
    move.if_current = key.version;
    move.record_previous = false;
    move.renew = true;
    transaction.done = [this, key, label](const absl::StatusOr<LabelTransaction::Done>& done) {
      VersionRecord* record = Find(key);
      if (done.ok() || record == nullptr || LabelVersion(key.model, label) != key.version) return;
      Note(key, "label", std::string(done.status().message()));
      record->renew_labels = true;  // With the next look at the devices.
    };
    Enqueue(std::move(transaction));
  }
}

}  // namespace modelhost
