// The desired state file: which version each label is to name. Written by whoever drives a fleet,
// read by the daemon, which never writes it.
//
//   # a comment; blank lines and CRLF are fine
//   planner.stable = 8      MODEL.LABEL = N: the label is what follows the last dot
//   detector = 3            MODEL = N: the label stable
//
// A model whose name has a dot is written with its label (gpt-4.1.stable = 3). Nothing else is
// accepted, and one bad line refuses the whole file: INVALID_ARGUMENT, "file:line: why".
// ParseDesired is pure; ReadDesiredFile blocks for as long as the file system does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"

namespace modelhost {

inline constexpr size_t kMostDesiredBytes = size_t{1} << 20;
inline constexpr size_t kMostDesiredLines = 4096;

struct DesiredVersion {
  uint64_t version = 0;
  uint32_t line = 0;  // Where it is said, from 1.
};
// By model and label.
using DesiredVersions = std::map<std::pair<std::string, std::string>, DesiredVersion>;

// `file` is for messages. An empty text wants nothing.
absl::StatusOr<DesiredVersions> ParseDesired(absl::string_view text, absl::string_view file);

struct DesiredText {
  // OK, NOT_FOUND (no such file), UNAVAILABLE (it changed while it was read: look again), or why it
  // cannot be read; FAILED_PRECONDITION: everybody may write it, or it is no file.
  absl::Status status;
  std::string text;
  // Directories in which a change of names or contents may mean another text, also after a failure.
  std::vector<std::string> watch;
};

// Follows links, as a mounted ConfigMap has them: the operator named the path.
DesiredText ReadDesiredFile(Os& os, const std::string& path);

}  // namespace modelhost
