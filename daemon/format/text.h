// Words for errors and warnings, and UTF-8: names from outside are shown, never trusted.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace modelhost {

// absl may have a string_view of its own, without a conversion from std's.
inline absl::string_view AsAbsl(std::string_view text) { return {text.data(), text.size()}; }
inline std::string_view AsStd(absl::string_view text) { return {text.data(), text.size()}; }

// "FILE: WHY (HINT)": the one form of every error of the readers. The file comes first, with what
// cannot be shown escaped; names in `why` are the caller's to quote.
absl::Status ModelError(std::string_view file, std::string_view why, std::string_view hint,
                        absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// "FILE: WHY, which cannot be read: CAUSE (HINT)" with the code of `cause`, whose own hint comes
// first.
absl::Status SourceError(std::string_view file, std::string_view why, const absl::Status& cause,
                         std::string_view hint);

// A file's path for a message: on one line, with what cannot be shown escaped.
std::string Printable(std::string_view path);
// 'name' for a message: printable, on one line, cut when it is long.
std::string Quoted(std::string_view name);

// Bytes of the UTF-8 character at the start of `text`; 0 when there is none that is well-formed.
size_t Utf8CharBytes(std::string_view text);
bool IsUtf8(std::string_view text);
// Every byte that is not part of a well-formed character becomes U+FFFD.
std::string ToUtf8(std::string_view text);
// `text` as a JSON string with its quotes: always valid JSON, whatever the bytes.
void AppendJsonString(std::string_view text, std::string* out);

}  // namespace modelhost
