// Reads outside bytes in order, never past their end: the only way a parser here touches a file.
//
// The first failure sticks: later calls fail too and leave their results alone, so a parser may
// check once per record. Offsets are absolute in the file; sizes are in bytes. Not thread-safe.
// The bytes and the file's name are lent.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace modelhost {

class ByteReader {
 public:
  // `hint` says what to do about a bad file; it ends every error text that has no hint of its own.
  ByteReader(std::string_view file, std::string_view hint, std::span<const std::byte> bytes)
      : file_(file),
        hint_(hint),
        text_(reinterpret_cast<const char*>(bytes.data()), bytes.size()) {}

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  uint64_t offset() const { return at_; }
  uint64_t size() const { return text_.size(); }
  uint64_t remaining() const { return text_.size() - at_; }

  // Always false, for `return in.Fail(...)`. The text becomes "FILE: at byte OFFSET: WHY (HINT)".
  bool Fail(std::string_view why, std::string_view hint = {},
            absl::StatusCode code = absl::StatusCode::kInvalidArgument);

  // Little-endian. `what` names the field, for the error when the file ends before it.
  template <std::unsigned_integral T>
  bool Little(std::string_view what, T* value) {
    std::string_view raw;
    if (!Text(what, sizeof(T), &raw)) return false;
    T result = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      result = static_cast<T>(
          result | static_cast<T>(static_cast<T>(static_cast<uint8_t>(raw[i])) << (8 * i)));
    }
    *value = result;
    return true;
  }
  // The next `size` bytes, lent by the file.
  bool Text(std::string_view what, uint64_t size, std::string_view* text);
  bool Skip(std::string_view what, uint64_t size);
  // Goes to `offset`, backwards too.
  bool Seek(std::string_view what, uint64_t offset);

  int Peek() const { return ok() && at_ < text_.size() ? static_cast<uint8_t>(text_[at_]) : -1; }
  // Consumes the next byte if it is `c`.
  bool Take(char c) {
    if (Peek() != static_cast<uint8_t>(c)) return false;
    ++at_;
    return true;
  }
  // Consumes the longest run of bytes that `wanted` accepts.
  template <typename Predicate>
  std::string_view TakeWhile(Predicate wanted) {
    if (!ok()) return {};
    const uint64_t from = at_;
    while (at_ < text_.size() && wanted(static_cast<uint8_t>(text_[at_]))) ++at_;
    return text_.substr(from, at_ - from);
  }
  // The next `size` bytes become all that there is, until Widen() gets back the `outer` end. Offsets
  // stay those of the file.
  bool Narrow(std::string_view what, uint64_t size, uint64_t* outer);
  void Widen(uint64_t outer) { text_ = std::string_view(text_.data(), outer); }
  // Back to an earlier offset().
  void Rewind(uint64_t to) {
    if (to < at_) at_ = to;
  }
  // What was consumed since the reader stood at `from` (an earlier offset()).
  std::string_view Since(uint64_t from) const { return text_.substr(from, at_ - from); }

 private:
  bool FailShort(std::string_view what, uint64_t size);

  std::string_view file_;
  std::string_view hint_;
  std::string_view text_;
  uint64_t at_ = 0;  // Never above text_.size().
  absl::Status status_;
};

}  // namespace modelhost
