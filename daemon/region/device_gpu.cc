#include "daemon/region/device_gpu.h"

#include <optional>
#include <utility>
#include <vector>

namespace modelhost {
namespace {

constexpr absl::Duration kTurnLook = absl::Milliseconds(20);
// Of a check, for its turn: a GPU that is being filled is there.
constexpr absl::Duration kCheckPatience = absl::Seconds(1);
// Of a release. Then the next task of the thread has its chance, and the release comes again.
constexpr absl::Duration kReleasePatience = absl::Seconds(1);

// The device, or the segment, or who could look at it now.
bool IsAnswer(const absl::Status& status) {
  return status.ok() || absl::IsDataLoss(status) || absl::IsNotFound(status) ||
         absl::IsResourceExhausted(status) || absl::IsCancelled(status);
}

}  // namespace

abi::DeviceMode DeviceModeOf(const std::string& name) {
  if (name == "vmm_fd") return abi::DeviceMode::kVmmFd;
  if (name == "host_direct") return abi::DeviceMode::kHostDirect;
  if (name == "host_registered") return abi::DeviceMode::kHostRegistered;
  if (name == "cuda_ipc") return abi::DeviceMode::kCudaIpc;
  return abi::DeviceMode::kNone;
}

bool TakesDeviceMemory(abi::DeviceMode mode) {
  return mode == abi::DeviceMode::kVmmFd || mode == abi::DeviceMode::kCudaIpc;
}

bool HasSegments(abi::DeviceMode mode) {
  return TakesDeviceMemory(mode) || mode == abi::DeviceMode::kHostRegistered;
}

DeviceGpu::DeviceGpu(DeviceInfo info, std::unique_ptr<DeviceMemoryService> service)
    : info_(std::move(info)), service_(std::move(service)), thread_("mh-gpu", 1) {
  absl::MutexLock lock(&mutex_);
  state_.report.info = info_;
}

DeviceGpu::State DeviceGpu::state() const {
  absl::MutexLock lock(&mutex_);
  return state_;
}

void DeviceGpu::MakePool(std::optional<uint64_t> budget_bytes) {
  const State now = state();
  // One that does not answer may hold copies once it does.
  if (now.usable && !TakesDeviceMemory(now.mode)) return;
  pool_ = std::make_unique<BudgetPool>(uuid(),
                                       budget_bytes.value_or(now.report.info.total_bytes / 10 * 9));
}

void DeviceGpu::Look() {
  auto report = service_->Report();
  absl::MutexLock lock(&mutex_);
  state_.usable = report.ok();
  state_.problem = report.ok() ? "" : std::string(report.status().message());
  if (!report.ok()) return;
  state_.mode = DeviceModeOf(report->mode);
  state_.report = *std::move(report);
}

DeviceGpu::Turn::~Turn() {
  if (gpu_ == nullptr) return;
  absl::MutexLock lock(&gpu_->mutex_);
  gpu_->busy_ = false;
}

std::optional<DeviceGpu::Turn> DeviceGpu::TakeTurnWithin(absl::Duration patience, bool first) {
  absl::MutexLock lock(&mutex_);
  const auto free = [this, first]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !busy_ && (first || releases_ == 0);
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&free), patience)) return std::nullopt;
  busy_ = true;
  return Turn(this);
}

std::optional<DeviceGpu::Turn> DeviceGpu::TakeTurn(const CancelToken& cancel) {
  while (!cancel.cancelled()) {
    if (auto turn = TakeTurnWithin(kTurnLook, /*first=*/false)) return turn;
  }
  return std::nullopt;
}

void DeviceGpu::ReleaseLater(std::vector<DeviceSegment> segments, Reservation booked) {
  {
    absl::MutexLock lock(&mutex_);
    ++releases_;
  }
  Release(std::move(segments), std::move(booked));
}

void DeviceGpu::Release(std::vector<DeviceSegment> segments, Reservation booked) {
  thread_.Post([this, segments = std::move(segments), booked = std::move(booked)]() mutable {
    const auto turn = TakeTurnWithin(kReleasePatience, /*first=*/true);
    if (!turn.has_value()) return Release(std::move(segments), std::move(booked));
    // What fails went with the agent that had it.
    for (const DeviceSegment& segment : segments) (void)service_->Release(segment);
    booked.Shrink(0);
    absl::MutexLock lock(&mutex_);
    --releases_;
  });
}

void DeviceGpu::StartCheck(DeviceCache& cache) {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(checking_, true)) return;
  }
  thread_.Post([this, &cache] {
    Check(cache);
    absl::MutexLock lock(&mutex_);
    checking_ = false;
  });
}

bool DeviceGpu::AwaitCheck(absl::Duration patience) {
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !checking_; };
  (void)mutex_.AwaitWithTimeout(absl::Condition(&done), patience);
  return std::exchange(news_, false);
}

void DeviceGpu::Check(DeviceCache& cache) {
  const std::vector<std::shared_ptr<const DeviceRegion>> copies = cache.On(uuid());
  // First: what is to be released waits for this thread.
  const auto turn = TakeTurnWithin(kCheckPatience, /*first=*/true);
  if (!turn.has_value()) return;
  if (copies.empty() && !state().usable) {
    Look();  // It may have come back.
    if (state().usable) silent_checks_ = 0;
    return;
  }
  std::optional<absl::Status> silence;
  bool answered = false;
  for (const auto& copy : copies) {
    if (!TakesDeviceMemory(copy->mode())) continue;
    const absl::Status found = CheckCopy(*copy);
    if (absl::IsDataLoss(found) || absl::IsNotFound(found)) {
      MarkLost(cache, *copy);  // Of the device nothing bad is known.
    } else if (IsAnswer(found)) {
      answered = answered || found.ok();
    } else if (absl::IsUnavailable(found)) {
      // The GPU itself is gone, and with it all that was on it.
      SetUsable(found);
      for (const auto& other : copies) {
        if (TakesDeviceMemory(other->mode())) MarkLost(cache, *other);
      }
      return;
    } else {
      silence = found;
      // One that hangs takes its time each time; the others are looked at next time.
      if (absl::IsDeadlineExceeded(found)) break;
    }
  }
  if (silence.has_value()) {
    if (++silent_checks_ >= kSilentChecks) SetUsable(*silence);
  } else if (answered) {
    silent_checks_ = 0;
    SetUsable(absl::OkStatus());
  }
}

// An agent that died or lost its context is a reason to ask another one, once. UNAVAILABLE: both
// times the driver itself said so.
absl::Status DeviceGpu::CheckCopy(const DeviceRegion& copy) {
  for (const DeviceSegment& segment : copy.segments()) {
    absl::Status found = service_->Check(segment);
    if (!IsAnswer(found)) {
      const absl::Status first = std::exchange(found, service_->Check(segment));
      if (absl::IsUnavailable(found) && !absl::IsUnavailable(first)) found = first;
    }
    if (!found.ok()) return found;
  }
  return absl::OkStatus();
}

void DeviceGpu::MarkLost(DeviceCache& cache, const DeviceRegion& copy) {
  if (!cache.MarkLost(copy)) return;
  absl::MutexLock lock(&mutex_);
  ++state_.lost;
  news_ = true;
}

void DeviceGpu::SetUsable(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  state_.usable = status.ok();
  state_.problem = std::string(status.message());
}

}  // namespace modelhost
