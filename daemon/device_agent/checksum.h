// A 64-bit checksum of a segment that can be summed up in any order, by threads here and by a
// kernel there: each word is mixed with its place, and the mixes are added.
//
// It finds what memory, buses and our own bugs do. It does not stop a forger: what came from disk
// has its SHA-256.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace modelhost {

// Of `bytes`, which lie `offset` bytes into the segment; both are multiples of 8.
inline uint64_t PlacedSum(std::span<const std::byte> bytes, uint64_t offset) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;
  uint64_t sum = 0;
  uint64_t place = (offset / 8 + 1) * kStep;
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    word = (word ^ place) * 0xff51afd7ed558ccdULL;
    sum += word ^ (word >> 32);
    place += kStep;
  }
  return sum;
}

}  // namespace modelhost
