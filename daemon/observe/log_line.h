// One event as one line of `key=value` pairs, safe for grep, awk and logfmt parsers.
//
// A value is quoted when it is empty or has a space, a quote, '=' or anything that is not
// printable; inside quotes `"` and `\` are escaped, control characters and bytes that are not UTF-8
// are
// `\n \r \t \xNN`. So an event is always one line, whatever a peer or a file put into it. Long
// values are cut at kMaxValueBytes and end in "...". Pure.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace modelhost {

class LogLine {
 public:
  static constexpr size_t kMaxValueBytes = 2048;

  // `event` is a plain word: "load", "label_moved".
  explicit LogLine(absl::string_view event);

  // `key` is a plain word.
  LogLine& Add(absl::string_view key, absl::string_view value);
  LogLine& Add(absl::string_view key, const char* value) {
    return Add(key, absl::string_view(value));
  }
  template <std::integral Number>
  LogLine& Add(absl::string_view key, Number value) {
    if constexpr (std::same_as<Number, bool>) {
      return Add(key, absl::string_view(value ? "true" : "false"));
    } else {
      return Add(key, absl::string_view(absl::StrCat(value)));
    }
  }
  // Seconds, as `key_seconds` would say: the caller names the unit in the key.
  LogLine& AddSeconds(absl::string_view key, absl::Duration value);
  // Nothing when OK; else code=... error=...
  LogLine& AddError(const absl::Status& status);

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace modelhost
