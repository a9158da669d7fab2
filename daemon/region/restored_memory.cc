#include "daemon/region/restored_memory.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/chunk_pass.h"
#include "daemon/region/device_tier.h"
#include "daemon/store/atomic_file.h"
#include "proto/handle/fault_point.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

constexpr uint64_t kMaxRecordBytes = uint64_t{64} << 20;

using ByName = std::map<std::string, std::vector<UniqueFd>>;

absl::Status TooMany(const std::string& name, size_t count) {
  return absl::DataLossError(
      absl::StrCat(name, ": ", count, " descriptors came back under one name"));
}

// OK when the descriptors of its name are one, and that one is the memory of the record. `sha256`:
// of its bytes, where it must be.
absl::Status CheckMemory(Os& os, const ParkedMemory& memory, const std::vector<UniqueFd>& fds,
                         const Digest* sha256) {
  const auto differs = [&](const auto&... why) {
    return absl::DataLossError(absl::StrCat(memory.name, ": ", why...));
  };
  if (fds.size() != 1) return TooMany(memory.name, fds.size());
  const auto info = os.Stat(fds[0]);
  if (!info.ok()) return AtPath(info.status(), memory.name);
  if (info->device != memory.device || info->inode != memory.inode) {
    return differs("is inode ", info->device, ":", info->inode, ", the record says ", memory.device,
                   ":", memory.inode);
  }
  // Checks the seals, and the size to the byte.
  const auto mapped = ReadOnlyMapping::MapSealed(fds[0], memory.bytes, Align::kPage);
  if (!mapped.ok()) return ToStatus(mapped.error(), memory.name);
  if (sha256 == nullptr) return absl::OkStatus();
  const Digest found = Sha256(mapped->bytes());
  if (found == *sha256) return absl::OkStatus();
  return differs("its bytes have SHA-256 ", found.Hex(), ", the record says ", sha256->Hex());
}

}  // namespace

void RestoredMemory::Take(Os& os, FdStore& store, const UniqueFd& state_dir,
                          std::vector<NamedFd> stored) {
  absl::MutexLock lock(&mutex_);  // For the compiler: nobody else is there yet.
  report_.received = stored.size();
  // First of all, and for unknown ones too.
  std::set<std::string> names;
  for (const NamedFd& each : stored) {
    if (!names.insert(each.name).second) continue;
    store.Remove(each.name).IgnoreError();
    FaultPoint("restore.emptied");
  }
  if (stored.empty()) return;
  auto text = ReadSmallFileAt(os, state_dir, kParkedName, kMaxRecordBytes);
  auto record = text.ok() ? ParseParkedRecord(*text) : text.status();
  if (!record.ok()) {
    report_.foreign = stored.size();
    report_.problem = std::string(record.status().message());
    return;
  }
  Sort(os, *record, std::move(stored));
  FaultPoint("restore.checked");
}

void RestoredMemory::Sort(Os& os, const ParkedRecord& record, std::vector<NamedFd> stored) {
  std::set<std::string> known;
  for (const ParkedRegion& region : record.regions) known.insert(region.memory.name);
  for (const ParkedVersion& version : record.versions) {
    if (version.index.has_value()) known.insert(version.index->memory.name);
  }
  for (const ParkedDevice& device : record.devices) {
    for (const ParkedSegment& segment : device.segments) known.insert(segment.name);
  }
  ByName fds;
  for (NamedFd& each : stored) {
    if (known.contains(each.name)) {
      fds[each.name].push_back(std::move(each.fd));
    } else {
      ++report_.foreign;
    }
  }

  absl::Status trusted;
  const auto check = [&](const ParkedMemory& memory, const Digest* sha256) {
    const auto found = fds.find(memory.name);
    if (found == fds.end() || !trusted.ok()) return;
    trusted = CheckMemory(os, memory, found->second, sha256);
  };
  for (const ParkedRegion& region : record.regions) check(region.memory, nullptr);
  for (const ParkedVersion& version : record.versions) {
    if (version.index.has_value()) check(version.index->memory, &version.index->sha256);
  }
  for (const ParkedDevice& device : record.devices) {
    for (const ParkedSegment& segment : device.segments) {
      const auto found = fds.find(segment.name);
      if (found == fds.end() || found->second.size() == 1 || !trusted.ok()) continue;
      trusted = TooMany(segment.name, found->second.size());
    }
  }
  if (!trusted.ok()) {
    report_.refused = record.versions.size();
    report_.problem = std::string(trusted.message());
    return;
  }

  std::set<std::string> wanted;
  for (const ParkedVersion& version : record.versions) {
    bool complete = !version.index.has_value() || fds.contains(version.index->memory.name);
    for (const std::string& name : version.regions) complete = complete && fds.contains(name);
    if (!complete) {
      ++report_.incomplete;
      continue;
    }
    wanted.insert(version.regions.begin(), version.regions.end());
    versions_.emplace_back(version.model, version.version);
    if (!version.index.has_value()) continue;
    const ParkedMemory& memory = version.index->memory;
    indexes_.push_back({version, {std::move(fds[memory.name][0]), memory.bytes}});
    ++report_.taken;
  }
  for (const ParkedRegion& region : record.regions) {
    if (!wanted.contains(region.memory.name)) continue;
    const uint64_t bytes = region.memory.bytes;
    const bool added =
        regions_.emplace(region.content, SealedRegion{std::move(fds[region.memory.name][0]), bytes})
            .second;
    if (!added) continue;  // Two regions of one content: the second is not needed.
    ++report_.taken;
    report_.bytes += bytes;
  }
  SortDevices(record, fds);
}

