#include "daemon/publish/catalogue_writer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "daemon/platform/errno_status.h"
#include "proto/handle/fault_point.h"
#include "proto/handle/seqlock.h"

namespace modelhost {
namespace {

// Names here have been checked at the daemon's edges (IsValidName); the cut only keeps a mistake
// inside the field.
void WriteName(char (&field)[abi::kNameBytes], const std::string& name) {
  std::memcpy(field, name.data(), std::min<size_t>(name.size(), abi::kMaxNameLength));
}

}  // namespace

CatalogueWriter::CatalogueWriter(uint64_t epoch, OneWriterRegion region)
    : epoch_(epoch),
      region_(std::move(region)),
      // The memory is zero and has no objects yet: they begin here.
      header_(new (region_.bytes().data()) abi::CatalogueHeader()),
      slots_(new (region_.bytes().data() + sizeof(abi::CatalogueHeader))
                 abi::CatalogueSlot[abi::kCatalogueCapacity](),
             abi::kCatalogueCapacity) {}

absl::StatusOr<std::unique_ptr<CatalogueWriter>> CatalogueWriter::Create(uint64_t epoch,
                                                                         const LabelFile& labels) {
  auto region = OneWriterRegion::Create("modelhost-catalogue", abi::kCatalogueBytes);
  if (!region.ok()) return ToStatus(region.error(), "make the catalogue page");
  std::unique_ptr<CatalogueWriter> writer(new CatalogueWriter(epoch, *std::move(region)));
  abi::CatalogueHeader& header = *writer->header_;
  header.abi_version = abi::kCatalogueAbi;
  header.header_bytes = sizeof(abi::CatalogueHeader);
  header.slot_bytes = sizeof(abi::CatalogueSlot);
  header.capacity = abi::kCatalogueCapacity;
  header.page_bytes = abi::kCatalogueBytes;
  header.epoch = epoch;
  header.state.store(static_cast<uint32_t>(abi::CatalogueState::kOpen), std::memory_order_relaxed);
  // Labels in use come first: should the page not be large enough, removed ones are left out.
  for (const bool in_use : {true, false}) {
    for (const auto& [name, record] : labels.labels) {
      if ((record.version != 0) != in_use) continue;
      if (abi::CatalogueSlot* slot = writer->Slot(name.first, name.second)) {
        slot->generation.store(record.generation, std::memory_order_relaxed);
      }
    }
  }
  writer->ShowSlots();
  header.magic.store(abi::kCatalogueMagic, std::memory_order_release);
  return writer;
}

abi::CatalogueSlot* CatalogueWriter::Slot(const std::string& model, const std::string& label) {
  const auto found = numbers_.find({model, label});
  if (found != numbers_.end()) return &slots_[found->second];
  const auto count = static_cast<uint32_t>(numbers_.size());
  if (count >= slots_.size()) {
    ++left_out_;
    if (on_full_) on_full_(model, label);
    return nullptr;
  }
  abi::CatalogueSlot& slot = slots_[count];
  WriteName(slot.model, model);
  WriteName(slot.label, label);
  numbers_.emplace(std::pair(model, label), count);
  return &slot;
}

void CatalogueWriter::ShowSlots() {
  header_->slot_count.store(static_cast<uint32_t>(numbers_.size()), std::memory_order_release);
}

void CatalogueWriter::Publish(std::span<const LabelChange> changes) {
  // Readers wait for the end of a write: whatever may take long comes before.
  std::vector<abi::CatalogueSlot*> slots;
  slots.reserve(changes.size());
  for (const LabelChange& change : changes) slots.push_back(Slot(change.model, change.label));
  const SeqlockWrite write(header_->sequence);
  for (size_t i = 0; i < changes.size(); ++i) {
    abi::CatalogueSlot* slot = slots[i];
    const LabelChange& change = changes[i];
    if (slot == nullptr) continue;
    slot->version.store(change.to, std::memory_order_relaxed);
    FaultPoint("flip.half_written");
    // Release: who sees the new generation by its one load sees the version that goes with it.
    slot->generation.store(change.generation, std::memory_order_release);
  }
  ShowSlots();
}

uint32_t CatalogueWriter::SlotOf(const std::string& model, const std::string& label) {
  const auto found = numbers_.find({model, label});
  return found == numbers_.end() ? abi::kNoSlot : found->second;
}

void CatalogueWriter::Close() {
  header_->state.store(static_cast<uint32_t>(abi::CatalogueState::kClosed),
                       std::memory_order_release);
}

}  // namespace modelhost
