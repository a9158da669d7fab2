// safetensors: an 8-byte length, a JSON header, then the tensors' bytes without a gap.
//
// Stricter than the reference reader where a looser reading would let two readers see two models:
// no whitespace before the header, no key twice (after escapes), no array or map spellings. See
// README.md of this folder. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

inline constexpr uint64_t kSafetensorsHeaderCap = 100'000'000;  // Bytes; the format's own limit.

// Adds the tensors of file number `file` in header order, and the strings of __metadata__.
absl::Status ReadSafetensors(std::string_view name, std::span<const std::byte> bytes, uint32_t file,
                             TensorIndex& index, std::vector<MetadataItem>& metadata);

}  // namespace modelhost
