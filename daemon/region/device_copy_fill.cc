// The bytes of a copy: uploaded by the device agent, or packed into host memory by this process.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/device_copy_job.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

// Between looks at the token.
constexpr uint64_t kPackBytes = uint64_t{4} << 20;

std::vector<DeviceCopy> CopiesOf(const DevicePlan::Part& part, uint32_t segment) {
  std::vector<DeviceCopy> copies;
  for (size_t i = 0; i < part.ranges.size(); ++i) {
    if (part.places[i].segment != segment) continue;
    copies.push_back({part.places[i].offset, part.ranges[i].bytes, part.ranges[i].offset, 0});
  }
  return copies;
}

}  // namespace

absl::Status DeviceCopyJob::Fill() {
  uint64_t total = 0;
  for (const Slot& slot : slots_) {
    if (slot.mine && !slot.done) total += slot.bytes();
  }
  if (total == 0) return absl::OkStatus();
  Begin("device_upload", total);
  filled_bytes_ = 0;
  for (const auto& [gpu, mode] : gpus_) {
    if (auto filled = FillOn(*gpu); !filled.ok()) return filled;
  }
  FaultPoint("load.device_uploaded");
  return absl::OkStatus();
}

// One turn, with one ring, for all that goes to this GPU.
absl::Status DeviceCopyJob::FillOn(DeviceGpu& gpu) {
  std::optional<DeviceGpu::Turn> turn;
  Reservation ring;
  for (Slot& slot : slots_) {
    if (!slot.mine || slot.done || slot.gpu != &gpu) continue;
    absl::Status filled;
    if (slot.mode == abi::DeviceMode::kHostRegistered) {
      filled = Pack(slot);
    } else {
      if (!turn.has_value()) {
        auto taken = TakeTurn(gpu);
        if (!taken.ok()) return taken.status();
        turn.emplace(*std::move(taken));
        auto booked =
            BookHost(tier_.options_.ring_bytes, absl::StrCat("pinned ring for the ", What(gpu)));
        if (!booked.ok()) return booked.status();
        ring = *std::move(booked);
      }
      filled = Upload(slot);
    }
    if (filled.ok()) filled = CheckSource(slot);
    if (work_.cancel.cancelled()) return Cancelled();
    if (!filled.ok()) return Failed(slot, filled);
    slot.done = true;
    filled_bytes_ += slot.bytes();
  }
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::Upload(Slot& slot) {
  // Files that are not meant to be in memory pass the page cache by.
  const bool direct = slot.source->residency() == Residency::kMapped;
  uint64_t before = filled_bytes_;
  for (uint32_t i = 0; i < slot.made.segments.size(); ++i) {
    const DeviceSegment& segment = slot.made.segments[i];
    const absl::Duration started = tier_.clock_.Monotonic();
    absl::Duration written = started;  // From then on it is read back.
    const auto progress = [&](uint64_t done) {
      if (done <= segment.bytes) written = tier_.clock_.Monotonic();
      return GoOn(before + std::min(done, segment.bytes));
    };
    auto checksum = slot.gpu->service().Upload(segment, CopiesOf(*slot.part, i),
                                               {&slot.source->fd()}, direct, progress);
    if (!checksum.ok()) return checksum.status();
    AddPhase("device_upload", written - started, segment.bytes);
    AddPhase("device_verify", tier_.clock_.Monotonic() - written, segment.bytes);
    slot.made.checksums.push_back(*checksum);
    before += segment.bytes;
  }
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::Pack(Slot& slot) {
  const absl::Duration started = tier_.clock_.Monotonic();
  const std::span<const std::byte> from = slot.source->data();
  const SigbusGuard guard(from);
  uint64_t before = filled_bytes_;
  for (uint32_t i = 0; i < slot.host_segments.size(); ++i) {
    const std::span<std::byte> to = slot.host_segments[i].bytes();
    for (const DeviceCopy& copy : CopiesOf(*slot.part, i)) {
      for (uint64_t at = 0; at < copy.bytes; at += kPackBytes) {
        if (!GoOn(before + copy.device_offset + at)) return Cancelled();
        std::memcpy(to.data() + copy.device_offset + at, from.data() + copy.source_offset + at,
                    std::min(kPackBytes, copy.bytes - at));
      }
    }
    DeviceSegment segment;
    segment.bytes = to.size();
    auto fd = std::move(slot.host_segments[i]).SealSize();
    if (!fd.ok()) return ToStatus(fd.error());
    segment.fd = *std::move(fd);
    before += segment.bytes;
    slot.made.segments.push_back(std::move(segment));
  }
  slot.host_segments.clear();
  if (guard.hit()) {
    return absl::DataLossError(
        absl::StrCat(slot.source->source_path(), ": it was truncated, or its disk fails"));
  }
  AddPhase("device_upload", tier_.clock_.Monotonic() - started, slot.bytes());
  return absl::OkStatus();
}

// The region was verified when it was made; only a file can have changed since.
absl::Status DeviceCopyJob::CheckSource(const Slot& slot) const {
  if (slot.source->SourceUnchanged()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(slot.source->source_path(), ": it was changed in place while it was copied"));
}

}  // namespace modelhost
