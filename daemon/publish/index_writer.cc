#include "daemon/publish/index_writer.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <compare>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "daemon/platform/errno_status.h"
#include "daemon/publish/device_table.h"
#include "proto/abi/version_index.h"

namespace modelhost {
namespace {

constexpr uint64_t kMaxCount = std::numeric_limits<uint32_t>::max() - 1;
constexpr int kMaxAlignmentLog2 = 21;  // 2 MiB: regions are mapped at that.

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

// A part of the string table. The names of tensors are between two of them, written in place: what
// every reader needs is before, metadata after. Sizes are checked before anything is made of them
// (CheckCounts).
class Strings {
 public:
  abi::StringRef Add(std::string_view text) {
    const abi::StringRef ref{static_cast<uint32_t>(text_.size()),
                             static_cast<uint32_t>(text.size())};
    text_.append(text);
    text_.push_back('\0');
    return ref;
  }

  // One copy of a text that many entries have. `text` outlives this object.
  abi::StringRef Share(std::string_view text) {
    const auto [at, is_new] = shared_.try_emplace(text);
    if (is_new) at->second = Add(text);
    return at->second;
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::unordered_map<std::string_view, abi::StringRef> shared_;
};

// A tensor's place among all: what the sort needs, and nothing else.
struct Place {
  std::string_view name;
  uint32_t component = 0;  // Number in the index; components are sorted by name.
  uint32_t number = 0;     // In its component.
};

bool Before(const Place& a, const Place& b) {
  if (const auto order = a.name <=> b.name; order != 0) return order < 0;
  return a.component < b.component;
}

class Layout {
 public:
  Layout(const ResidentVersion& version, const std::vector<ComponentIndex>& components,
         const DevicePlan& plan)
      : version_(version), manifest_(*version.manifest), plan_(plan) {
    for (const ComponentIndex& component : components) components_.push_back(&component);
    std::ranges::sort(components_, {},
                      [](const ComponentIndex* c) -> const std::string& { return c->name; });
  }

  absl::StatusOr<SealedRegion> Build() {
    for (auto step :
         {&Layout::CheckParts, &Layout::Sort, &Layout::FillSmallTables, &Layout::CheckCounts}) {
      if (auto status = (this->*step)(); !status.ok()) return status;
    }
    return Write();
  }

 private:
  // The big tables, in the memory of the index itself.
  struct Big {
    abi::TensorEntry* tensors;
    abi::Bucket* buckets;
    char* names;
    abi::HashKey key;
  };

  std::string Name() const { return absl::StrCat(manifest_.model, "@", manifest_.version); }

  absl::Status CheckParts();
  absl::Status Sort();
  void AddDims(std::span<const int64_t> dims);
  absl::Status FillSmallTables();
  void FillMetadata();
  absl::Status CheckCounts();
  absl::StatusOr<SealedRegion> Write();
  absl::Status WriteTensors(const Big& big);
  absl::StatusOr<abi::TensorEntry> Tensor(const Place& place, const TensorInfo& info);

  const ResidentVersion& version_;
  const Manifest& manifest_;
  const DevicePlan& plan_;
  DeviceTable devices_;
  std::vector<const ComponentIndex*> components_;  // By name: the order of the index.
  // Of each component's files(): their number in the manifest; kNone when it is not there.
  std::vector<std::vector<uint32_t>> file_numbers_;
  std::vector<bool> eager_;  // By region.

  std::vector<Place> places_;  // All tensors, sorted.
  uint64_t bucket_count_ = 0;
  // The dims table: shapes and strides, each once, and where. The keys are in the components.
  std::vector<int64_t> dims_;
  absl::flat_hash_map<absl::Span<const int64_t>, uint32_t> dims_at_;
  uint64_t name_bytes_ = 0;  // Of tensors, with the NULs.

