// Strided views as they lie in a file, collected into row-major order.
//
// Two ways to the same bytes: GatherStrided is the fast one, in boxes whose long runs are read at
// once; CollectByIndex works out the place of every unit on its own, straight from shape and
// strides, and is there to check the other. Strides are in units and not negative, and every unit
// lies in the file. Errors are those of RangeSource. Pure but for the reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "client/modelctl/range_source.h"

namespace modelhost::modelctl {

struct StridedView {
  const std::string& file;
  uint64_t offset;  // Of its first unit's range.
  size_t unit_bytes;
  std::span<const int64_t> shape;  // No dimension is 0.
  std::span<const int64_t> strides;
};

// Units from `first` on until `out` is full; it has whole units, and they exist.
absl::Status GatherStrided(RangeSource& files, const StridedView& view, uint64_t first,
                           std::span<std::byte> out);

// The same. Takes 16 bytes for each unit and 1 MiB.
absl::Status CollectByIndex(RangeSource& files, const StridedView& view, uint64_t first,
                            std::span<std::byte> out);

}  // namespace modelhost::modelctl
