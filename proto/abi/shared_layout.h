// What a struct must be to stand in memory that several processes map.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace modelhost::abi {

// Fixed layout, no pointers that we could catch at compile time, no destructor.
template <typename T>
concept SharedLayout = std::is_standard_layout_v<T> && std::is_trivially_destructible_v<T>;

// Words that change while mapped must be lock-free, or a lock would hide in one process.
static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4 && sizeof(std::atomic<uint64_t>) == 8);

// The longest model or label name is 64 bytes; stored with a NUL, padded to a multiple of 8.
inline constexpr uint32_t kNameBytes = 72;
inline constexpr uint32_t kMaxNameLength = 64;
inline constexpr uint32_t kDigestBytes = 32;

// `[a-z0-9][a-z0-9._-]{0,63}`, for models and labels alike.
constexpr bool IsValidName(const char* data, uint64_t size) {
  if (size == 0 || size > kMaxNameLength) return false;
  for (uint64_t i = 0; i < size; ++i) {
    const char c = data[i];
    const bool alnum = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (!alnum && (i == 0 || (c != '.' && c != '_' && c != '-'))) return false;
  }
  return true;
}

}  // namespace modelhost::abi
