#include "client/src/index_reader.h"

#include <algorithm>

#include "client/src/near_names.h"
#include "client/src/other_abi.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

constexpr size_t kFirstBytes = size_t{64} << 10;

template <typename T>
std::span<const T> Table(std::span<const std::byte> bytes, const abi::TableRef& ref) {
  return {reinterpret_cast<const T*>(bytes.data() + ref.offset), static_cast<size_t>(ref.count)};
}

// Multiplies and adds numbers that must stay below 2^63; `ok` stays false once they did not.
struct Checked {
  bool ok = true;
  uint64_t Mul(uint64_t a, uint64_t b) {
    uint64_t out = 0;
    if (__builtin_mul_overflow(a, b, &out) || out > INT64_MAX) ok = false;
    return out;
  }
  uint64_t Add(uint64_t a, uint64_t b) {
    uint64_t out = 0;
    if (__builtin_add_overflow(a, b, &out) || out > INT64_MAX) ok = false;
    return out;
  }
};

// The bytes that a reader of this shape may touch from the first one on, so that no caller who
// trusts the shape leaves the range. False: they cannot be counted. A type that this build does not
// know reaches nothing that we could count.
bool BytesReached(const IndexTensor& tensor, uint64_t* bytes) {
  const abi::TensorEntry& entry = *tensor.entry;
  const abi::DTypeInfo* info = abi::FindDType(static_cast<abi::DType>(entry.dtype));
  Checked checked;
  uint64_t elements = 1;
  bool empty = false;
  for (uint16_t i = 0; i < entry.rank; ++i) empty = empty || tensor.shape[i] == 0;
  *bytes = 0;
  if (info == nullptr || empty) return true;
  if (tensor.strides != nullptr) {
    uint64_t last = 0;
    for (uint16_t i = 0; i < entry.rank; ++i) {
      if (tensor.strides[i] < 0) return false;
      last = checked.Add(last, checked.Mul(static_cast<uint64_t>(tensor.shape[i] - 1),
                                           static_cast<uint64_t>(tensor.strides[i])));
    }
    elements = checked.Add(last, 1);
  } else {
    for (uint16_t i = 0; i < entry.rank; ++i) {
      elements = checked.Mul(elements, static_cast<uint64_t>(tensor.shape[i]));
    }
  }
  if (info->block_bytes != 0) {
    const uint64_t blocks =
        elements / info->block_elements + (elements % info->block_elements == 0 ? 0 : 1);
    *bytes = checked.Mul(blocks, info->block_bytes);
  } else {
    *bytes = checked.Add(checked.Mul(elements, info->bits), 7) / 8;
  }
  return checked.ok;
}

}  // namespace

Result<IndexReader> IndexReader::Open(std::span<const std::byte> bytes) {
  const auto broken = [&](const char* why) {
    return Error{Code::kDataLoss,
                 "version index of " + std::to_string(bytes.size()) + " bytes: " + why, 0};
  };
  if (bytes.size() < sizeof(abi::IndexHeader)) return broken("shorter than its header");
  IndexReader reader;
  // The small tables are all here (proto/abi/version_index.h).
  Prefault(bytes.first(std::min(bytes.size(), kFirstBytes)));
  reader.header_ = reinterpret_cast<const abi::IndexHeader*>(bytes.data());
  const abi::IndexHeader& header = *reader.header_;
  if (header.magic != abi::kIndexMagic) return broken("not an index (bad magic)");
  if (header.abi_version != abi::kIndexAbi) {
    return OtherAbi("version index:", header.abi_version, abi::kIndexAbi);
  }
  if (!abi::IndexFits(header, bytes.size())) return broken("its tables do not fit in it");
  // Numbers of entries are 32 bits wide in the tables themselves.
  if (header.tensors.count >= abi::kNone || header.regions.count >= abi::kNone ||
      header.device_segments.count >= abi::kNone) {
    return broken("too many entries");
  }
  reader.tensors_ = Table<abi::TensorEntry>(bytes, header.tensors);
  reader.buckets_ = Table<abi::Bucket>(bytes, header.buckets);
  reader.dims_ = Table<int64_t>(bytes, header.dims);
  reader.files_ = Table<abi::FileEntry>(bytes, header.files);
  reader.regions_ = Table<abi::RegionEntry>(bytes, header.regions);
  reader.segments_ = Table<abi::DeviceSegmentEntry>(bytes, header.device_segments);
  reader.components_ = Table<abi::ComponentEntry>(bytes, header.components);
  reader.metadata_ = Table<abi::MetadataEntry>(bytes, header.metadata);
  const auto strings = Table<char>(bytes, header.strings);
  reader.strings_ = {strings.data(), strings.size()};
  return reader;
}