  std::vector<abi::FileEntry> files_;
  std::vector<abi::RegionEntry> regions_;
  std::vector<abi::ComponentEntry> component_entries_;
  std::vector<abi::MetadataEntry> metadata_;
  Strings strings_;
  Strings metadata_strings_;
  abi::StringRef format_{};
};

absl::Status Layout::CheckParts() {
  const auto broken = [&](absl::string_view why) {
    return absl::InternalError(absl::StrCat("index of ", Name(), ": ", why));
  };
  if (version_.file_regions.size() != manifest_.files.size()) {
    return broken("not every file has a region");
  }
  for (const uint32_t region : version_.file_regions) {
    if (region >= version_.regions.size()) return broken("a file without a region");
  }
  eager_.resize(version_.regions.size());
  for (const uint32_t region : version_.eager) {
    if (region >= version_.regions.size()) return broken("an unknown region is eager");
    eager_[region] = true;
  }
  if (const auto status = devices_.Init(plan_, version_); !status.ok()) {
    return broken(status.message());
  }
  if (!std::ranges::is_sorted(manifest_.files, {}, &ManifestFile::path)) {
    return broken("the manifest's files are not sorted");
  }
  for (const ComponentIndex* component : components_) {
    std::vector<uint32_t>& numbers = file_numbers_.emplace_back();
    for (const std::string& file : component->index.files()) {
      const auto at = std::ranges::lower_bound(manifest_.files, file, {}, &ManifestFile::path);
      const bool found = at != manifest_.files.end() && at->path == file;
      numbers.push_back(found ? static_cast<uint32_t>(at - manifest_.files.begin()) : abi::kNone);
    }
  }
  return absl::OkStatus();
}

absl::Status Layout::Sort() {
  uint64_t count = 0;
  for (const ComponentIndex* component : components_) count += component->index.size();
  if (count > kMaxCount) {
    return absl::ResourceExhaustedError(
        absl::StrCat("index of ", Name(), ": ", count, " tensors, at most ", kMaxCount, " fit"));
  }
  // At most half full, so that a name that is not there is known after a step or two.
  if (count != 0) bucket_count_ = std::bit_ceil(count * 2);
  places_.reserve(count);
  for (uint32_t c = 0; c < components_.size(); ++c) {
    const TensorIndex& index = components_[c]->index;
    for (uint32_t i = 0; i < index.size(); ++i) {
      const TensorInfo info = index.at(i);
      places_.push_back({info.name, c, i});
      name_bytes_ += info.name.size() + 1;
      AddDims(info.shape);
      AddDims(info.strides);
      if (!info.mappable) strings_.Share(info.reason);
    }
  }
  // Many writers store tensors by name already.
  if (!std::ranges::is_sorted(places_, Before)) std::ranges::sort(places_, Before);
  const auto twice = std::ranges::adjacent_find(
      places_, [](const Place& a, const Place& b) { return !Before(a, b) && !Before(b, a); });
  if (twice != places_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("index of ", Name(), ": tensor ",
                                                   View(twice->name), " is twice in component ",
                                                   components_[twice->component]->name));
  }
  return absl::OkStatus();
}

void Layout::AddDims(std::span<const int64_t> dims) {
  // Past the limit only the size counts: CheckCounts refuses it.
  const auto at = static_cast<uint32_t>(dims_.size());
  const auto [place, is_new] = dims_at_.try_emplace({dims.data(), dims.size()}, at);
  if (is_new) dims_.insert(dims_.end(), dims.begin(), dims.end());
}

absl::StatusOr<abi::TensorEntry> Layout::Tensor(const Place& place, const TensorInfo& info) {
  const ComponentIndex& component = *components_[place.component];
  const auto bad = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        absl::StrCat("index of ", Name(), ": tensor ", View(info.name), ": ", why...));
  };
  if (info.file >= file_numbers_[place.component].size()) return bad("no file number ", info.file);
  const uint32_t file = file_numbers_[place.component][info.file];
  if (file == abi::kNone) {
    return bad("its file ", component.index.files()[info.file], " is not in the version");
  }
  if (info.shape.size() > abi::kMaxRank) {
    return bad(info.shape.size(), " dimensions, at most ", abi::kMaxRank, " fit");
  }
  if (!info.strides.empty() && info.strides.size() != info.shape.size()) {
    return bad(info.strides.size(), " strides for ", info.shape.size(), " dimensions");
  }
  abi::TensorEntry entry{};
  entry.region_offset = info.offset;
  entry.nbytes = info.nbytes;
  entry.device_segment = abi::kNone;
  entry.region = version_.file_regions[file];
  entry.file = file;
  entry.component = place.component;
  entry.dtype = static_cast<uint16_t>(info.dtype);
  entry.rank = static_cast<uint16_t>(info.shape.size());
  entry.strides = abi::kNone;
  if (!info.strides.empty()) entry.flags |= abi::kTensorStrided;
  const abi::DTypeInfo* dtype = abi::FindDType(info.dtype);
  entry.block_elements = dtype == nullptr ? uint16_t{1} : dtype->block_elements;
  entry.block_bytes = dtype == nullptr ? 0 : dtype->block_bytes;
  entry.alignment_log2 =
      static_cast<uint8_t>(std::min(std::countr_zero(info.offset), kMaxAlignmentLog2));
  if (!info.mappable) {
    entry.reason = strings_.Share(info.reason);
    return entry;
  }
  const uint64_t region_bytes = version_.regions[entry.region]->bytes();
  if (info.nbytes > region_bytes || info.offset > region_bytes - info.nbytes) {
    return bad("bytes ", info.offset, " to ", info.offset, " + ", info.nbytes, " of ",
               manifest_.files[file].path, ", which has ", region_bytes);
  }
  if (!eager_[entry.region]) {
    return absl::InternalError(absl::StrCat("index of ", Name(), ": ", manifest_.files[file].path,
                                            " has tensors and is not sent with a grant"));
  }
  entry.flags |= abi::kTensorMappable;
  devices_.Place(entry);
  return entry;
}

