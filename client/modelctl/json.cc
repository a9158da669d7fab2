#include "client/modelctl/json.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace modelhost::modelctl {
namespace {

// The length of the UTF-8 sequence at the start of `text`; 0 when it is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  size_t length = 0;
  uint32_t point = 0, least = 0;
  if ((first & 0xe0) == 0xc0) {
    length = 2, point = first & 0x1f, least = 0x80;
  } else if ((first & 0xf0) == 0xe0) {
    length = 3, point = first & 0x0f, least = 0x800;
  } else if ((first & 0xf8) == 0xf0) {
    length = 4, point = first & 0x07, least = 0x10000;
  } else {
    return 0;
  }
  if (text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    point = (point << 6) | (byte(i) & 0x3f);
  }
  if (point < least || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff)) return 0;
  return length;
}

}  // namespace

bool IsValidUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

void JsonWriter::BeginDocument(absl::string_view kind) {
  BeginObject();
  Field("apiVersion", "modelhost/v1");
  Field("kind", kind);
}

void JsonWriter::BeginObject() { Open('{'); }
void JsonWriter::EndObject() { Close('}'); }
void JsonWriter::BeginArray() { Open('['); }
void JsonWriter::EndArray() { Close(']'); }

void JsonWriter::Key(absl::string_view key) {
  String(key);
  text_.append(pretty_ ? ": " : ":");
  after_key_ = true;
}

void JsonWriter::String(absl::string_view text) {
  Separate();
  text_.push_back('"');
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) {
      text_.append("\xef\xbf\xbd");
      text.remove_prefix(1);
      continue;
    }
    const char c = text[0];
    if (length > 1) {
      text_.append(text.data(), length);
    } else if (c == '"' || c == '\\') {
      text_.push_back('\\');
      text_.push_back(c);
    } else if (c == '\n') {
      text_.append("\\n");
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&text_, "\\u%04x", static_cast<unsigned>(c));
    } else {
      text_.push_back(c);
    }
    text.remove_prefix(length);
  }
  text_.push_back('"');
}

void JsonWriter::Int(int64_t number) {
  Separate();
  absl::StrAppend(&text_, number);
}

void JsonWriter::Uint(uint64_t number) {
  Separate();
  absl::StrAppend(&text_, number);
}

void JsonWriter::Seconds(double number) {
  Separate();
  if (!std::isfinite(number)) {
    text_.append("null");
    return;
  }
  std::string digits = absl::StrFormat("%.9g", number);
  if (digits.find_first_of(".e") == std::string::npos) digits.append(".0");
  text_.append(digits);
}

void JsonWriter::Bool(bool value) {
  Separate();
  text_.append(value ? "true" : "false");
}

void JsonWriter::Null() {
  Separate();
  text_.append("null");
}

std::string JsonWriter::Take() && {
  text_.push_back('\n');
  return std::move(text_);
}

void JsonWriter::Separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (has_items_.empty()) return;
  if (has_items_.back()) text_.push_back(',');
  has_items_.back() = true;
  NewLine();
}

void JsonWriter::Open(char bracket) {
  Separate();
  text_.push_back(bracket);
  has_items_.push_back(false);
}

void JsonWriter::Close(char bracket) {
  const bool had_items = has_items_.back();
  has_items_.pop_back();
  if (had_items) NewLine();
  text_.push_back(bracket);
}

void JsonWriter::NewLine() {
  if (!pretty_) return;
  text_.push_back('\n');
  text_.append(2 * has_items_.size(), ' ');
}

}  // namespace modelhost::modelctl
