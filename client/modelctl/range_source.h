// Ranges of the files of a model, read and not mapped: memory is what the caller brings, and a file
// that is cut meanwhile is an error and no signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace modelhost::modelctl {

class RangeSource {
 public:
  virtual ~RangeSource() = default;

  virtual absl::StatusOr<uint64_t> SizeOf(const std::string& name) = 0;
  // Fills `to`. ABORTED when the file ends before.
  virtual absl::Status ReadAt(const std::string& name, uint64_t offset,
                              std::span<std::byte> to) = 0;
};

}  // namespace modelhost::modelctl