absl::Status Layout::WriteTensors(const Big& big) {
  const auto dims_at = [&](std::span<const int64_t> dims) {
    return dims_at_.at({dims.data(), dims.size()});
  };
  const auto names_at = static_cast<uint32_t>(strings_.text().size());
  uint32_t name_at = 0;
  const size_t mask = bucket_count_ - 1;
  size_t at = 0;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    const TensorInfo info = components_[place.component]->index.at(place.number);
    auto entry = Tensor(place, info);
    if (!entry.ok()) return entry.status();
    // The memory is zero: each name has its NUL.
    std::ranges::copy(info.name, big.names + name_at);
    entry->name = {names_at + name_at, static_cast<uint32_t>(info.name.size())};
    name_at += static_cast<uint32_t>(info.name.size() + 1);
    entry->shape = dims_at(info.shape);
    if (!info.strides.empty()) entry->strides = dims_at(info.strides);
    big.tensors[i] = *entry;
    const uint32_t hash = abi::HashName(big.key, info.name);
    // Components that have the same name: each goes on where the one before ended.
    if (i == 0 || places_[i - 1].name != place.name) at = hash & mask;
    while (big.buckets[at].number != 0) at = (at + 1) & mask;
    big.buckets[at] = {hash, static_cast<uint32_t>(i + 1)};
  }
  if (const auto status = devices_.CheckAllPlaced(); !status.ok()) {
    return absl::InternalError(absl::StrCat("index of ", Name(), ": ", status.message()));
  }
  return absl::OkStatus();
}

absl::Status Layout::FillSmallTables() {
  for (size_t i = 0; i < manifest_.files.size(); ++i) {
    const ManifestFile& file = manifest_.files[i];
    abi::FileEntry entry{};
    entry.path = strings_.Add(file.path);
    entry.role = strings_.Share(file.role);
    entry.bytes = file.bytes;
    std::ranges::copy(file.sha256.bytes, entry.digest);
    entry.region = version_.file_regions[i];
    files_.push_back(entry);
  }
  for (size_t i = 0; i < version_.regions.size(); ++i) {
    const HostRegion& region = *version_.regions[i];
    abi::RegionEntry entry{};
    entry.bytes = region.bytes();
    std::ranges::copy(region.digest().bytes, entry.digest);
    entry.kind = static_cast<uint32_t>(region.kind());
    entry.eager = eager_[i] ? 1 : 0;
    regions_.push_back(entry);
  }
  std::optional<std::string_view> format;
  for (const ComponentIndex* component : components_) {
    const std::string& own = component->index.format();
    component_entries_.push_back({strings_.Add(component->name), strings_.Share(own)});
    format = !format.has_value() || *format == own ? own : std::string_view("mixed");
  }
  format_ = strings_.Share(format.value_or(""));
  FillMetadata();
  return absl::OkStatus();
}

void Layout::FillMetadata() {
  const auto with_metadata = std::ranges::count_if(
      components_,
      [](const ComponentIndex* component) { return !component->index.metadata().empty(); });
  std::vector<std::pair<std::string, std::string_view>> items;
  for (const ComponentIndex* component : components_) {
    for (const MetadataItem& item : component->index.metadata()) {
      items.emplace_back(
          with_metadata > 1 ? absl::StrCat(component->name, "/", item.key) : item.key, item.value);
    }
  }
  std::ranges::stable_sort(items, {}, &std::pair<std::string, std::string_view>::first);
  for (const auto& [key, value] : items) {
    const abi::StringRef key_ref = metadata_strings_.Add(key);
    metadata_.push_back({key_ref, metadata_strings_.Add(value)});
  }
}