bool IndexReader::Text(const abi::StringRef& ref, std::string_view* text) const {
  *text = std::string_view("");
  if (ref.length == 0) return true;  // Wherever it points.
  const uint64_t end = uint64_t{ref.offset} + ref.length;
  if (end >= strings_.size() || strings_[end] != '\0') return false;
  *text = strings_.substr(ref.offset, ref.length);
  return true;
}

std::string_view IndexReader::format() const {
  std::string_view text;
  return Text(header_->format, &text) ? text : std::string_view("");
}

bool IndexReader::NameOf(size_t number, std::string_view* name) const {
  return number < tensors_.size() && Text(tensors_[number].name, name);
}

// Probes for `name`, in `component` when that is given. Without one, a second entry of the name
// makes it ambiguous; the first by number is what comes back, whatever the order of the probes.
Find IndexReader::FindBare(std::string_view name, const std::string_view* component,
                           size_t* number) const {
  if (buckets_.empty()) return Find::kMissing;
  const size_t mask = buckets_.size() - 1;
  const uint32_t hash = abi::HashName(header_->hash_key, name);
  size_t at = hash & mask;
  size_t found = 0;
  for (size_t probes = 0; probes < buckets_.size(); ++probes, at = (at + 1) & mask) {
    if (buckets_[at].number == 0) break;
    if (buckets_[at].hash != hash) continue;
    const size_t candidate = buckets_[at].number - 1;
    std::string_view text;
    if (!NameOf(candidate, &text)) return Find::kBroken;
    if (text != name) continue;
    if (component != nullptr) {
      std::string_view own;
      std::string_view format;
      if (!Component(tensors_[candidate].component, &own, &format)) return Find::kBroken;
      if (own != *component) continue;
    }
    *number = found == 0 ? candidate : std::min(*number, candidate);
    if (++found > 1 || component != nullptr) break;
  }
  if (found == 0) return Find::kMissing;
  return found == 1 ? Find::kFound : Find::kAmbiguous;
}

Find IndexReader::FindTensor(std::string_view name, size_t* number) const {
  const Find bare = FindBare(name, nullptr, number);
  if (bare != Find::kMissing) return bare;
  // Few components, and names with many slashes: ask which component is a prefix, not which slash
  // might be the border.
  for (size_t i = 0; i < components_.size(); ++i) {
    std::string_view component;
    std::string_view format;
    if (!Component(i, &component, &format)) return Find::kBroken;
    if (name.size() <= component.size() || !name.starts_with(component) ||
        name[component.size()] != '/') {
      continue;
    }
    const Find find = FindBare(name.substr(component.size() + 1), &component, number);
    if (find != Find::kMissing) return find;
  }
  return Find::kMissing;
}

bool IndexReader::DeviceFits(const abi::TensorEntry& entry) const {
  if ((entry.flags & abi::kTensorOnDevice) == 0 || entry.device_segment == abi::kNone) return true;
  if (entry.device_segment >= segments_.size()) return false;
  const abi::DeviceSegmentEntry& segment = segments_[entry.device_segment];
  return segment.region == entry.region && entry.device_offset <= segment.bytes &&
         entry.nbytes <= segment.bytes - entry.device_offset;
}

bool IndexReader::Tensor(size_t number, IndexTensor* tensor) const {
  if (number >= tensors_.size()) return false;
  const abi::TensorEntry& entry = tensors_[number];
  tensor->entry = &entry;
  std::string_view format;
  if (!Text(entry.name, &tensor->name) || !Text(entry.reason, &tensor->reason) ||
      !Component(entry.component, &tensor->component, &format)) {
    return false;
  }
  if (entry.file >= files_.size() || !Text(files_[entry.file].path, &tensor->file)) return false;
  const auto fits = [&](uint32_t first) {
    return first <= dims_.size() && entry.rank <= dims_.size() - first;
  };
  if (entry.rank > abi::kMaxRank || !fits(entry.shape)) return false;
  tensor->shape = dims_.data() + entry.shape;
  for (uint16_t i = 0; i < entry.rank; ++i) {
    if (tensor->shape[i] < 0) return false;
  }
  tensor->strides = nullptr;
  if ((entry.flags & abi::kTensorStrided) != 0 && entry.strides != abi::kNone) {
    if (!fits(entry.strides)) return false;
    tensor->strides = dims_.data() + entry.strides;
  }
  if ((entry.flags & abi::kTensorMappable) == 0) return (entry.flags & abi::kTensorOnDevice) == 0;
  if (entry.region >= regions_.size()) return false;
  const uint64_t room = regions_[entry.region].bytes;
  uint64_t reached = 0;
  return entry.region_offset <= room && entry.nbytes <= room - entry.region_offset &&
         BytesReached(*tensor, &reached) && reached <= entry.nbytes && DeviceFits(entry);
}

