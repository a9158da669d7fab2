#include "client/src/model.h"

#include <cstdio>
#include <cstring>

#include "client/src/reference.h"

namespace modelhost {
namespace {

// What a receiver's checks found wrong with bytes that the daemon sent. A limit of this process
// keeps its code; everything else means that the bytes are not what they were said to be.
Error AsDataLoss(Error error, const std::string& what) {
  const bool kept = error.code == Code::kResourceExhausted || error.code == Code::kUnimplemented;
  if (!kept) error.code = Code::kDataLoss;
  error.text = what + ": " + error.text;
  return error;
}

std::string Hex(const uint8_t (&digest)[abi::kDigestBytes]) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * sizeof(digest));
  for (const uint8_t byte : digest) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<Model>> Model::Create(const abi::Granted& head, const UniqueFd& index) {
  std::unique_ptr<Model> model(new Model());
  model->model_ = NameIn(head.model);
  model->label_ = NameIn(head.label);
  model->version_ = head.version;
  model->digest_hex_ = Hex(head.digest);
  auto mapping = ReadOnlyMapping::MapSealed(index, head.index_bytes, Align::kPage);
  if (!mapping.ok()) return AsDataLoss(std::move(mapping).error(), model->Name() + ": index");
  model->index_mapping_ = *std::move(mapping);
  auto reader = IndexReader::Open(model->index_mapping_.bytes());
  if (!reader.ok()) return AsDataLoss(std::move(reader).error(), model->Name());
  model->index_ = *std::move(reader);
  const abi::IndexHeader& header = model->index_.header();
  if (NameIn(header.model) != model->model_ || header.version != head.version ||
      std::memcmp(header.digest, head.digest, sizeof(head.digest)) != 0) {
    return Error{Code::kDataLoss, model->Name() + ": the index that came is of another version", 0};
  }
  model->regions_ = std::make_unique<Region[]>(model->index_.regions().size());
  return model;
}

std::string Model::Name() const { return model_ + "@" + std::to_string(version_); }

// By a file that has its bytes: people know those.
std::string Model::RegionName(uint32_t region) const {
  for (size_t i = 0; i < index_.file_count(); ++i) {
    IndexFile file;
    if (index_.File(i, &file) && file.entry->region == region) {
      return Name() + ": " + std::string(file.path);
    }
  }
  return Name() + ": region " + std::to_string(region);
}

Result<void> Model::MapRegion(const abi::RegionRef& ref, const UniqueFd& fd) {
  Region& region = regions_[ref.region];
  auto mapping = static_cast<abi::RegionKind>(ref.kind) == abi::RegionKind::kSealed
                     ? ReadOnlyMapping::MapSealed(fd, ref.bytes)
                     : ReadOnlyMapping::MapFile(fd, ref.bytes);
  if (!mapping.ok()) return AsDataLoss(std::move(mapping).error(), RegionName(ref.region));
  region.mapping = *std::move(mapping);
  region.mapped.store(true, std::memory_order_release);
  return {};
}

Result<void> Model::CheckRef(const abi::RegionRef& ref) const {
  const auto regions = index_.regions();
  if (ref.region >= regions.size()) {
    return Error{Code::kInternal,
                 Name() + ": a region " + std::to_string(ref.region) + " came, but the index has " +
                     std::to_string(regions.size()),
                 0};
  }
  const abi::RegionEntry& entry = regions[ref.region];
  const bool known = ref.kind == static_cast<uint32_t>(abi::RegionKind::kFile) ||
                     ref.kind == static_cast<uint32_t>(abi::RegionKind::kSealed);
  if (!known || entry.kind != ref.kind || entry.bytes != ref.bytes) {
    return Error{Code::kInternal,
                 RegionName(ref.region) + ": the descriptor that came is not what the index says",
                 0};
  }
  return {};
}

Result<void> Model::AddRegion(const abi::RegionRef& ref, const UniqueFd& fd) {
  if (auto checked = CheckRef(ref); !checked.ok()) return checked;
  if (regions_[ref.region].mapped.load(std::memory_order_relaxed)) {
    return Error{Code::kInternal, RegionName(ref.region) + ": came twice in one grant", 0};
  }
  return MapRegion(ref, fd);
}

Result<void> Model::CheckComplete() const {
  const auto regions = index_.regions();
  for (uint32_t i = 0; i < regions.size(); ++i) {
    if (regions[i].eager != 0 && !regions_[i].mapped.load(std::memory_order_relaxed)) {
      return Error{Code::kInternal, RegionName(i) + ": did not come with the grant", 0};
    }
  }
  return {};
}

const std::byte* Model::RegionData(uint32_t region) const {
  const Region& slot = regions_[region];
  return slot.mapped.load(std::memory_order_acquire) ? slot.mapping.bytes().data() : nullptr;
}

Result<void> Model::AttachDevice(const std::shared_ptr<const CudaDevice>& device, DeviceGrant grant,
                                 bool map) {
  if (grant.mode == abi::DeviceMode::kNone) {
    no_device_ = "modelhostd has no copy of it on " + device->uuid();
    return {};
  }
  auto image = CudaImage::Import(device, std::move(grant), index_, Name());
  if (!image.ok()) return std::move(image).error();
  if (map) {
    if (auto mapped = (*image)->Map(); !mapped.ok()) return mapped;
  }
  image_ = *std::move(image);
  no_device_.clear();
  return {};
}

const void* Model::DeviceData(const abi::TensorEntry& tensor) const {
  if (image_ == nullptr || (tensor.flags & abi::kTensorOnDevice) == 0 || tensor.nbytes == 0 ||
      !image_->mapped() || image_->device()->forked()) {
    return nullptr;
  }
  if (image_->mode() == abi::DeviceMode::kHostDirect) {
    const std::byte* region = RegionData(tensor.region);
    return region == nullptr ? nullptr : region + tensor.region_offset;
  }
  if (tensor.device_segment >= image_->segment_bytes().size()) return nullptr;
  const cuda::DevicePtr segment = image_->Segment(tensor.device_segment);
  if (segment == 0) return nullptr;
  // An address of the GPU's: not for the CPU to follow.
  return reinterpret_cast<const void*>(static_cast<uintptr_t>(segment + tensor.device_offset));
}

bool Model::FileOf(uint32_t region, OpenFile* file) const {
  const Region& slot = regions_[region];
  if (!slot.open.load(std::memory_order_acquire)) return false;
  file->data = slot.mapping.bytes().data();
  file->fd = slot.fd.get();
  file->path = slot.path.data();
  return true;
}

Result<void> Model::AttachFile(const abi::RegionRef& ref, UniqueFd fd) {
  if (auto checked = CheckRef(ref); !checked.ok()) return checked;
  const MutexLock lock(mutex_);
  Region& region = regions_[ref.region];
  if (region.open.load(std::memory_order_relaxed)) return {};
  if (region.mapped.load(std::memory_order_relaxed)) {
    // The bytes are there; the descriptor must be of the same length at least.
    auto again = static_cast<abi::RegionKind>(ref.kind) == abi::RegionKind::kSealed
                     ? ReadOnlyMapping::MapSealed(fd, ref.bytes)
                     : ReadOnlyMapping::MapFile(fd, ref.bytes);
    if (!again.ok()) return AsDataLoss(std::move(again).error(), RegionName(ref.region));
  } else if (auto mapped = MapRegion(ref, fd); !mapped.ok()) {
    return mapped;
  }
  region.fd = std::move(fd);
  std::snprintf(region.path.data(), region.path.size(), "/proc/self/fd/%d", region.fd.get());
  region.open.store(true, std::memory_order_release);
  return {};
}

}  // namespace modelhost
