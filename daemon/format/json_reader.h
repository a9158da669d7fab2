// A strict JSON pull reader over a ByteReader: RFC 8259 and nothing more.
//
// Refused: comments, trailing commas, leading zeros, NaN, raw control characters, lone surrogates,
// text that is not UTF-8, numbers beyond a double, more than kMaxDepth open brackets. Nothing is
// built: callers take what they know and Skip() the rest, which neither recurses nor allocates.
// Errors stick in the ByteReader. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "daemon/format/byte_reader.h"

namespace modelhost {

class JsonReader {
 public:
  // As the reference reader of safetensors: 127 levels pass, 128 do not.
  static constexpr int kMaxDepth = 127;

  explicit JsonReader(ByteReader& in) : in_(in) {}

  // Each calls back with the reader at a value, which the callback must consume. A false from it
  // ends the reading; it has called Fail() then. `key` is valid until the next string is read.
  bool Object(std::string_view what, absl::FunctionRef<bool(std::string_view key)> member);
  bool Array(std::string_view what, absl::FunctionRef<bool()> item);
  // `text` is valid until the next string is read.
  bool String(std::string_view what, std::string_view* text);
  // Digits only: no sign, fraction or exponent, and at most 2^64 - 1.
  bool Unsigned(std::string_view what, uint64_t* number);
  bool Skip();  // Any value.
  // Only whitespace is left.
  bool End();
  // The first byte of the value that comes next, -1 at the end.
  int PeekValue();

 private:
  void Space();
  bool Open(char bracket, std::string_view what);
  bool Key(std::string_view* key);
  bool Escape();
  bool Hex4(uint32_t* unit);
  bool Number();
  bool Literal(std::string_view word);
  bool Unexpected(std::string_view wanted);

  ByteReader& in_;
  int depth_ = 0;
  std::string scratch_;  // The last string that had escapes.
};

}  // namespace modelhost
