// The end of a load: the index, taken from the fd store or made, and all of it left there.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/region/load_job.h"
#include "daemon/region/version_contents.h"
#include "proto/handle/fault_point.h"
#include "proto/handle/mapping.h"

namespace modelhost {

absl::StatusOr<std::shared_ptr<const ResidentVersion>> LoadJob::Complete() {
  auto version = std::make_shared<ResidentVersion>();
  for (auto step : {&LoadJob::Index, &LoadJob::MakeDevices}) {
    if (cancel_->cancelled()) return Cancelled();
    if (auto status = (this->*step)(*version); !status.ok()) return status;
  }
  Park(*version);
  if (!distrusted_.empty()) report_.warnings.push_back(distrusted_);
  if (unlocked_bytes_ > 0) {
    report_.warnings.push_back(absl::StrCat(IecBytes(unlocked_bytes_), " of ", name_,
                                            " are not locked in memory: ", unlocked_why_));
  }
  const bool restored = report_.restored_bytes > 0 && report_.disk_bytes == 0;
  report_.source = restored ? "restore" : all_in_page_cache_ ? "warm" : "cold";
  report_.duration = loader_.clock_.Monotonic() - started_;
  version->report = std::move(report_);
  if (cancel_->cancelled()) return Cancelled();
  return version;
}

absl::Status LoadJob::ChooseDevices() {
  if (loader_.devices_ == nullptr || !request_.policy.device.wanted) return absl::OkStatus();
  const bool known = loader_.devices_->Snapshot().known;
  const absl::Duration started = loader_.clock_.Monotonic();
  if (!known) progress_.Begin("wait", 0);
  auto targets = loader_.devices_->Choose(request_.policy.device, *cancel_);
  if (cancel_->cancelled()) return Cancelled();
  if (!targets.ok()) return AtPath(targets.status(), name_);
  if (!known) AddPhase("wait", loader_.clock_.Monotonic() - started, 0);
  targets_ = *std::move(targets);
  return absl::OkStatus();
}

absl::Status LoadJob::Index(ResidentVersion& version) {
  if (auto chosen = ChooseDevices(); !chosen.ok()) return chosen;
  progress_.Begin("index", 0);
  const PhaseTimer timer(*this, "index");
  version.manifest = opened_.manifest;
  version.file_regions = file_slots_;
  for (const Slot& slot : slots_) version.regions.push_back(slot.region);
  version.requirements = Flatten(requirements_);
  version.compared = Compared(requirements_);
  if (!AdoptIndex(version)) {
    if (auto status = MakeIndex(version); !status.ok()) return status;
  }
  FaultPoint("load.indexed");
  std::vector<uint32_t> counted = version.eager;
  if (counted.empty()) counted = file_slots_;
  version.tier = HostTier::kPinned;
  for (const uint32_t region : counted) {
    version.tier = std::min(version.tier, version.regions[region]->tier());
  }
  report_.warnings = contents_warnings_;
  report_.warnings.insert(report_.warnings.end(), targets_.warnings.begin(),
                          targets_.warnings.end());
  return absl::OkStatus();
}

absl::Status LoadJob::MakeDevices(ResidentVersion& version) {
  version.device_targets = targets_.gpus;
  if (targets_.gpus.empty() || plan_.empty()) return absl::OkStatus();
  const DeviceTier::Work work{
      .name = name_,
      .policy = request_.policy.device,
      .plan = plan_,
      .gpus = targets_.gpus,
      .regions = version.regions,
      .cancel = *cancel_,
      .host_held_bytes = host_booked_bytes_,
      .begin = [this](const std::string& phase, uint64_t total) { progress_.Begin(phase, total); },
      .progress = [this](uint64_t done) { progress_.SetDone(done); },
      .phase = [this](const std::string& phase, absl::Duration took,
                      uint64_t bytes) { AddPhase(phase, took, bytes); },
      .warn = [this](std::string text) { report_.warnings.push_back(std::move(text)); }};
  auto images = loader_.devices_->Make(work);
  if (!images.ok()) return images.status();
  version.devices = *std::move(images);
  return absl::OkStatus();
}

void LoadJob::Park(ResidentVersion& version) {
  if (loader_.parking_ == nullptr) return;
  const PhaseTimer timer(*this, "index");
  std::string warning;
  version.parked = loader_.parking_->Park(version, contents_warnings_, GpuLayout(), warning);
  if (!warning.empty()) report_.warnings.push_back(std::move(warning));
}

std::string LoadJob::GpuLayout() const {
  if (targets_.gpus.empty()) return "";
  const std::string policy = DevicePolicyText(request_.policy.device);
  if (!targets_.segments) return policy;
  return absl::StrCat(policy, " segments ", targets_.limits.max_segment_bytes, " by ",
                      targets_.limits.granularity);
}

bool LoadJob::AdoptIndex(ResidentVersion& version) {
  if (loader_.restored_ == nullptr) return false;
  IndexIdentity wanted{request_.model,
                       request_.version,
                       version.manifest->digest,
                       request_.policy.residency,
                       {},
                       loader_.parking_->builder(),
                       GpuLayout()};
  for (const Slot& slot : slots_) wanted.contents.push_back(slot.key.content);
  auto index = loader_.restored_->TakeIndex(wanted);
  if (!index.has_value()) return false;
  if (!targets_.gpus.empty()) {
    const auto mapped =
        ReadOnlyMapping::MapSealed(index->memory.fd, index->memory.bytes, Align::kPage);
    if (!mapped.ok()) return false;  // No address space: the one that is made anew says so.
    auto plan = PlanOfIndex(mapped->bytes());
    if (!plan.ok()) {
      distrusted_ = std::string(plan.status().message());
      return false;
    }
    plan_ = *std::move(plan);
  }
  version.index = std::move(index->memory);
  version.eager = std::move(index->facts.eager);
  version.format = std::move(index->facts.format);
  version.tensor_count = index->facts.tensor_count;
  version.tensor_bytes = index->facts.tensor_bytes;
  contents_warnings_ = std::move(index->facts.warnings);
  report_.restored_index = true;
  return true;
}

absl::Status LoadJob::MakeIndex(ResidentVersion& version) {
  std::vector<ContentsIndexer::File> files;
  std::vector<std::string> paths;
  for (size_t i = 0; i < file_slots_.size(); ++i) {
    const HostRegion& region = *slots_[file_slots_[i]].region;
    files.push_back({opened_.manifest->files[i].path, &region.fd(), region.data()});
    paths.push_back(opened_.manifest->files[i].path);
  }
  auto contents = ReadContents(dir_, loader_.indexer_, files, file_slots_, *cancel_);
  if (cancel_->cancelled()) return Cancelled();
  if (!contents.ok()) return contents.status();
  contents_warnings_ = std::move(contents->warnings);
  version.eager = std::move(contents->eager);
  if (!targets_.gpus.empty()) {
    auto plan = PlanDevice(request_.policy.device, contents->components, paths, file_slots_,
                           targets_.segments, targets_.limits, contents_warnings_);
    if (!plan.ok()) return AtPath(plan.status(), dir_);
    plan_ = *std::move(plan);
  }
  auto index = loader_.index_builder_.Build(version, contents->components, plan_);
  if (!index.ok()) return AtPath(index.status(), dir_);
  version.index = *std::move(index);
  version.format = contents->format;
  version.tensor_count = contents->tensor_count;
  version.tensor_bytes = contents->tensor_bytes;
  WarnOfRequirements(contents->components);
  return absl::OkStatus();
}

void LoadJob::WarnOfRequirements(const std::vector<ComponentIndex>& components) {
  for (std::string& text : UnknownRequirements(requirements_)) {
    contents_warnings_.push_back(std::move(text));
  }
  for (const ComponentIndex& component : components) {
    const std::string& file = component.index.files().front();
    if (component.index.format() != "tensorrt" || IsBound(requirements_, file)) continue;
    contents_warnings_.push_back(
        absl::StrCat(Printable(file),
                     ": nothing says for which TensorRT, GPU and platform this "
                     "plan was built, so nothing was compared (publish it with "
                     "--require tensorrt=X.Y.Z and so on)"));
  }
}

}  // namespace modelhost
