// The catalogue page: which version every label names, in one page set that all processes map.
//
//   0     CatalogueHeader (128 bytes)
//   128   CatalogueSlot[capacity] (192 bytes each), the first `slot_count` in use
//
// One memfd per daemon epoch, sealed SHRINK|GROW|FUTURE_WRITE|SEAL; the daemon holds the only
// writable mapping. One writer, any number of readers, no locks.
//
// Writer order: names, then the slot's words, then `slot_count`; `magic` last of all at creation.
// One `sequence` (a seqlock: odd while a write is under way) covers all slots, so several labels
// move together. A slot belongs to one (model, label) for the whole epoch and is never reused.
//
// Reader: map read-only, check magic, abi_version and page_bytes, then either read one slot's
// `generation` (one atomic load: has my label moved?) or copy slots under the seqlock. Retry a
// bounded number of times: a daemon killed inside a write leaves `sequence` odd for ever.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "proto/abi/shared_layout.h"

namespace modelhost::abi {

inline constexpr uint64_t kCatalogueMagic = 0x315441434c444f4dULL;  // "MODLCAT1"
inline constexpr uint32_t kCatalogueAbi = 1;
inline constexpr uint32_t kCatalogueCapacity = 4096;  // (model, label) pairs per epoch.
inline constexpr uint32_t kNoSlot = 0xffffffffU;

enum class CatalogueState : uint32_t {
  kOpen = 1,
  kClosed = 2,  // The daemon stopped cleanly; another page will follow.
};

struct CatalogueHeader {
  std::atomic<uint64_t> magic;
  uint32_t abi_version;
  uint32_t header_bytes;
  uint32_t slot_bytes;
  uint32_t capacity;
  uint64_t page_bytes;
  uint64_t epoch;                    // +1 at every start of the daemon.
  std::atomic<uint32_t> state;       // CatalogueState
  std::atomic<uint32_t> slot_count;  // Only grows.
  std::atomic<uint64_t> sequence;    // Seqlock over all slots.
  uint8_t reserved[72];
};

struct CatalogueSlot {
  std::atomic<uint64_t> generation;  // +1 at every move of the label; survives restarts.
  // 0: nothing to have: the label was removed, or its version is not READY yet after a start.
  std::atomic<uint64_t> version;
  uint64_t reserved0;
  char model[kNameBytes];  // NUL-padded. Written once, before slot_count covers the slot.
  char label[kNameBytes];
  uint8_t reserved[24];
};

static_assert(SharedLayout<CatalogueHeader> && SharedLayout<CatalogueSlot>);
static_assert(sizeof(CatalogueHeader) == 128);
static_assert(offsetof(CatalogueHeader, epoch) == 32);
static_assert(offsetof(CatalogueHeader, state) == 40);
static_assert(offsetof(CatalogueHeader, sequence) == 48);
static_assert(sizeof(CatalogueSlot) == 192);
static_assert(offsetof(CatalogueSlot, model) == 24);
static_assert(offsetof(CatalogueSlot, label) == 96);

inline constexpr uint64_t kCatalogueBytes =
    sizeof(CatalogueHeader) + uint64_t{kCatalogueCapacity} * sizeof(CatalogueSlot);

}  // namespace modelhost::abi
