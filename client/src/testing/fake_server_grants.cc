// What FakeServer answers to Acquire and Fetch, with the faults that a test asked for.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "client/src/reference.h"
#include "client/src/testing/fake_memory.h"
#include "client/src/testing/fake_server.h"
#include "proto/handle/fd_channel.h"

namespace modelhost::testing {

FakeServer::Resident* FakeServer::Find(const abi::Ref& ref) {
  uint64_t version = ref.version;
  if (version == 0) {
    const auto label =
        labels_.find({std::string(NameIn(ref.model)), std::string(NameIn(ref.label))});
    if (label == labels_.end()) return nullptr;
    version = label->second.version;
  }
  const auto it = residents_.find({std::string(NameIn(ref.model)), version});
  return it == residents_.end() ? nullptr : it->second.get();
}

bool FakeServer::OnAcquire(Peer& peer, const abi::Acquire& acquire,
                           const std::vector<abi::Ref>& refs, const std::string& gpu) {
  const uint32_t request = acquire.header.request_id;
  const bool redeclare = (acquire.flags & abi::kAcquireRedeclare) != 0;
  if (redeclare && faults_.redeclare_not_found) {
    return SendError(peer, request, static_cast<uint32_t>(Code::kNotFound), "not here any more");
  }
  for (const abi::Ref& ref : refs) {
    const Resident* resident = Find(ref);
    const bool wait = (acquire.flags & abi::kAcquireWait) != 0;
    if (resident == nullptr && wait && !redeclare) {
      waiting_.push_back({&peer, acquire, refs, gpu});
      return true;
    }
    if (resident == nullptr) {
      return SendError(peer, request, static_cast<uint32_t>(Code::kNotFound),
                       ReferenceName(ref) + ": no such model, label or version");
    }
    if (resident->ready) continue;
    if (!wait) {
      return SendError(peer, request, static_cast<uint32_t>(Code::kFailedPrecondition),
                       ReferenceName(ref) + ": LOADING, not READY (wait for it)");
    }
    waiting_.push_back({&peer, acquire, refs, gpu});
    return true;
  }
  for (const abi::Ref& ref : refs) {
    if ((acquire.flags & abi::kAcquireDevice) == 0 || Find(ref)->device.gpu == gpu) continue;
    return SendError(peer, request, static_cast<uint32_t>(Code::kFailedPrecondition),
                     ReferenceName(ref) + ": no copy on " + gpu);
  }
  (redeclare ? redeclares_ : acquires_) += 1;
  for (const abi::Ref& ref : refs) {
    if (!redeclare) continue;
    declared_labels_.emplace_back(NameIn(ref.label));
    declared_gpus_.push_back(gpu);
  }
  for (uint32_t i = 0; i < refs.size(); ++i) {
    if (!Grant(peer, acquire, i, refs[i], gpu, *Find(refs[i]))) return false;
  }
  return !std::exchange(faults_.hang_up_after_grant, false);
}

bool FakeServer::Grant(Peer& peer, const abi::Acquire& acquire, uint32_t number,
                       const abi::Ref& ref, const std::string& gpu, Resident& resident) {
  const uint32_t request = acquire.header.request_id;
  const bool redeclare = (acquire.flags & abi::kAcquireRedeclare) != 0;
  const uint64_t lease = next_lease_++;
  peer.leases[lease] = &resident;
  abi::Granted granted{};
  granted.number = number;
  granted.count = acquire.count;
  granted.lease_id = lease;
  granted.version = resident.version.version;
  granted.slot = abi::kNoSlot;
  if (ref.version == 0) {
    const Label& label = labels_[{std::string(NameIn(ref.model)), std::string(NameIn(ref.label))}];
    granted.generation = label.generation;
    granted.slot = label.slot;
  }
  std::memset(granted.digest, resident.version.digest_byte, sizeof(granted.digest));
  std::memcpy(granted.model, ref.model, sizeof(granted.model));
  std::memcpy(granted.label, ref.label, sizeof(granted.label));
  if (faults_.wrong_model) CopyName("surprise", granted.model);
  if (redeclare) {
    granted.header = MakeHeader(abi::FrameType::kGranted, sizeof(granted), request, 0);
    return Send(peer, &granted, sizeof(granted), nullptr, 0, {});
  }
  if (faults_.garbage_reply) {
    return Send(peer, "half a frame", 12, nullptr, 0, {});
  }

  const SealedRegion* index = &resident.index;
  SealedRegion replacement;
  if (faults_.other_index) {
    FakeVersion other = resident.version;
    other.version += 1;
    replacement = Sealed(BuildIndex(other));
    index = &replacement;
  }
  if (faults_.broken_index) {
    replacement = Sealed(std::string(resident.index.bytes, 'x'));
    index = &replacement;
  }
  if (faults_.index_abi != 0) {
    std::string bytes = BuildIndex(resident.version);
    std::memcpy(bytes.data() + offsetof(abi::IndexHeader, abi_version), &faults_.index_abi,
                sizeof(faults_.index_abi));
    replacement = Sealed(bytes);
    index = &replacement;
  }
  if (faults_.unsealed_index) {
    replacement = {Unsealed(BuildIndex(resident.version)), resident.index.bytes};
    index = &replacement;
  }
  granted.index_bytes = index->bytes + static_cast<uint64_t>(faults_.index_bytes_extra);

  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < resident.version.files.size(); ++i) {
    if (resident.version.files[i].eager) order.push_back(i);
  }
  if (faults_.drop_region) order.pop_back();
  if (faults_.repeat_region) order.at(1) = order.at(0);
  granted.regions = static_cast<uint32_t>(order.size()) + (faults_.huge_count ? 1'000'000 : 0);
  const size_t here = std::min<size_t>(order.size(), abi::kMaxFdsPerFrame - 1);
  granted.ref_count = static_cast<uint32_t>(here) + (faults_.too_few_fds ? 1 : 0);
  std::vector<abi::RegionRef> refs;
  std::vector<const UniqueFd*> fds = {&index->fd};
  UniqueFd unsealed;
  for (size_t i = 0; i < here; ++i) {
    const FakeFile& file = resident.version.files[order[i]];
    refs.push_back({order[i], static_cast<uint32_t>(file.kind),
                    file.bytes.size() + static_cast<uint64_t>(faults_.region_bytes_extra)});
    fds.push_back(&resident.fds[order[i]]);
    if (faults_.unsealed_region && i == 0) {
      unsealed = Unsealed(file.bytes);
      fds.back() = &unsealed;
    }
  }
  granted.device = (gpu.empty() ? faults_.device_unasked : !faults_.device_unannounced) ? 1 : 0;
  if (faults_.device_before_regions && !SendDevice(peer, request, lease, gpu, resident)) {
    return false;
  }
  granted.header =
      MakeHeader(abi::FrameType::kGranted, sizeof(granted) + refs.size() * sizeof(abi::RegionRef),
                 request, fds.size());
  return Send(peer, &granted, sizeof(granted), refs.data(), refs.size() * sizeof(abi::RegionRef),
              fds) &&
         SendRegions(peer, request, lease, order, resident, here) &&
         (granted.device == 0 || SendDevice(peer, request, lease, gpu, resident));
}