absl::Status Layout::CheckCounts() {
  const auto too_many = [&](absl::string_view what) {
    return absl::ResourceExhaustedError(
        absl::StrCat("index of ", Name(), ": more than ", kMaxCount, " ", what));
  };
  if (strings_.text().size() + name_bytes_ + metadata_strings_.text().size() > kMaxCount) {
    return too_many("bytes of names and text");
  }
  if (dims_.size() > kMaxCount) return too_many("dimensions in all");
  if (files_.size() > kMaxCount || metadata_.size() > kMaxCount) {
    return too_many("files or metadata items");
  }
  if (devices_.segments().size() > kMaxCount) return too_many("device segments");
  return absl::OkStatus();
}

absl::StatusOr<SealedRegion> Layout::Write() {
  abi::IndexHeader header{};
  uint64_t end = sizeof(header);
  const auto place = [&](uint64_t count, uint64_t entry_bytes) {
    const abi::TableRef ref{end, count};
    end += (count * entry_bytes + 7) / 8 * 8;
    return ref;
  };
  header.magic = abi::kIndexMagic;
  header.abi_version = abi::kIndexAbi;
  header.header_bytes = sizeof(header);
  header.version = manifest_.version;
  manifest_.model.copy(header.model, abi::kMaxNameLength);
  std::ranges::copy(manifest_.digest.bytes, header.digest);
  header.format = format_;
  if (::getrandom(&header.hash_key, sizeof(header.hash_key), 0) != sizeof(header.hash_key)) {
    return ErrnoStatus(errno, absl::StrCat("index of ", Name(), ": random numbers"));
  }
  // What every attach reads comes first and close together: each page of it costs a fault.
  header.components = place(component_entries_.size(), sizeof(abi::ComponentEntry));
  header.regions = place(regions_.size(), sizeof(abi::RegionEntry));
  header.files = place(files_.size(), sizeof(abi::FileEntry));
  header.dims = place(dims_.size(), sizeof(int64_t));
  const uint64_t metadata_text = strings_.text().size() + name_bytes_;
  header.strings = place(metadata_text + metadata_strings_.text().size(), 1);
  header.tensors = place(places_.size(), sizeof(abi::TensorEntry));
  header.buckets = place(bucket_count_, sizeof(abi::Bucket));
  header.metadata = place(metadata_.size(), sizeof(abi::MetadataEntry));
  header.device_segments = place(devices_.segments().size(), sizeof(abi::DeviceSegmentEntry));
  header.index_bytes = end;
  for (abi::MetadataEntry& item : metadata_) {
    item.key.offset += static_cast<uint32_t>(metadata_text);
    item.value.offset += static_cast<uint32_t>(metadata_text);
  }

  auto memory = WritableRegion::Create("modelhost-index", end, HugePages::kOff);
  if (!memory.ok()) return ToStatus(memory.error(), absl::StrCat("index of ", Name()));
  std::byte* const base = memory->bytes().data();
  const auto copy = [&](const abi::TableRef& ref, const auto& table) {
    if (!table.empty()) {
      std::memcpy(base + ref.offset, table.data(), table.size() * sizeof(table[0]));
    }
  };
  std::memcpy(base, &header, sizeof(header));
  copy(header.dims, dims_);
  copy(header.files, files_);
  copy(header.regions, regions_);
  copy(header.components, component_entries_);
  copy(header.metadata, metadata_);
  copy(header.device_segments, devices_.segments());
  const auto copy_text = [&](uint64_t at, const std::string& text) {
    std::memcpy(base + header.strings.offset + at, text.data(), text.size());
  };
  copy_text(0, strings_.text());
  copy_text(metadata_text, metadata_strings_.text());
  // Fresh pages are dear: the big tables are made where they stay.
  const Big big{reinterpret_cast<abi::TensorEntry*>(base + header.tensors.offset),
                reinterpret_cast<abi::Bucket*>(base + header.buckets.offset),
                reinterpret_cast<char*>(base + header.strings.offset + strings_.text().size()),
                header.hash_key};
  if (auto status = WriteTensors(big); !status.ok()) return status;
  auto sealed = std::move(*memory).Seal();
  if (!sealed.ok()) return ToStatus(sealed.error(), absl::StrCat("index of ", Name()));
  return *std::move(sealed);
}

}  // namespace

absl::StatusOr<SealedRegion> IndexWriter::Build(const ResidentVersion& version,
                                                const std::vector<ComponentIndex>& components,
                                                const DevicePlan& plan) {
  return Layout(version, components, plan).Build();
}

}  // namespace modelhost
