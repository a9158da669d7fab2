// Files read and not mapped. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

// For the small files of a tree that somebody else made: a FIFO, a device or an endless file under
// such a name never blocks, and never takes more memory than the caller allows.
//
// All of a regular file of at most `max_bytes`; links are followed. Nothing for a file that is
// larger, of another kind, or cannot be read.
std::optional<std::string> ReadSmallFile(const std::string& path, size_t max_bytes);

// Fills `to` from `offset` on. ABORTED when the file ends before, others as the system says; the
// texts start with `name`.
absl::Status ReadFully(const UniqueFd& file, const std::string& name, uint64_t offset,
                       std::span<std::byte> to);

}  // namespace modelhost::modelctl
