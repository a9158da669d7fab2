#include "daemon/region/device_copy_job.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/chunk_pass.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

// How long a wait for another load goes on without a look at the token.
constexpr absl::Duration kOthersLook = absl::Milliseconds(20);

// Whether the bytes that a part wants are in the region at all.
absl::Status CheckRanges(const DevicePlan::Part& part, const HostRegion& region) {
  for (const HostRange& range : part.ranges) {
    if (range.bytes <= region.bytes() && range.offset <= region.bytes() - range.bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat(region.source_path(), ": bytes ", range.offset,
                                                   " to ", range.offset, " + ", range.bytes,
                                                   " of a file that has ", region.bytes()));
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t DeviceCopyJob::Slot::bytes() const {
  return std::accumulate(part->segment_bytes.begin(), part->segment_bytes.end(), uint64_t{0});
}

DeviceCopyJob::DeviceCopyJob(DeviceTier& tier, const DeviceTier::Work& work)
    : tier_(tier), work_(work), policy_(DevicePolicyText(work.policy)) {}

DeviceCopyJob::~DeviceCopyJob() {
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    if (slot.adopted) {  // For the next load: it need not be uploaded again.
      slot.made.device = Reservation();
      tier_.Offer(slot.key, std::move(slot.made));
    } else {  // Gives the memory back, before the booking.
      const DeviceRegion dropped(*slot.gpu, std::move(slot.made));
    }
    tier_.cache_.Abandon(slot.key);
  }
}

absl::StatusOr<std::vector<DeviceImage>> DeviceCopyJob::Run() {
  if (auto status = Prepare(); !status.ok()) return status;
  while (true) {
    if (work_.cancel.cancelled()) return Cancelled();
    if (Claim()) {
      for (auto step : {&DeviceCopyJob::Book, &DeviceCopyJob::TakeOffered, &DeviceCopyJob::Create,
                        &DeviceCopyJob::Fill}) {
        if (auto status = (this->*step)(); !status.ok()) return status;
      }
      Finish();
    }
    const bool all =
        std::ranges::all_of(slots_, [](const Slot& slot) { return slot.copy != nullptr; });
    if (all) break;
    if (auto status = WaitForOthers(); !status.ok()) return status;
  }
  if (work_.phase) {
    for (const auto& [name, phase] : phases_) work_.phase(name, phase.took, phase.bytes);
  }
  return Images();
}

absl::Status DeviceCopyJob::Prepare() {
  for (const std::string& uuid : work_.gpus) {
    DeviceGpu* const gpu = tier_.Find(uuid);
    if (gpu == nullptr) {
      return absl::UnavailableError(absl::StrCat(work_.name, ": there is no ", uuid));
    }
    const abi::DeviceMode mode = gpu->state().mode;
    gpus_.emplace_back(gpu, mode);
    if (!HasSegments(mode)) continue;
    if (!work_.plan.segments && !work_.plan.empty()) {
      return absl::InternalError(
          absl::StrCat(work_.name, ": the plan has no segments, and ", uuid, " needs them"));
    }
    for (const DevicePlan::Part& part : work_.plan.parts) {
      if (part.region >= work_.regions.size()) {
        return absl::InternalError(
            absl::StrCat(work_.name, ": the plan names region ", part.region));
      }
      const HostRegion& region = *work_.regions[part.region];
      if (auto good = CheckRanges(part, region); !good.ok()) return good;
      Slot& slot = slots_.emplace_back();
      slot.gpu = gpu;
      slot.mode = mode;
      slot.part = &part;
      slot.source = &region;
      slot.key = {uuid, region.key().content, PartDigest(part)};
    }
  }
  return absl::OkStatus();
}

bool DeviceCopyJob::Claim() {
  bool any = false;
  for (Slot& slot : slots_) {
    if (slot.copy != nullptr) continue;
    if (tier_.cache_.Claim(slot.key, &slot.copy) != DeviceCache::Claimed::kMine) continue;
    slot.mine = true;
    any = true;
    slot.made.key = slot.key;
    slot.made.planned = PlannedDeviceId(slot.key.gpu, slot.source->digest(), policy_);
    slot.made.mode = slot.mode;
  }
  return any;
}

absl::Status DeviceCopyJob::WaitForOthers() {
  for (const Slot& slot : slots_) {
    if (slot.copy != nullptr) continue;
    while (!tier_.cache_.Wait(slot.key, kOthersLook)) {
      if (work_.cancel.cancelled()) return Cancelled();
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::Book() {
  for (const auto& [gpu, mode] : gpus_) {
    uint64_t need_bytes = 0;
    for (const Slot& slot : slots_) {
      if (slot.mine && slot.gpu == gpu) need_bytes += slot.bytes();
    }
    if (need_bytes == 0) continue;
    BudgetPool* const pool = TakesDeviceMemory(mode) ? gpu->pool() : &tier_.host_;
    if (pool == nullptr) {
      return absl::UnavailableError(
          absl::StrCat(What(*gpu), ": it holds none since the daemon's start (restart it)"));
    }
    auto booked = pool == &tier_.host_ ? BookHost(need_bytes, What(*gpu))
                                       : pool->Reserve(need_bytes, What(*gpu));
    if (!booked.ok()) return booked.status();
    for (Slot& slot : slots_) {
      if (slot.mine && slot.gpu == gpu) slot.made.device = booked->Split(slot.bytes());
    }
  }
  FaultPoint("load.device_booked");
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::TakeOffered() {
  const absl::Duration started = tier_.clock_.Monotonic();
  uint64_t bytes = 0;
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    auto parts = tier_.TakeOffered(slot.key);
    if (!parts.has_value()) continue;
    Begin("device_verify", slot.bytes());
    const absl::Status good = VerifyOffered(slot, *parts);
    const bool no_room = BudgetRefusalOf(good).has_value();
    if (no_room || work_.cancel.cancelled()) {
      tier_.Offer(slot.key, *std::move(parts));  // For the next load.
      return no_room ? Failed(slot, good) : Cancelled();
    }
    if (!good.ok()) {
      if (work_.warn) {
        work_.warn(absl::StrCat(What(*slot.gpu),
                                ": what the fd store kept of it was not taken: ", good.message()));
      }
      continue;
    }
    slot.made.segments = std::move(parts->segments);
    slot.made.checksums = std::move(parts->checksums);
    slot.done = slot.adopted = true;
    bytes += slot.bytes();
  }
  if (bytes > 0) AddPhase("device_verify", tier_.clock_.Monotonic() - started, bytes);
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::VerifyOffered(Slot& slot, const DeviceRegion::Parts& parts) {
  bool same = slot.mode == abi::DeviceMode::kVmmFd && parts.mode == slot.mode &&
              parts.segments.size() == slot.part->segment_bytes.size() &&
              parts.checksums.size() == parts.segments.size();
  for (size_t i = 0; same && i < parts.segments.size(); ++i) {
    same = parts.segments[i].fd.valid() && parts.segments[i].bytes == slot.part->segment_bytes[i];
  }
  if (!same) return absl::DataLossError("it is laid out otherwise");
  const auto turn = TakeTurn(*slot.gpu);
  if (!turn.ok()) return turn.status();
  auto ring =
      BookHost(tier_.options_.ring_bytes, absl::StrCat("pinned ring for the ", What(*slot.gpu)));
  if (!ring.ok()) return ring.status();
  uint64_t before = 0;
  for (size_t i = 0; i < parts.segments.size(); ++i) {
    const auto verify = [&] {
      return slot.gpu->service().Verify(parts.segments[i], parts.checksums[i],
                                        [&](uint64_t done) { return GoOn(before + done); });
    };
    absl::Status status = verify();
    // An agent that died says nothing of the copy; another one is asked, once.
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) status = verify();
    if (!status.ok()) return status;
    before += parts.segments[i].bytes;
  }
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::Create() {
  const absl::Duration started = tier_.clock_.Monotonic();
  uint64_t bytes = 0;
  for (Slot& slot : slots_) {
    if (!slot.mine || slot.done) continue;
    if (bytes == 0) Begin("device_create", 0);
    if (auto status = CreateSegments(slot); !status.ok()) return Failed(slot, status);
    bytes += slot.bytes();
  }
  if (bytes > 0) AddPhase("device_create", tier_.clock_.Monotonic() - started, bytes);
  FaultPoint("load.device_created");
  return absl::OkStatus();
}

absl::Status DeviceCopyJob::CreateSegments(Slot& slot) {
  const auto go_on = [this](uint64_t) { return !work_.cancel.cancelled(); };
  for (const uint64_t bytes : slot.part->segment_bytes) {
    if (slot.mode == abi::DeviceMode::kHostRegistered) {
      auto memory = WritableRegion::Create("modelhost:device", bytes, HugePages::kAuto,
                                           [this] { return !work_.cancel.cancelled(); });
      if (!memory.ok()) return ToStatus(memory.error());
      slot.host_segments.push_back(*std::move(memory));
      continue;
    }
    const auto turn = TakeTurn(*slot.gpu);
    if (!turn.ok()) return turn.status();
    auto segment = slot.gpu->service().Create(bytes, go_on);
    // What nobody has asked for yet gives way to what somebody asks for.
    if (absl::IsResourceExhausted(segment.status()) && tier_.DropOfferedOn(slot.key.gpu)) {
      segment = slot.gpu->service().Create(bytes, go_on);
    }
    if (!segment.ok()) return segment.status();
    const bool by_descriptor = segment->fd.valid();
    slot.made.segments.push_back(*std::move(segment));
    if (by_descriptor != (slot.mode == abi::DeviceMode::kVmmFd)) {
      return absl::UnavailableError(
          absl::StrCat("the device agent made memory ", by_descriptor ? "by" : "without",
                       " a descriptor, which is not ", abi::DeviceModeName(slot.mode)));
    }
  }
  return absl::OkStatus();
}

void DeviceCopyJob::Finish() {
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    slot.copy = std::make_shared<const DeviceRegion>(*slot.gpu, std::move(slot.made));
    tier_.cache_.Insert(slot.copy);
    slot.mine = false;
  }
}

std::vector<DeviceImage> DeviceCopyJob::Images() const {
  std::vector<DeviceImage> images;
  for (const auto& [gpu, mode] : gpus_) {
    DeviceImage& image = images.emplace_back();
    image.gpu = gpu->uuid();
    image.mode = mode;
    for (const Slot& slot : slots_) {
      if (slot.gpu == gpu) image.regions.push_back(slot.copy);
    }
  }
  return images;
}

absl::StatusOr<DeviceGpu::Turn> DeviceCopyJob::TakeTurn(DeviceGpu& gpu) const {
  auto turn = gpu.TakeTurn(work_.cancel);
  if (!turn.has_value()) return Cancelled();
  return *std::move(turn);
}

std::string DeviceCopyJob::What(const DeviceGpu& gpu) const {
  return absl::StrCat("copy of ", work_.name, " on ", gpu.uuid());
}

absl::Status DeviceCopyJob::Failed(const Slot& slot, const absl::Status& why) const {
  if (work_.cancel.cancelled()) return Cancelled();
  const bool kept =
      absl::IsResourceExhausted(why) || absl::IsUnavailable(why) || absl::IsCancelled(why);
  // What a GPU, its driver or the agent got wrong says nothing of the version's bytes, which such a
  // code would put in quarantine; another try may pass, also after an agent that hung.
  if (kept || !slot.source->SourceUnchanged()) return AtPath(why, What(*slot.gpu));
  return AtPath(absl::UnavailableError(why.message()), What(*slot.gpu));
}

// Who waits for room must wait for all that the next try will have booked by then.
absl::StatusOr<Reservation> DeviceCopyJob::BookHost(uint64_t bytes, const std::string& what) const {
  auto booked = tier_.host_.Reserve(bytes, what);
  if (booked.ok()) return booked;
  absl::Status refused = booked.status();
  if (auto refusal = BudgetRefusalOf(refused); refusal.has_value()) {
    refusal->need_bytes += work_.host_held_bytes;
    for (const Slot& slot : slots_) {
      if (slot.mine && slot.mode == abi::DeviceMode::kHostRegistered) {
        refusal->need_bytes += slot.made.device.bytes();
      }
    }
    SetBudgetRefusal(refused, *refusal);
  }
  return refused;
}

absl::Status DeviceCopyJob::Cancelled() const {
  return absl::CancelledError(absl::StrCat("load of ", work_.name, ": it was cancelled"));
}

bool DeviceCopyJob::GoOn(uint64_t done) const {
  if (work_.progress) work_.progress(done);
  return !work_.cancel.cancelled();
}

void DeviceCopyJob::Begin(const std::string& phase, uint64_t total) const {
  if (work_.begin) work_.begin(phase, total);
}

void DeviceCopyJob::AddPhase(const std::string& name, absl::Duration took, uint64_t bytes) {
  const auto found =
      std::ranges::find_if(phases_, [&](const auto& phase) { return phase.first == name; });
  Phase& phase =
      found != phases_.end() ? found->second : phases_.emplace_back(name, Phase{}).second;
  phase.took += took;
  phase.bytes += bytes;
}

}  // namespace modelhost
