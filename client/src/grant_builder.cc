#include "client/src/grant_builder.h"

#include <cstring>
#include <string>

#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

Error Broken(const char* why) {
  return Error{Code::kInternal, std::string("modelhostd broke the protocol: ") + why, 0};
}

}  // namespace

GrantBuilder::GrantBuilder(Kind kind, uint32_t references, bool device)
    : kind_(kind), references_(references), device_(device) {
  grants_.reserve(references);
}

void GrantBuilder::Fail(Error error) {
  if (!failure_.has_value()) failure_ = std::move(error);
}

Result<void> GrantBuilder::OnGranted(std::span<const std::byte> bytes, ReceivedFrame& frame) {
  if (bytes.size() < sizeof(abi::Granted)) return Broken("a Granted frame is too short");
  if (regions_left_ != 0 || device_due_ || grants_.size() == references_) {
    return Broken("a Granted frame that was not due");
  }
  Grant grant;
  std::memcpy(&grant.head, bytes.data(), sizeof(grant.head));
  const abi::Granted& head = grant.head;
  if (head.number != grants_.size() || head.count != references_ || head.lease_id == 0) {
    return Broken("a Granted frame is numbered wrongly");
  }
  const std::span<const std::byte> refs = bytes.subspan(sizeof(abi::Granted));
  if (head.ref_count > head.regions || refs.size() / sizeof(abi::RegionRef) != head.ref_count ||
      refs.size() % sizeof(abi::RegionRef) != 0) {
    return Broken("a Granted frame counts its regions wrongly");
  }
  if (kind_ == Kind::kRedeclare) {
    if (head.regions != 0 || head.device != 0) {
      return Broken("a lease that was declared again came with memory");
    }
    grants_.push_back(std::move(grant));
    return {};
  }
  if (frame.fds.size() != size_t{1} + head.ref_count) {
    return Broken("a Granted frame has too few or too many descriptors");
  }
  if (head.device != (device_ ? 1 : 0)) {
    return Broken("a Granted frame does not say of devices what was asked for");
  }
  regions_left_ = head.regions;
  device_due_ = device_;
  device_segments_ = 0;
  FaultPoint("client.granted");
  auto model = Model::Create(head, frame.fds[0]);
  if (model.ok()) {
    grant.model = *std::move(model);
  } else {
    Fail(std::move(model).error());
  }
  grants_.push_back(std::move(grant));
  return TakeRegions(refs, head.ref_count, frame, 1);
}

Result<void> GrantBuilder::OnRegionFds(std::span<const std::byte> bytes, ReceivedFrame& frame) {
  abi::RegionFds head{};
  if (bytes.size() < sizeof(head)) return Broken("a RegionFds frame is too short");
  std::memcpy(&head, bytes.data(), sizeof(head));
  const std::span<const std::byte> refs = bytes.subspan(sizeof(head));
  if (grants_.empty() || head.lease_id != grants_.back().head.lease_id ||
      head.count > regions_left_ || head.count == 0) {
    return Broken("a RegionFds frame that was not due");
  }
  if (refs.size() != head.count * sizeof(abi::RegionRef) || frame.fds.size() != head.count) {
    return Broken("a RegionFds frame counts its regions wrongly");
  }
  return TakeRegions(refs, head.count, frame, 0);
}

Result<void> GrantBuilder::OnDeviceFds(std::span<const std::byte> bytes, ReceivedFrame& frame) {
  abi::DeviceFds head{};
  if (bytes.size() < sizeof(head)) return Broken("a DeviceFds frame is too short");
  std::memcpy(&head, bytes.data(), sizeof(head));
  const std::span<const std::byte> refs = bytes.subspan(sizeof(head));
  if (!device_due_ || regions_left_ != 0 || head.lease_id != grants_.back().head.lease_id) {
    return Broken("a DeviceFds frame that was not due");
  }
  const auto mode = static_cast<abi::DeviceMode>(head.mode);
  const bool with_fds = mode == abi::DeviceMode::kVmmFd || mode == abi::DeviceMode::kHostRegistered;
  const bool with_segments = with_fds || mode == abi::DeviceMode::kCudaIpc;
  DeviceGrant& grant = grants_.back().device;
  if (head.count > head.total - device_segments_ || (head.count == 0 && head.total != 0) ||
      refs.size() / sizeof(abi::DeviceRef) != head.count ||
      refs.size() % sizeof(abi::DeviceRef) != 0 ||
      (!with_segments && head.mode <= static_cast<uint32_t>(abi::DeviceMode::kCudaIpc) &&
       head.total != 0)) {
    return Broken("a DeviceFds frame counts its segments wrongly");
  }
  if (frame.fds.size() != (with_fds ? head.count : 0)) {
    return Broken("a DeviceFds frame has too few or too many descriptors");
  }
  if (device_segments_ != 0 && (grant.mode != mode || device_total_ != head.total)) {
    return Broken("two DeviceFds frames of one grant do not agree");
  }
  grant.mode = mode;
  device_total_ = head.total;
  for (uint32_t i = 0; i < head.count; ++i) {
    abi::DeviceRef ref{};
    std::memcpy(&ref, refs.data() + i * sizeof(ref), sizeof(ref));
    if (ref.segment != device_segments_++) return Broken("device segments are out of order");
    if (failure_.has_value()) continue;
    // One more than the index has is enough to see that it is wrong.
    if (grant.refs.size() > grants_.back().model->index().device_segments().size()) continue;
    grant.refs.push_back(ref);
    if (with_fds) grant.fds.push_back(std::move(frame.fds[i]));
  }
  device_due_ = device_segments_ < head.total;
  return {};
}

Result<void> GrantBuilder::TakeRegions(std::span<const std::byte> refs, uint32_t count,
                                       ReceivedFrame& frame, size_t first_fd) {
  for (uint32_t i = 0; i < count; ++i) {
    abi::RegionRef ref{};
    std::memcpy(&ref, refs.data() + i * sizeof(ref), sizeof(ref));
    // After a failure nothing is mapped any more, but the frames are still counted.
    if (!failure_.has_value()) {
      if (auto added = grants_.back().model->AddRegion(ref, frame.fds[first_fd + i]); !added.ok()) {
        Fail(std::move(added).error());
      }
    }
  }
  regions_left_ -= count;
  FaultPoint("client.mapped");
  if (regions_left_ == 0 && !failure_.has_value()) {
    if (auto checked = grants_.back().model->CheckComplete(); !checked.ok()) {
      Fail(std::move(checked).error());
    }
  }
  return {};
}

}  // namespace modelhost
