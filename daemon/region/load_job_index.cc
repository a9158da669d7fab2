// The end of a load: the index, taken from the fd store or made, and all of it left there.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/region/load_job.h"
#include "daemon/region/version_contents.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

absl::StatusOr<std::shared_ptr<const ResidentVersion>> LoadJob::Index() {
  if (cancel_->cancelled()) return Cancelled();
  progress_.Begin("index", 0);
  auto version = std::make_shared<ResidentVersion>();
  {
    const PhaseTimer timer(*this, "index");
    version->manifest = opened_.manifest;
    version->file_regions = file_slots_;
    for (const Slot& slot : slots_) version->regions.push_back(slot.region);
    version->requirements = Flatten(requirements_);
    version->compared = Compared(requirements_);
    if (!AdoptIndex(*version)) {
      if (auto status = MakeIndex(*version); !status.ok()) return status;
    }
    FaultPoint("load.indexed");
    std::vector<uint32_t> counted = version->eager;
    if (counted.empty()) counted = file_slots_;
    version->tier = HostTier::kPinned;
    for (const uint32_t region : counted) {
      version->tier = std::min(version->tier, version->regions[region]->tier());
    }
    if (loader_.parking_ != nullptr) {
      std::string warning;
      version->parked = loader_.parking_->Park(*version, report_.warnings, warning);
      if (!warning.empty()) report_.warnings.push_back(std::move(warning));
    }
  }
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

bool LoadJob::AdoptIndex(ResidentVersion& version) {
  if (loader_.restored_ == nullptr) return false;
  IndexIdentity wanted{request_.model,
                       request_.version,
                       version.manifest->digest,
                       request_.policy.residency,
                       {},
                       loader_.parking_->builder()};
  for (const Slot& slot : slots_) wanted.contents.push_back(slot.key.content);
  auto index = loader_.restored_->TakeIndex(wanted);
  if (!index.has_value()) return false;
  version.index = std::move(index->memory);
  version.eager = std::move(index->facts.eager);
  version.format = std::move(index->facts.format);
  version.tensor_count = index->facts.tensor_count;
  version.tensor_bytes = index->facts.tensor_bytes;
  report_.warnings = std::move(index->facts.warnings);
  report_.restored_index = true;
  return true;
}

absl::Status LoadJob::MakeIndex(ResidentVersion& version) {
  std::vector<ContentsIndexer::File> files;
  for (size_t i = 0; i < file_slots_.size(); ++i) {
    const HostRegion& region = *slots_[file_slots_[i]].region;
    files.push_back({opened_.manifest->files[i].path, &region.fd(), region.data()});
  }
  auto contents = ReadContents(dir_, loader_.indexer_, files, file_slots_, *cancel_);
  if (cancel_->cancelled()) return Cancelled();
  if (!contents.ok()) return contents.status();
  version.eager = std::move(contents->eager);
  auto index = loader_.index_builder_.Build(version, contents->components, DevicePlan{});
  if (!index.ok()) return AtPath(index.status(), dir_);
  version.index = *std::move(index);
  version.format = contents->format;
  version.tensor_count = contents->tensor_count;
  version.tensor_bytes = contents->tensor_bytes;
  report_.warnings = std::move(contents->warnings);
  WarnOfRequirements(contents->components);
  return absl::OkStatus();
}

void LoadJob::WarnOfRequirements(const std::vector<ComponentIndex>& components) {
  for (std::string& text : UnknownRequirements(requirements_)) {
    report_.warnings.push_back(std::move(text));
  }
  for (const ComponentIndex& component : components) {
    const std::string& file = component.index.files().front();
    if (component.index.format() != "tensorrt" || IsBound(requirements_, file)) continue;
    report_.warnings.push_back(
        absl::StrCat(Printable(file),
                     ": nothing says for which TensorRT, GPU and platform this "
                     "plan was built, so nothing was compared (publish it with "
                     "--require tensorrt=X.Y.Z and so on)"));
  }
}

}  // namespace modelhost
