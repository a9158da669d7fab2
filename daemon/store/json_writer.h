// Writes JSON text: two spaces of indentation (or all of it in one line), commas and escapes put
// where they belong.
//
// Whatever strings it is given, the result is valid UTF-8 JSON: bytes that are not UTF-8 become
// U+FFFD. Nesting is the caller's duty. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace modelhost {

class JsonWriter {
 public:
  enum class Layout { kIndented, kOneLine };
  explicit JsonWriter(Layout layout = Layout::kIndented) : layout_(layout) {}

  JsonWriter& BeginObject();
  JsonWriter& EndObject();
  JsonWriter& BeginArray();
  JsonWriter& EndArray();
  // Before each value of an object.
  JsonWriter& Key(absl::string_view key);
  JsonWriter& String(absl::string_view value);
  JsonWriter& Uint(uint64_t value);
  JsonWriter& Int(int64_t value);

  // The text, with a final newline.
  std::string Take() &&;

 private:
  void BeforeValue();
  void Open(char bracket);
  void Close(char bracket);
  void NewLine();
  void Quote(absl::string_view value);

  Layout layout_;
  std::string out_;
  int depth_ = 0;
  bool empty_ = true;       // Nothing yet in the innermost container.
  bool after_key_ = false;  // The next value belongs to a key.
};

}  // namespace modelhost