void RestoredMemory::SortDevices(const ParkedRecord& record, ByName& fds) {
  for (const ParkedDevice& device : record.devices) {
    DeviceRegion::Parts parts;
    parts.key = {device.gpu, device.content, device.part};
    parts.planned = device.planned;
    parts.mode = abi::DeviceMode::kVmmFd;
    for (const ParkedSegment& segment : device.segments) {
      const auto found = fds.find(segment.name);
      if (found == fds.end()) break;
      DeviceSegment& back = parts.segments.emplace_back();
      back.fd = std::move(found->second[0]);
      back.bytes = segment.bytes;
      parts.checksums.push_back(segment.checksum);
    }
    if (parts.segments.size() < device.segments.size()) continue;
    report_.taken += parts.segments.size();
    ++report_.copies;
    copies_.push_back(std::move(parts));
  }
  OfferCopies();
}

void RestoredMemory::OfferCopies() {
  if (devices_ == nullptr) return;
  for (DeviceRegion::Parts& parts : copies_) {
    DeviceRegionKey key = parts.key;
    devices_->Offer(std::move(key), std::move(parts));
  }
  copies_.clear();
}

void RestoredMemory::UseDevices(DeviceTier& devices) {
  absl::MutexLock lock(&mutex_);
  devices_ = &devices;
  OfferCopies();
}

std::optional<SealedRegion> RestoredMemory::TakeRegion(const Digest& content, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(content);
  if (found == regions_.end() || found->second.bytes != bytes) return std::nullopt;
  FaultPoint("restore.taken");
  return std::move(regions_.extract(found).mapped());
}

void RestoredMemory::GiveBack(const Digest& content, SealedRegion region) {
  absl::MutexLock lock(&mutex_);
  if (!dropped_) regions_.emplace(content, std::move(region));
}

std::optional<RestoredIndex> RestoredMemory::TakeIndex(const IndexIdentity& wanted) {
  absl::MutexLock lock(&mutex_);
  for (auto it = indexes_.begin(); it != indexes_.end(); ++it) {
    const ParkedVersion& version = it->version;
    const bool same = version.model == wanted.model && version.version == wanted.version &&
                      version.digest == wanted.digest && version.residency == wanted.residency &&
                      version.contents == wanted.contents &&
                      version.index->builder == wanted.builder &&
                      version.index->gpu_layout == wanted.gpu_layout;
    if (!same) continue;
    RestoredIndex index{std::move(it->memory), *std::move(it->version.index)};
    indexes_.erase(it);
    return index;
  }
  return std::nullopt;
}

RestoreReport RestoredMemory::report() const {
  absl::MutexLock lock(&mutex_);
  return report_;
}

void RestoredMemory::Distrust(const std::string& problem) {
  {
    absl::MutexLock lock(&mutex_);
    report_.problem = problem;
  }
  (void)DropRest();
}

uint64_t RestoredMemory::DropRest() {
  std::map<Digest, SealedRegion> regions;  // Freed without the lock.
  std::vector<OfVersion> indexes;
  std::vector<DeviceRegion::Parts> copies;
  DeviceTier* devices = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    dropped_ = true;
    regions.swap(regions_);
    indexes.swap(indexes_);
    copies.swap(copies_);
    devices = devices_;
  }
  if (devices != nullptr) devices->DropOffered();
  uint64_t bytes = 0;
  for (const auto& [content, region] : regions) bytes += region.bytes;
  return bytes;
}

}  // namespace modelhost