bool FakeServer::SendDevice(Peer& peer, uint32_t request, uint64_t lease, const std::string& gpu,
                            const Resident& resident) {
  const FakeDevice none;
  const FakeDevice& device = resident.device.gpu == gpu ? resident.device : none;
  std::vector<abi::DeviceRef> refs;
  for (size_t i = 0; i < device.bytes.size(); ++i) {
    abi::DeviceRef ref{};
    ref.segment = static_cast<uint32_t>(i);
    ref.bytes = device.bytes[i];
    if (i < device.handles.size()) device.handles[i].copy(reinterpret_cast<char*>(ref.ipc), 64);
    refs.push_back(ref);
  }
  std::vector<const UniqueFd*> fds;
  for (const UniqueFd& fd : device.fds) fds.push_back(&fd);
  if (faults_.device_bytes_extra != 0 && !refs.empty()) {
    refs[0].bytes += static_cast<uint64_t>(faults_.device_bytes_extra);
  }
  if (faults_.device_drop_segment) {
    refs.pop_back();
    if (!fds.empty()) fds.pop_back();
  }
  if (faults_.device_extra_segment) {
    refs.push_back(refs.at(0));
    refs.back().segment = static_cast<uint32_t>(refs.size()) - 1;
    if (!fds.empty()) fds.push_back(fds[0]);
  }
  if (faults_.device_wrong_order) refs.at(0).segment = 1;
  if (faults_.device_drop_fds) fds.clear();
  const bool with_fds = !fds.empty();
  size_t from = 0;
  do {
    const size_t count =
        faults_.device_endless ? 0 : std::min<size_t>(refs.size() - from, abi::kMaxFdsPerFrame);
    const size_t tail = count * sizeof(abi::DeviceRef) - (faults_.device_short_tail ? 40 : 0);
    const std::vector<const UniqueFd*> here(
        fds.begin() + static_cast<ptrdiff_t>(with_fds ? from : 0),
        fds.begin() + static_cast<ptrdiff_t>(with_fds ? from + count : 0));
    abi::DeviceFds head{};
    head.header = MakeHeader(abi::FrameType::kDeviceFds, sizeof(head) + tail, request, here.size());
    head.lease_id = lease;
    head.mode = faults_.device_mode != 0 ? faults_.device_mode : static_cast<uint32_t>(device.mode);
    if (device.gpu.empty() && faults_.device_mode == 0) head.mode = 0;
    head.total =
        static_cast<uint32_t>(refs.size()) + static_cast<uint32_t>(faults_.device_total_extra);
    head.count = static_cast<uint32_t>(count);
    if (!Send(peer, &head, sizeof(head), refs.data() + from, tail, here)) return false;
    from += count;
  } while (from < refs.size() && !faults_.device_endless);
  return true;
}

