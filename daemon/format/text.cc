#include "daemon/format/text.h"

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

uint8_t ByteAt(std::string_view text, size_t i) { return static_cast<uint8_t>(text[i]); }

bool IsTail(std::string_view text, size_t i) {
  return i < text.size() && (ByteAt(text, i) & 0xc0) == 0x80;
}

}  // namespace

namespace {

// What cannot be shown becomes \xNN; what is long is cut.
std::string Shown(std::string_view name, size_t most_bytes, size_t* used) {
  std::string out;
  size_t i = 0;
  while (i < name.size() && i < most_bytes) {
    const size_t bytes = Utf8CharBytes(name.substr(i));
    const uint8_t byte = ByteAt(name, i);
    if (bytes == 0 || byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&out, "\\x", absl::Hex(byte, absl::kZeroPad2));
      ++i;
    } else {
      out.append(name.substr(i, bytes));
      i += bytes;
    }
  }
  *used = i;
  return out;
}

}  // namespace

absl::Status ModelError(std::string_view file, std::string_view why, std::string_view hint,
                        absl::StatusCode code) {
  return absl::Status(
      code, absl::StrCat(Printable(file), ": ", AsAbsl(why), hint.empty() ? "" : " (", AsAbsl(hint),
                         hint.empty() ? "" : ")"));
}

absl::Status SourceError(std::string_view file, std::string_view why, const absl::Status& cause,
                         std::string_view hint) {
  const std::string_view text = AsStd(cause.message());
  const bool has_hint = !text.empty() && text.back() == ')';
  return ModelError(file, absl::StrCat(AsAbsl(why), ", which cannot be read: ", Printable(text)),
                    has_hint ? std::string_view() : hint, cause.code());
}

std::string Printable(std::string_view path) {
  constexpr size_t kMostShown = 1024;  // The longest path of a version.
  size_t used = 0;
  return Shown(path, kMostShown, &used);
}

std::string Quoted(std::string_view name) {
  constexpr size_t kMostShown = 120;
  size_t used = 0;
  std::string out = absl::StrCat("'", Shown(name, kMostShown, &used), "'");
  if (used < name.size()) absl::StrAppend(&out, "... (", name.size(), " bytes)");
  return out;
}

size_t Utf8CharBytes(std::string_view text) {
  if (text.empty()) return 0;
  const uint8_t lead = ByteAt(text, 0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0;
  if (!IsTail(text, 1)) return 0;
  if (lead < 0xe0) return 2;
  const uint8_t second = ByteAt(text, 1);
  if (lead < 0xf0) {
    if (lead == 0xe0 && second < 0xa0) return 0;  // Overlong.
    if (lead == 0xed && second > 0x9f) return 0;  // A surrogate.
    return IsTail(text, 2) ? 3 : 0;
  }
  if (lead > 0xf4) return 0;
  if (lead == 0xf0 && second < 0x90) return 0;  // Overlong.
  if (lead == 0xf4 && second > 0x8f) return 0;  // Above U+10FFFF.
  return IsTail(text, 2) && IsTail(text, 3) ? 4 : 0;
}

bool IsUtf8(std::string_view text) {
  for (;;) {
    // Nearly all names are ASCII.
    size_t ascii = 0;
    while (ascii < text.size() && ByteAt(text, ascii) < 0x80) ++ascii;
    text.remove_prefix(ascii);
    if (text.empty()) return true;
    const size_t bytes = Utf8CharBytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
}

std::string ToUtf8(std::string_view text) {
  if (IsUtf8(text)) return std::string(text);
  std::string out;
  while (!text.empty()) {
    const size_t bytes = Utf8CharBytes(text);
    out.append(bytes == 0 ? kReplacement : text.substr(0, bytes));
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return out;
}

void AppendJsonString(std::string_view text, std::string* out) {
  *out += '"';
  while (!text.empty()) {
    const size_t bytes = Utf8CharBytes(text);
    const uint8_t byte = ByteAt(text, 0);
    if (bytes == 0) {
      out->append("\\ufffd");
    } else if (byte == '"' || byte == '\\') {
      *out += '\\';
      *out += static_cast<char>(byte);
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(out, "\\u", absl::Hex(byte, absl::kZeroPad4));
    } else {
      out->append(text.substr(0, bytes));
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  *out += '"';
}

}  // namespace modelhost
