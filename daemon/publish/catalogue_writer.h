// The one writer of the catalogue page (proto/abi/catalogue_page.h).
//
// One page per epoch. At creation every known label gets its slot, with the generation that it had
// when the daemon stopped and version 0: nothing can be leased yet. Once a version is READY,
// Publish with the same generation announces it; a move of the label announces a new generation. A
// slot belongs to one label for the whole epoch; when all slots are taken, further labels are left
// out and counted. Their moves are events that name no slot: clients that follow such a label ask.
//
// Control thread only, except fd(), page_bytes() and epoch(), which never change.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/registry/events.h"
#include "daemon/store/labels.h"
#include "proto/abi/catalogue_page.h"
#include "proto/handle/region.h"

namespace modelhost {

class CatalogueWriter final : public LabelPublisher {
 public:
  // `magic` is written last: a reader either sees a whole page or none.
  //   RESOURCE_EXHAUSTED  no memory for the page
  static absl::StatusOr<std::unique_ptr<CatalogueWriter>> Create(uint64_t epoch,
                                                                 const LabelFile& labels);

  // All of `changes` in one seqlock write: a reader sees all of them or none.
  void Publish(std::span<const LabelChange> changes) override;
  // abi::kNoSlot for a label that is not in the page.
  uint32_t SlotOf(const std::string& model, const std::string& label) override;
  // Tells readers that another page will follow. Once, at a clean stop.
  void Close();

  // Called for a label that found no room. Set before the control thread starts.
  void OnFull(std::function<void(const std::string& model, const std::string& label)> hook) {
    on_full_ = std::move(hook);
  }
  // Labels that found no room, since creation; each counts once per attempt.
  uint64_t left_out() const { return left_out_; }

  const UniqueFd& fd() const { return region_.fd(); }  // Lent to clients.
  uint64_t page_bytes() const { return abi::kCatalogueBytes; }
  uint64_t epoch() const { return epoch_; }

 private:
  CatalogueWriter(uint64_t epoch, OneWriterRegion region);
  // The slot of a label, new if it has none; null when the page is full. Readers do not see a new
  // one before ShowSlots.
  abi::CatalogueSlot* Slot(const std::string& model, const std::string& label);
  void ShowSlots();

  const uint64_t epoch_;
  OneWriterRegion region_;
  abi::CatalogueHeader* const header_;
  const std::span<abi::CatalogueSlot> slots_;
  std::map<std::pair<std::string, std::string>, uint32_t> numbers_;
  std::function<void(const std::string&, const std::string&)> on_full_;
  uint64_t left_out_ = 0;
};

}  // namespace modelhost
