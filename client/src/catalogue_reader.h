// The catalogue page of one epoch, as a reader sees it (proto/abi/catalogue_page.h).
//
// Immutable but for the words that the daemon writes; any thread. The words stay readable, frozen,
// after the daemon's death.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "proto/abi/catalogue_page.h"
#include "proto/handle/error.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class CatalogueReader {
 public:
  // Maps and checks. UNIMPLEMENTED: of another ABI. DATA_LOSS when it is no page, is not sealed, or
  // is not what was announced.
  static Result<std::shared_ptr<const CatalogueReader>> Map(const UniqueFd& fd, uint64_t bytes,
                                                            uint64_t epoch);

  uint64_t epoch() const { return header().epoch; }
  // Labels may have been left out.
  bool full() const;

  // Null unless slot `number` is in use and belongs to this model and label.
  const abi::CatalogueSlot* SlotOf(uint32_t number, std::string_view model,
                                   std::string_view label) const;
  // By name; null when the page has none. Looks at all slots.
  const abi::CatalogueSlot* Find(std::string_view model, std::string_view label) const;

  struct Label {
    uint64_t version = 0;  // 0: removed.
    uint64_t generation = 0;
  };
  // Both words of one moment. False: the daemon died inside a write, or it writes all the time.
  bool Read(const abi::CatalogueSlot& slot, Label* label) const;

 private:
  explicit CatalogueReader(ReadOnlyMapping mapping) : mapping_(std::move(mapping)) {}
  const abi::CatalogueHeader& header() const;
  const abi::CatalogueSlot& slot(uint32_t number) const;

  ReadOnlyMapping mapping_;
};

}  // namespace modelhost
