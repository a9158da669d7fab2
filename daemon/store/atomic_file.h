// Small files that are replaced whole: a reader, or a restart after a crash at any point, sees the
// old bytes or the new ones. Blocking.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"

namespace modelhost {

// Writes `name`.tmp, fsyncs, renames it to `name` and fsyncs the directory. When even the last step
// fails the old file is put back (it is kept as `name`.old until then), so an error means that
// nothing has changed. One writer per name at a time.
absl::Status ReplaceFileAt(Os& os, const UniqueFd& dir, const std::string& name, uint32_t mode,
                           absl::string_view text);

// The whole of a file of at most `max_bytes`; RESOURCE_EXHAUSTED beyond.
absl::StatusOr<std::string> ReadSmallFile(Os& os, const UniqueFd& file, absl::string_view name,
                                          uint64_t max_bytes);
absl::StatusOr<std::string> ReadSmallFileAt(Os& os, const UniqueFd& dir, const std::string& name,
                                            uint64_t max_bytes);

// "what: text", with the code and payloads of `status`.
absl::Status Prefix(absl::string_view what, const absl::Status& status);

}  // namespace modelhost
