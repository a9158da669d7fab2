#include "daemon/publish/reply_frames.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "proto/handle/fd_channel.h"

namespace modelhost {
namespace {

template <typename T>
OutFrame Make(T frame, abi::FrameType type, uint32_t request_id, std::span<const std::byte> tail,
              size_t fd_count) {
  frame.header = MakeHeader(type, sizeof(T) + tail.size(), request_id, fd_count);
  OutFrame out;
  out.bytes.resize(sizeof(T) + tail.size());
  std::memcpy(out.bytes.data(), &frame, sizeof(T));
  if (!tail.empty()) std::memcpy(out.bytes.data() + sizeof(T), tail.data(), tail.size());
  return out;
}

abi::RegionRef RefOf(const ResidentVersion& version, uint32_t region) {
  const HostRegion& host = *version.regions[region];
  return {region, static_cast<uint32_t>(host.kind()), host.bytes()};
}

// The next regions of `left` that fit into one frame beside `used` other descriptors.
std::vector<abi::RegionRef> TakeRefs(const ResidentVersion& version,
                                     std::span<const uint32_t>& left, size_t used) {
  const size_t count = std::min<size_t>(left.size(), abi::kMaxFdsPerFrame - used);
  std::vector<abi::RegionRef> refs;
  refs.reserve(count);
  for (const uint32_t region : left.first(count)) refs.push_back(RefOf(version, region));
  left = left.subspan(count);
  return refs;
}

void AddFds(OutFrame& frame, const ResidentVersion& version, std::span<const abi::RegionRef> refs) {
  for (const abi::RegionRef& ref : refs) frame.fds.push_back(&version.regions[ref.region]->fd());
}

// `image`: null where there is no copy for this client.
void AddDeviceFrames(uint32_t request_id, uint64_t lease, const DeviceImage* image,
                     std::vector<OutFrame>& frames) {
  const abi::DeviceMode mode = image == nullptr ? abi::DeviceMode::kNone : image->mode;
  const bool with_fds = mode == abi::DeviceMode::kVmmFd || mode == abi::DeviceMode::kHostRegistered;
  std::vector<const DeviceSegment*> segments;
  if (with_fds || mode == abi::DeviceMode::kCudaIpc) {
    for (const auto& region : image->regions) {
      for (const DeviceSegment& segment : region->segments()) segments.push_back(&segment);
    }
  }
  size_t sent = 0;
  do {
    const size_t count = std::min<size_t>(segments.size() - sent, abi::kMaxFdsPerFrame);
    std::vector<abi::DeviceRef> refs(count);
    for (size_t i = 0; i < count; ++i) {
      const DeviceSegment& segment = *segments[sent + i];
      refs[i].segment = static_cast<uint32_t>(sent + i);
      refs[i].bytes = segment.bytes;
      if (!with_fds) std::memcpy(refs[i].ipc, segment.handle.data(), sizeof(refs[i].ipc));
    }
    abi::DeviceFds head{};
    head.lease_id = lease;
    head.mode = static_cast<uint32_t>(mode);
    head.total = static_cast<uint32_t>(segments.size());
    head.count = static_cast<uint32_t>(count);
    frames.push_back(Make(head, abi::FrameType::kDeviceFds, request_id,
                          std::as_bytes(std::span(refs)), with_fds ? count : 0));
    for (size_t i = 0; with_fds && i < count; ++i) {
      frames.back().fds.push_back(&segments[sent + i]->fd);
    }
    sent += count;
  } while (sent < segments.size());
}

}  // namespace

std::vector<OutFrame> GrantFrames(uint32_t request_id, uint32_t number, uint32_t count,
                                  const Grant& grant, bool redeclare, bool device) {
  const ResidentVersion& version = *grant.resident;
  std::span<const uint32_t> left = version.eager;
  if (redeclare) {
    left = {};
    device = false;  // It has that mapped too.
  }
  abi::Granted granted{};
  granted.number = number;
  granted.count = count;
  granted.lease_id = grant.lease;
  granted.version = grant.key.version;
  granted.generation = grant.generation;
  granted.slot = grant.slot;
  granted.regions = static_cast<uint32_t>(left.size());
  granted.index_bytes = version.index.bytes;
  std::ranges::copy(version.manifest->digest.bytes, granted.digest);
  grant.key.model.copy(granted.model, abi::kMaxNameLength);
  grant.label.copy(granted.label, abi::kMaxNameLength);

  std::vector<OutFrame> frames;
  const std::vector<abi::RegionRef> first = TakeRefs(version, left, /*used=*/1);
  granted.ref_count = static_cast<uint32_t>(first.size());
  granted.device = device ? 1 : 0;
  frames.push_back(Make(granted, abi::FrameType::kGranted, request_id,
                        std::as_bytes(std::span(first)), redeclare ? 0 : 1 + first.size()));
  if (redeclare) return frames;
  frames.back().fds.push_back(&version.index.fd);
  AddFds(frames.back(), version, first);
  while (!left.empty()) {
    const std::vector<abi::RegionRef> refs = TakeRefs(version, left, /*used=*/0);
    abi::RegionFds more{};
    more.lease_id = grant.lease;
    more.count = static_cast<uint32_t>(refs.size());
    frames.push_back(Make(more, abi::FrameType::kRegionFds, request_id,
                          std::as_bytes(std::span(refs)), refs.size()));
    AddFds(frames.back(), version, refs);
  }
  if (device) AddDeviceFrames(request_id, grant.lease, grant.device, frames);
  for (OutFrame& frame : frames) frame.keep = grant.resident;
  return frames;
}

OutFrame FetchFrame(uint32_t request_id, uint64_t lease, uint32_t region,
                    const ResidentVersion& version, UniqueFd fd) {
  const abi::RegionRef ref = RefOf(version, region);
  abi::RegionFds fetched{};
  fetched.lease_id = lease;
  fetched.count = 1;
  OutFrame frame = Make(fetched, abi::FrameType::kRegionFds, request_id, AsBytes(ref), 1);
  auto own = std::make_shared<const UniqueFd>(std::move(fd));
  frame.fds.push_back(own.get());
  frame.keep = std::move(own);
  return frame;
}

OutFrame HelloFrame(uint32_t request_id, uint32_t abi, uint64_t epoch, const UniqueFd& page,
                    uint64_t page_bytes) {
  abi::HelloReply reply{};
  reply.abi = abi;
  reply.epoch = epoch;
  reply.page_bytes = page_bytes;
  OutFrame frame = Make(reply, abi::FrameType::kHelloReply, request_id, {}, 1);
  frame.fds.push_back(&page);  // Outlives every session.
  return frame;
}

OutFrame AckFrame(uint32_t request_id) {
  return Make(abi::Ack{}, abi::FrameType::kAck, request_id, {}, 0);
}

OutFrame ErrorFrame(uint32_t request_id, const absl::Status& status) {
  const absl::string_view text = status.message().substr(0, abi::kMaxErrorText);
  abi::Error error{};
  error.code = static_cast<uint32_t>(status.code());
  error.length = static_cast<uint32_t>(text.size());
  return Make(error, abi::FrameType::kError, request_id,
              std::as_bytes(std::span(text.data(), text.size())), 0);
}

const char* TransportOf(const ResidentVersion& version) {
  // All regions of a version have one residency.
  const bool sealed =
      !version.regions.empty() && version.regions.front()->kind() == abi::RegionKind::kSealed;
  return sealed ? "host_memfd" : "host_file";
}

}  // namespace modelhost
