#include "daemon/format/wire_reader.h"

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr int kMostVarintBytes = 10;
constexpr int kMostLengthBytes = 5;

}  // namespace

bool WireReader::ReadVarint(std::string_view what, int most_bytes, uint64_t* value) {
  uint64_t result = 0;
  for (int i = 0; i < most_bytes; ++i) {
    uint8_t byte = 0;
    if (!in_.Little(what, &byte)) return false;
    // The tenth byte holds the last of 64 bits.
    if (i == kMostVarintBytes - 1 && byte > 1) break;
    result |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if ((byte & 0x80) == 0) {
      *value = result;
      return true;
    }
  }
  return in_.Fail(absl::StrCat(AsAbsl(what), " is a number of too many bytes"));
}

bool WireReader::ReadLength(std::string_view what, uint64_t* length) {
  return ReadVarint(what, kMostLengthBytes, length);
}

bool WireReader::Next(WireField* field) {
  if (!in_.ok() || in_.remaining() == 0) return false;
  uint64_t tag = 0;
  if (!ReadVarint("a field", kMostLengthBytes, &tag)) return false;
  if (tag > UINT32_MAX) return in_.Fail(absl::StrCat("a field has the wrong tag ", tag));
  field->number = static_cast<uint32_t>(tag >> 3);
  const uint32_t type = tag & 7;
  if (field->number == 0) return in_.Fail("a field has the number 0");
  if (type > static_cast<uint32_t>(WireType::kFixed32)) {
    return in_.Fail(
        absl::StrCat("field ", field->number, " has the wire type ", type, ", which no field has"));
  }
  field->type = static_cast<WireType>(type);
  return true;
}

bool WireReader::SkipValue(const WireField& field, int depth) {
  switch (field.type) {
    case WireType::kVarint: {
      uint64_t unused = 0;
      return Varint("a number", &unused);
    }
    case WireType::kFixed64:
      return in_.Skip("a number", 8);
    case WireType::kFixed32:
      return in_.Skip("a number", 4);
    case WireType::kBytes: {
      uint64_t length = 0;
      return ReadLength("a field", &length) && in_.Skip("a field", length);
    }
    case WireType::kGroup: {
      if (depth >= kMaxDepth) return in_.Fail("messages are nested more than 100 deep");
      WireField inner;
      while (Next(&inner)) {
        if (inner.type != WireType::kGroupEnd) {
          if (!SkipValue(inner, depth + 1)) return false;
        } else if (inner.number == field.number) {
          return true;
        } else {
          return in_.Fail(
              absl::StrCat("group ", field.number, " is ended by the end of group ", inner.number));
        }
      }
      return in_.Fail(absl::StrCat("group ", field.number, " has no end"));
    }
    case WireType::kGroupEnd:
      break;
  }
  return in_.Fail(absl::StrCat("the end of group ", field.number, " without its begin"));
}

bool WireReader::Bytes(std::string_view what, std::string_view* text) {
  uint64_t length = 0;
  return ReadLength(what, &length) && in_.Text(what, length, text);
}

bool WireReader::Enter(std::string_view what, Scope* scope) {
  uint64_t length = 0;
  if (!ReadLength(what, &length)) return false;
  if (depth_ >= kMaxDepth) return in_.Fail("messages are nested more than 100 deep");
  if (!in_.Narrow(what, length, &scope->outer)) return false;
  scope->begin = in_.offset();
  ++depth_;
  return true;
}

bool WireReader::Leave(const Scope& scope) {
  if (!in_.ok()) return false;
  in_.Widen(scope.outer);
  --depth_;
  return true;
}

bool CountVarints(std::string_view run, uint64_t* count) {
  int bytes = 0;
  uint64_t result = 0;
  for (const char c : run) {
    const auto byte = static_cast<uint8_t>(c);
    if (++bytes == kMostVarintBytes && byte > 1) return false;
    if ((byte & 0x80) != 0) continue;
    bytes = 0;
    ++result;
  }
  *count = result;
  return bytes == 0;
}

}  // namespace modelhost
