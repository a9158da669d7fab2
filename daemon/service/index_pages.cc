#include "daemon/service/index_pages.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "daemon/service/grpc_status.h"

namespace modelhost {
namespace {

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string DigestText(std::span<const uint8_t> digest) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

}  // namespace

IndexPages::IndexPages(const FlatIndex& index, uint32_t most_tensors)
    : index_(index), most_tensors_(most_tensors == 0 ? UINT64_MAX : most_tensors) {}

absl::Status IndexPages::Set(std::string* field, std::string_view text,
                             absl::string_view what) const {
  if (!IsProtoText(View(text))) {
    return absl::FailedPreconditionError(absl::StrCat(
        what, " ", number_, " has a name that is no UTF-8 text: ", SafeText(View(text), 64),
        " (read the index that comes with the ticket instead)"));
  }
  *field = std::string(text);
  return absl::OkStatus();
}

uint64_t IndexPages::CountOf(Table table) const {
  switch (table) {
    case Table::kHead:
      return 1;
    case Table::kRegions:
      return index_.region_count();
    case Table::kFiles:
      return index_.file_count();
    case Table::kComponents:
      return index_.component_count();
    case Table::kMetadata:
      return index_.metadata_count();
    case Table::kSegments:
      return index_.segment_count();
    case Table::kTensors:
      return index_.tensor_count();
    case Table::kEnd:
      break;
  }
  return 0;
}

void IndexPages::Step() {
  ++number_;
  while (table_ != Table::kEnd && number_ >= CountOf(table_)) {
    table_ = static_cast<Table>(static_cast<int>(table_) + 1);
    number_ = 0;
  }
}

absl::StatusOr<bool> IndexPages::Next(v1::IndexPage* page) {
  page->Clear();
  if (table_ == Table::kEnd) return false;
  page_bytes_ = 0;
  while (table_ != Table::kEnd && page_bytes_ < kPageBytes &&
         static_cast<uint64_t>(page->tensors_size()) < most_tensors_) {
    if (auto added = Add(page); !added.ok()) return added;
  }
  return true;
}

absl::Status IndexPages::Add(v1::IndexPage* page) {
  switch (table_) {
    case Table::kHead: {
      v1::IndexHead* head = page->mutable_head();
      const auto format = index_.format();
      if (!format.ok()) return format.status();
      head->set_model(SafeText(View(index_.model())));
      head->set_version(index_.version());
      head->set_digest(DigestText(index_.digest()));
      head->set_format(SafeText(View(*format)));
      head->set_tensor_count(index_.tensor_count());
      break;
    }
    case Table::kRegions: {
      const FlatIndex::Region region = index_.RegionAt(number_);
      v1::IndexRegion* added = page->add_regions();
      added->set_bytes(region.bytes);
      added->set_sha256(DigestText(region.digest));
      added->set_kind(region.sealed ? "sealed" : "file");
      added->set_with_grant(region.eager);
      page_bytes_ += added->ByteSizeLong();
      break;
    }
    case Table::kFiles: {
      const auto file = index_.FileAt(number_);
      if (!file.ok()) return file.status();
      v1::IndexFile* added = page->add_files();
      if (auto set = Set(added->mutable_path(), file->path, "file"); !set.ok()) return set;
      added->set_role(SafeText(View(file->role)));
      added->set_bytes(file->bytes);
      added->set_sha256(DigestText(file->digest));
      added->set_region(file->region);
      page_bytes_ += added->ByteSizeLong();
      break;
    }
    case Table::kComponents: {
      const auto component = index_.ComponentAt(number_);
      if (!component.ok()) return component.status();
      v1::IndexComponent* added = page->add_components();
      if (auto set = Set(added->mutable_name(), component->first, "component"); !set.ok())
        return set;
      added->set_format(SafeText(View(component->second)));
      page_bytes_ += added->ByteSizeLong();
      break;
    }
    case Table::kMetadata:
      return AddMetadata(page);
    case Table::kSegments: {
      const FlatIndex::Segment segment = index_.SegmentAt(number_);
      v1::IndexSegment* added = page->add_segments();
      added->set_bytes(segment.bytes);
      added->set_region(segment.region);
      page_bytes_ += added->ByteSizeLong();
      break;
    }
    case Table::kTensors:
      return AddTensor(page);
    case Table::kEnd:
      return absl::OkStatus();
  }
  Step();
  return absl::OkStatus();
}

absl::Status IndexPages::AddMetadata(v1::IndexPage* page) {
  const auto entry = index_.MetadataAt(number_);
  if (!entry.ok()) return entry.status();
  // At least a little, so that it ends.
  const size_t room = std::max<size_t>(kPageBytes - std::min(page_bytes_, kPageBytes), 1024);
  const std::string_view piece = entry->second.substr(value_done_, room);
  v1::IndexMetadata* added = page->add_metadata();
  if (auto set = Set(added->mutable_key(), entry->first, "metadata entry"); !set.ok()) return set;
  added->set_value(piece.data(), piece.size());
  value_done_ += piece.size();
  added->set_more(value_done_ < entry->second.size());
  page_bytes_ += added->ByteSizeLong();
  if (!added->more()) {
    value_done_ = 0;
    Step();
  }
  return absl::OkStatus();
}

absl::Status IndexPages::AddTensor(v1::IndexPage* page) {
  const auto tensor = index_.TensorAt(number_);
  if (!tensor.ok()) return tensor.status();
  if (page->tensors().empty()) page->set_first_tensor(number_);
  v1::IndexTensor* added = page->add_tensors();
  if (auto set = Set(added->mutable_name(), tensor->name, "tensor"); !set.ok()) return set;
  added->set_dtype(std::string(tensor->dtype));
  *added->mutable_shape() = {tensor->shape.begin(), tensor->shape.end()};
  *added->mutable_strides() = {tensor->strides.begin(), tensor->strides.end()};
  added->set_region(tensor->region);
  added->set_offset(tensor->offset);
  added->set_nbytes(tensor->nbytes);
  added->set_file(tensor->file);
  added->set_component(tensor->component);
  added->set_mappable(tensor->mappable);
  added->set_reason(SafeText(View(tensor->reason)));
  added->set_block_elements(tensor->block_elements);
  added->set_block_bytes(tensor->block_bytes);
  added->set_on_device(tensor->on_device);
  if (tensor->has_segment) {
    added->set_segment(tensor->segment);
    added->set_segment_offset(tensor->segment_offset);
  }
  page_bytes_ += added->ByteSizeLong() + 8;
  Step();
  return absl::OkStatus();
}

absl::Status SendPages(const FlatIndex& index, uint32_t most_tensors, Clock& clock,
                       absl::FunctionRef<absl::Status(const v1::IndexPage&)> send) {
  IndexPages pages(index, most_tensors);
  const absl::Duration began = clock.Monotonic();
  while (true) {
    v1::IndexPage page;
    const auto more = pages.Next(&page);
    if (!more.ok()) return more.status();
    if (!*more) return absl::OkStatus();
    if (clock.Monotonic() - began > kLongestIndexRead) {
      return absl::DeadlineExceededError(
          absl::StrCat("the index of ", index.tensor_count(), " tensors was not read within ",
                       absl::FormatDuration(kLongestIndexRead), " (read the pages as they come)"));
    }
    if (auto sent = send(page); !sent.ok()) return sent;
  }
}

}  // namespace modelhost
