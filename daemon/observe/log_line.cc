#include "daemon/observe/log_line.h"

#include <algorithm>
#include <cstdio>

namespace modelhost {
namespace {

// The length of the UTF-8 sequence that `text` begins with, 0 when it begins with none.
size_t SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto continues = [&](size_t i) { return i < text.size() && (byte(i) & 0xC0) == 0x80; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    if (!continues(1) || !continues(2)) return 0;
    if (first == 0xE0 && byte(1) < 0xA0) return 0;   // Overlong.
    if (first == 0xED && byte(1) >= 0xA0) return 0;  // A surrogate.
    return 3;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (first == 0xF0 && byte(1) < 0x90) return 0;
    if (first == 0xF4 && byte(1) >= 0x90) return 0;
    return 4;
  }
  return 0;
}

bool IsPlain(absl::string_view value) {
  return !value.empty() && std::all_of(value.begin(), value.end(), [](char c) {
    return c > ' ' && c <= '~' && c != '"' && c != '=' && c != '\\';
  });
}

void AppendHex(std::string& out, uint8_t byte) {
  char hex[5];
  std::snprintf(hex, sizeof hex, "\\x%02x", byte);
  out += hex;
}

void AppendQuoted(std::string& out, absl::string_view value) {
  out += '"';
  while (!value.empty()) {
    const size_t length = SequenceLength(value);
    const char c = value[0];
    if (length > 1) {
      // C1 controls (U+0080..U+009F) move a terminal's cursor as C0 ones do.
      const bool c1 = c == '\xC2' && static_cast<uint8_t>(value[1]) < 0xA0;
      if (c1) {
        AppendHex(out, static_cast<uint8_t>(value[0]));
        AppendHex(out, static_cast<uint8_t>(value[1]));
      } else {
        out.append(value.data(), length);
      }
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (length == 0 || static_cast<uint8_t>(c) < 0x20 || c == 0x7F) {
      AppendHex(out, static_cast<uint8_t>(c));
    } else {
      out += c;
    }
    value.remove_prefix(std::max<size_t>(length, 1));
  }
  out += '"';
}

}  // namespace

LogLine::LogLine(absl::string_view event) : text_(absl::StrCat("event=", event)) {}

LogLine& LogLine::Add(absl::string_view key, absl::string_view value) {
  absl::StrAppend(&text_, " ", key, "=");
  std::string cut;
  if (value.size() > kMaxValueBytes) {
    // Not in the middle of a character.
    size_t end = kMaxValueBytes;
    while (end > kMaxValueBytes - 4 && (static_cast<uint8_t>(value[end]) & 0xC0) == 0x80) --end;
    cut = absl::StrCat(value.substr(0, end), "...");
    value = cut;
  }
  if (IsPlain(value)) {
    absl::StrAppend(&text_, value);
  } else {
    AppendQuoted(text_, value);
  }
  return *this;
}

LogLine& LogLine::AddSeconds(absl::string_view key, absl::Duration value) {
  char number[32];
  std::snprintf(number, sizeof number, "%.6g", absl::ToDoubleSeconds(value));
  return Add(key, absl::string_view(number));
}

LogLine& LogLine::AddError(const absl::Status& status) {
  if (status.ok()) return *this;
  return Add("code", absl::StatusCodeToString(status.code())).Add("error", status.message());
}

}  // namespace modelhost
