// Protobuf's wire format over a ByteReader: fields one after the other, nothing built or copied.
//
// A message inside a message narrows the reader to its bytes, so no length can reach past the one
// around it. Limits as in Protobuf: messages and groups 100 deep, tags and lengths in 5 bytes,
// numbers in 10. Failures stick in the ByteReader. Lengths are in bytes. Not thread-safe.
#pragma once

#include <cstdint>
#include <string_view>

#include "daemon/format/byte_reader.h"

namespace modelhost {

enum class WireType : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,  // Text, a message, or a packed run of numbers.
  kGroup = 3,
  kGroupEnd = 4,
  kFixed32 = 5,
};

struct WireField {
  // A field that comes with another type than the schema's is an unknown one, as in Protobuf.
  bool Is(uint32_t wanted, WireType as) const { return number == wanted && type == as; }

  uint32_t number = 0;
  WireType type = WireType::kVarint;
};

class WireReader {
 public:
  static constexpr int kMaxDepth = 100;

  // Where a message lies, for Again() and Leave().
  struct Scope {
    uint64_t begin;
    uint64_t outer;
  };

  explicit WireReader(ByteReader& in) : in_(in) {}

  ByteReader& in() { return in_; }

  // The next field of the current message; false at its end and after a failure.
  bool Next(WireField* field);
  // Steps over the value of the field that Next() gave.
  bool Skip(const WireField& field) { return SkipValue(field, depth_); }

  bool Varint(std::string_view what, uint64_t* value) { return ReadVarint(what, 10, value); }
  bool Bytes(std::string_view what, std::string_view* text);

  // Calls `on_field` for every field up to the end of the current message. It consumes the value
  // and returns false after a failure.
  template <typename OnField>
  bool Fields(OnField on_field) {
    WireField field;
    while (Next(&field)) {
      if (!on_field(field)) return false;
    }
    return in_.ok();
  }
  // The value is a message.
  bool Enter(std::string_view what, Scope* scope);
  void Again(const Scope& scope) { in_.Rewind(scope.begin); }
  // At the end of the message that Enter() gave.
  bool Leave(const Scope& scope);
  template <typename OnField>
  bool Message(std::string_view what, OnField on_field) {
    Scope scope{};
    return Enter(what, &scope) && Fields(on_field) && Leave(scope);
  }
  // The value is a packed run of varints. `on_value` returns false after a failure.
  template <typename OnValue>
  bool Varints(std::string_view what, OnValue on_value) {
    uint64_t length = 0;
    uint64_t outer = 0;
    if (!ReadLength(what, &length) || !in_.Narrow(what, length, &outer)) return false;
    while (in_.remaining() > 0) {
      uint64_t value = 0;
      if (!Varint(what, &value) || !on_value(value)) return false;
    }
    in_.Widen(outer);
    return true;
  }

 private:
  bool ReadVarint(std::string_view what, int most_bytes, uint64_t* value);
  bool ReadLength(std::string_view what, uint64_t* length);
  bool SkipValue(const WireField& field, int depth);

  ByteReader& in_;
  int depth_ = 0;
};

// How many varints a packed run holds; false when it ends inside one or one is too long.
bool CountVarints(std::string_view run, uint64_t* count);

}  // namespace modelhost
