// SHA-256 (OpenSSL's, which uses the CPU's instructions where there are any).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace modelhost {

struct Digest {
  std::array<uint8_t, 32> bytes{};
  friend bool operator==(const Digest&, const Digest&) = default;
  friend auto operator<=>(const Digest&, const Digest&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Digest& d) {
    return H::combine(std::move(h), d.bytes);
  }
  std::string Hex() const;    // 64 lower-case digits.
  std::string Short() const;  // The first 12.
  bool IsZero() const { return *this == Digest{}; }
};

// 64 hex digits, either case.
absl::StatusOr<Digest> ParseDigest(absl::string_view hex);

Digest Sha256(std::span<const std::byte> bytes);

// Incremental. Not thread-safe.
class Sha256Stream {
 public:
  Sha256Stream();
  Sha256Stream(Sha256Stream&&) noexcept;
  ~Sha256Stream();
  void Update(std::span<const std::byte> bytes);
  Digest Finish();  // Once; nothing may follow.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace modelhost
