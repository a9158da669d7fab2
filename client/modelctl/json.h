// JSON as modelctl prints it: `{"apiVersion":"modelhost/v1","kind":...}`, bytes as integers,
// seconds as floats (always with a fraction), times in RFC 3339 UTC.
//
// The writer trusts its caller to nest rightly and checks nothing but strings: bytes that are no
// UTF-8 become U+FFFD. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace modelhost::modelctl {

enum class JsonStyle { kPretty, kOneLine };

bool IsValidUtf8(absl::string_view text);

class JsonWriter {
 public:
  explicit JsonWriter(JsonStyle style) : pretty_(style == JsonStyle::kPretty) {}

  // Opens the top object with apiVersion and kind; close it with EndObject.
  void BeginDocument(absl::string_view kind);

  void BeginObject();
  void EndObject();
  void BeginArray();
  void EndArray();
  void Key(absl::string_view key);

  void String(absl::string_view text);
  void Int(int64_t number);
  void Uint(uint64_t number);
  void Seconds(double number);
  void Bool(bool value);
  void Null();

  void Field(absl::string_view key, absl::string_view text) { Key(key), String(text); }
  void Field(absl::string_view key, const std::string& text) { Key(key), String(text); }
  void Field(absl::string_view key, const char* text) { Key(key), String(text); }
  void Field(absl::string_view key, uint64_t number) { Key(key), Uint(number); }
  void Field(absl::string_view key, uint32_t number) { Key(key), Uint(number); }
  void Field(absl::string_view key, int32_t number) { Key(key), Int(number); }
  void Field(absl::string_view key, bool value) { Key(key), Bool(value); }
  void FieldSeconds(absl::string_view key, double number) { Key(key), Seconds(number); }

  // The text so far, ended by a line feed.
  std::string Take() &&;

 private:
  void Separate();
  void Open(char bracket);
  void Close(char bracket);
  void NewLine();

  bool pretty_;
  bool after_key_ = false;
  std::vector<bool> has_items_;  // Per open bracket.
  std::string text_;
};

}  // namespace modelhost::modelctl