Find IndexReader::FindFile(std::string_view path, size_t* number) const {
  size_t first = 0;
  size_t last = files_.size();
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    std::string_view text;
    if (!Text(files_[middle].path, &text)) return Find::kBroken;
    if (text == path) {
      *number = middle;
      return Find::kFound;
    }
    (text < path ? first : last) = text < path ? middle + 1 : middle;
  }
  return Find::kMissing;
}

bool IndexReader::File(size_t number, IndexFile* file) const {
  if (number >= files_.size()) return false;
  const abi::FileEntry& entry = files_[number];
  file->entry = &entry;
  return Text(entry.path, &file->path) && Text(entry.role, &file->role) &&
         entry.region < regions_.size() && entry.bytes == regions_[entry.region].bytes;
}

Find IndexReader::FindMetadata(std::string_view key, size_t* number) const {
  size_t first = 0;
  size_t last = metadata_.size();
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    std::string_view text;
    if (!Text(metadata_[middle].key, &text)) return Find::kBroken;
    if (text == key) {
      *number = middle;
      return Find::kFound;
    }
    (text < key ? first : last) = text < key ? middle + 1 : middle;
  }
  return Find::kMissing;
}

bool IndexReader::Metadata(size_t number, std::string_view* key, std::string_view* value) const {
  return number < metadata_.size() && Text(metadata_[number].key, key) &&
         Text(metadata_[number].value, value);
}

bool IndexReader::Component(size_t number, std::string_view* name, std::string_view* format) const {
  return number < components_.size() && Text(components_[number].name, name) &&
         Text(components_[number].format, format);
}

size_t IndexReader::LowerBound(std::string_view name) const {
  size_t first = 0;
  size_t last = tensors_.size();
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    std::string_view text;
    if (!NameOf(middle, &text)) return first;
    (text < name ? first : last) = text < name ? middle + 1 : middle;
  }
  return first;
}

size_t IndexReader::PlaceOfFile(std::string_view path) const {
  size_t first = 0;
  size_t last = files_.size();
  while (first < last) {
    const size_t middle = first + (last - first) / 2;
    std::string_view text;
    if (!Text(files_[middle].path, &text)) return first;
    (text < path ? first : last) = text < path ? middle + 1 : middle;
  }
  return first;
}

std::string IndexReader::ExplainTensor(std::string_view name, Find find) const {
  const std::string what = "tensor '" + std::string(name.substr(0, 160)) + "': ";
  if (find == Find::kBroken) return what + "the version's index is broken (report this)";
  if (find == Find::kAmbiguous) {
    std::string text = what + "several components have it (say";
    size_t shown = 0;
    for (size_t i = LowerBound(name); i < tensors_.size() && shown < 4; ++i) {
      IndexTensor tensor;
      if (!Tensor(i, &tensor) || tensor.name != name) break;
      text += (shown++ == 0 ? " " : " or ") + std::string(tensor.component) + "/" +
              std::string(tensor.name);
    }
    return text + ")";
  }
  return what + "not among the " + std::to_string(tensors_.size()) + " of this version" +
         DidYouMean(name, tensors_.size(), LowerBound(name), [this](size_t i) {
           std::string_view text;
           return NameOf(i, &text) ? text : std::string_view();
         });
}

std::string IndexReader::ExplainFile(std::string_view path, Find find) const {
  const std::string what = "file '" + std::string(path.substr(0, 160)) + "': ";
  if (find == Find::kBroken) return what + "the version's index is broken (report this)";
  return what + "not among the " + std::to_string(files_.size()) + " of this version" +
         DidYouMean(path, files_.size(), PlaceOfFile(path), [this](size_t i) {
           IndexFile file;
           return File(i, &file) ? file.path : std::string_view();
         });
}

}  // namespace modelhost