bool FakeServer::SendRegions(Peer& peer, uint32_t request, uint64_t lease,
                             const std::vector<uint32_t>& order, const Resident& resident,
                             size_t from) {
  while (from < order.size()) {
    const size_t count = std::min<size_t>(order.size() - from, abi::kMaxFdsPerFrame);
    std::vector<abi::RegionRef> refs;
    std::vector<const UniqueFd*> fds;
    for (size_t i = from; i < from + count; ++i) {
      const FakeFile& file = resident.version.files[order[i]];
      refs.push_back({order[i], static_cast<uint32_t>(file.kind), file.bytes.size()});
      fds.push_back(&resident.fds[order[i]]);
    }
    abi::RegionFds head{};
    head.header = MakeHeader(abi::FrameType::kRegionFds,
                             sizeof(head) + count * sizeof(abi::RegionRef), request, count);
    head.lease_id = lease;
    head.count = static_cast<uint32_t>(count);
    if (!Send(peer, &head, sizeof(head), refs.data(), count * sizeof(abi::RegionRef), fds)) {
      return false;
    }
    from += count;
  }
  return true;
}

bool FakeServer::OnFetch(Peer& peer, const abi::Fetch& fetch) {
  const auto it = peer.leases.find(fetch.lease_id);
  if (it == peer.leases.end()) {
    return SendError(peer, fetch.header.request_id, static_cast<uint32_t>(Code::kNotFound),
                     "no such lease");
  }
  ++fetches_;
  return SendRegions(peer, fetch.header.request_id, fetch.lease_id, {fetch.region}, *it->second, 0);
}

}  // namespace modelhost::testing
