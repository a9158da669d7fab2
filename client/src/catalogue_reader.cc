#include "client/src/catalogue_reader.h"

#include <algorithm>
#include <string>

#include "client/src/other_abi.h"
#include "client/src/reference.h"
#include "proto/handle/seqlock.h"

namespace modelhost {
namespace {

constexpr int kAttempts = 1000;
constexpr uint64_t kFirstSlotsBytes = 64 << 10;

}  // namespace

const abi::CatalogueHeader& CatalogueReader::header() const {
  return *reinterpret_cast<const abi::CatalogueHeader*>(mapping_.bytes().data());
}

const abi::CatalogueSlot& CatalogueReader::slot(uint32_t number) const {
  const std::byte* first = mapping_.bytes().data() + sizeof(abi::CatalogueHeader);
  return reinterpret_cast<const abi::CatalogueSlot*>(first)[number];
}

Result<std::shared_ptr<const CatalogueReader>> CatalogueReader::Map(const UniqueFd& fd,
                                                                    uint64_t bytes,
                                                                    uint64_t epoch) {
  const auto broken = [](const std::string& why) {
    return Error{Code::kDataLoss, "catalogue page: " + why, 0};
  };
  if (bytes < sizeof(abi::CatalogueHeader)) return broken("shorter than its header");
  auto mapping = ReadOnlyMapping::MapOneWriter(fd, bytes);
  if (!mapping.ok()) {
    Error error = std::move(mapping).error();
    if (error.code == Code::kResourceExhausted) return error;
    return broken(error.text);
  }
  std::shared_ptr<const CatalogueReader> reader(new CatalogueReader(*std::move(mapping)));
  // The slots in use are the first ones.
  Prefault(reader->mapping_.bytes().first(std::min<uint64_t>(bytes, kFirstSlotsBytes)));
  const abi::CatalogueHeader& header = reader->header();
  if (header.magic.load(std::memory_order_acquire) != abi::kCatalogueMagic) {
    return broken("bad magic");
  }
  if (header.abi_version != abi::kCatalogueAbi) {
    return OtherAbi("catalogue page:", header.abi_version, abi::kCatalogueAbi);
  }
  if (header.header_bytes != sizeof(abi::CatalogueHeader) ||
      header.slot_bytes != sizeof(abi::CatalogueSlot)) {
    return broken("its parts are not of the size that its ABI has");
  }
  const uint64_t room = (bytes - sizeof(abi::CatalogueHeader)) / sizeof(abi::CatalogueSlot);
  if (header.page_bytes != bytes || header.capacity > room || header.epoch != epoch) {
    return broken("its header does not fit what the daemon announced");
  }
  return reader;
}

bool CatalogueReader::full() const {
  return header().slot_count.load(std::memory_order_acquire) >= header().capacity;
}

const abi::CatalogueSlot* CatalogueReader::SlotOf(uint32_t number, std::string_view model,
                                                  std::string_view label) const {
  const uint32_t used =
      std::min(header().slot_count.load(std::memory_order_acquire), header().capacity);
  if (number >= used) return nullptr;
  const abi::CatalogueSlot& found = slot(number);
  return NameIn(found.model) == model && NameIn(found.label) == label ? &found : nullptr;
}

const abi::CatalogueSlot* CatalogueReader::Find(std::string_view model,
                                                std::string_view label) const {
  const uint32_t used =
      std::min(header().slot_count.load(std::memory_order_acquire), header().capacity);
  for (uint32_t i = 0; i < used; ++i) {
    const abi::CatalogueSlot& candidate = slot(i);
    if (NameIn(candidate.model) == model && NameIn(candidate.label) == label) return &candidate;
  }
  return nullptr;
}

bool CatalogueReader::Read(const abi::CatalogueSlot& slot, Label* label) const {
  return SeqlockRead(header().sequence, kAttempts, [&] {
    label->version = slot.version.load(std::memory_order_relaxed);
    label->generation = slot.generation.load(std::memory_order_relaxed);
  });
}

}  // namespace modelhost
