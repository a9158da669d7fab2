#include "daemon/format/json_reader.h"

#include <bitset>
#include <cmath>
#include <system_error>

#include "absl/strings/charconv.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

bool IsDigit(uint8_t c) { return c >= '0' && c <= '9'; }

void AppendUtf8(uint32_t code, std::string* out) {
  const auto put = [out](uint32_t byte) { *out += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0 | (code >> 6));
    put(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    put(0xe0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  } else {
    put(0xf0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3f));
    put(0x80 | ((code >> 6) & 0x3f));
    put(0x80 | (code & 0x3f));
  }
}

}  // namespace

void JsonReader::Space() {
  in_.TakeWhile([](uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; });
}

int JsonReader::PeekValue() {
  Space();
  return in_.Peek();
}

bool JsonReader::Unexpected(std::string_view wanted) {
  const int next = in_.Peek();
  if (next < 0) return in_.Fail(absl::StrCat("the JSON ends where ", AsAbsl(wanted), " belongs"));
  const char c = static_cast<char>(next);
  return in_.Fail(absl::StrCat(AsAbsl(wanted), " expected, found ", Quoted({&c, 1})));
}

bool JsonReader::Open(char bracket, std::string_view what) {
  Space();
  if (!in_.Take(bracket)) return Unexpected(what);
  if (++depth_ > kMaxDepth) {
    return in_.Fail(absl::StrCat("JSON is nested deeper than ", kMaxDepth, " levels"));
  }
  return true;
}

bool JsonReader::Key(std::string_view* key) {
  Space();
  if (!String("a key in quotes", key)) return false;
  Space();
  return in_.Take(':') || Unexpected("':'");
}

bool JsonReader::Object(std::string_view what,
                        absl::FunctionRef<bool(std::string_view key)> member) {
  if (!Open('{', what)) return false;
  Space();
  if (!in_.Take('}')) {
    for (;;) {
      std::string_view key;
      if (!Key(&key) || !member(key) || !in_.ok()) return false;
      Space();
      if (in_.Take('}')) break;
      if (!in_.Take(',')) return Unexpected("',' or '}'");
    }
  }
  --depth_;
  return true;
}

bool JsonReader::Array(std::string_view what, absl::FunctionRef<bool()> item) {
  if (!Open('[', what)) return false;
  Space();
  if (!in_.Take(']')) {
    for (;;) {
      if (!item() || !in_.ok()) return false;
      Space();
      if (in_.Take(']')) break;
      if (!in_.Take(',')) return Unexpected("',' or ']'");
    }
  }
  --depth_;
  return true;
}

bool JsonReader::String(std::string_view what, std::string_view* text) {
  Space();
  if (!in_.Take('"')) return Unexpected(what);
  scratch_.clear();
  for (;;) {
    uint8_t seen = 0;
    const std::string_view run = in_.TakeWhile([&seen](uint8_t c) {
      if (c == '"' || c == '\\' || c < 0x20) return false;
      seen |= c;
      return true;
    });
    if ((seen & 0x80) != 0 && !IsUtf8(run)) return in_.Fail("a string is not UTF-8");
    if (in_.Take('"')) {
      if (scratch_.empty()) {
        *text = run;  // No escapes, or only empty runs: the file's own bytes will do.
      } else {
        scratch_.append(run);
        *text = scratch_;
      }
      return true;
    }
    scratch_.append(run);
    if (!in_.Take('\\')) {
      return in_.Fail(in_.Peek() < 0 ? "the JSON ends inside a string"
                                     : "a control character in a string must be escaped");
    }
    if (!Escape()) return false;
  }
}

bool JsonReader::Escape() {
  const int c = in_.Peek();
  if (c < 0) return in_.Fail("the JSON ends inside a string");
  in_.Take(static_cast<char>(c));
  switch (c) {
    case '"':
    case '\\':
    case '/':
      scratch_ += static_cast<char>(c);
      return true;
    case 'b':
      scratch_ += '\b';
      return true;
    case 'f':
      scratch_ += '\f';
      return true;
    case 'n':
      scratch_ += '\n';
      return true;
    case 'r':
      scratch_ += '\r';
      return true;
    case 't':
      scratch_ += '\t';
      return true;
    case 'u':
      break;
    default:
      return in_.Fail("unknown escape in a string");
  }
  uint32_t unit = 0;
  if (!Hex4(&unit)) return false;
  if (unit >= 0xd800 && unit < 0xe000) {
    uint32_t low = 0;
    if (unit >= 0xdc00 || !in_.Take('\\') || !in_.Take('u') || !Hex4(&low) || low < 0xdc00 ||
        low >= 0xe000) {
      return in_.Fail("a lone surrogate in a string");
    }
    unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
  }
  AppendUtf8(unit, &scratch_);
  return true;
}

bool JsonReader::Hex4(uint32_t* unit) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const int c = in_.Peek();
    uint32_t digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<uint32_t>(c - 'A' + 10);
    } else {
      return in_.Fail("\\u needs four hexadecimal digits");
    }
    in_.Take(static_cast<char>(c));
    value = value * 16 + digit;
  }
  *unit = value;
  return true;
}

bool JsonReader::Unsigned(std::string_view what, uint64_t* number) {
  Space();
  const std::string_view digits = in_.TakeWhile(IsDigit);
  if (digits.empty()) return Unexpected(what);
  if (digits.size() > 1 && digits[0] == '0') return in_.Fail("a number may not start with 0");
  uint64_t value = 0;
  for (const char c : digits) {
    if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
        __builtin_add_overflow(value, static_cast<uint64_t>(c - '0'), &value)) {
      return in_.Fail(absl::StrCat(AsAbsl(what), " does not fit 64 bits"));
    }
  }
  const int next = in_.Peek();
  if (next == '.' || next == 'e' || next == 'E') {
    return in_.Fail(absl::StrCat(AsAbsl(what), " expected, found a fraction or an exponent"));
  }
  *number = value;
  return true;
}

bool JsonReader::Number() {
  const uint64_t from = in_.offset();
  in_.Take('-');
  const std::string_view whole = in_.TakeWhile(IsDigit);
  if (whole.empty()) return Unexpected("a digit");
  if (whole.size() > 1 && whole[0] == '0') return in_.Fail("a number may not start with 0");
  if (in_.Take('.') && in_.TakeWhile(IsDigit).empty()) return Unexpected("a digit");
  if (in_.Take('e') || in_.Take('E')) {
    if (!in_.Take('+')) in_.Take('-');
    if (in_.TakeWhile(IsDigit).empty()) return Unexpected("a digit");
  }
  const std::string_view text = in_.Since(from);
  double value = 0;
  const absl::from_chars_result result =
      absl::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec == std::errc::result_out_of_range && std::abs(value) > 1) {
    return in_.Fail("a number is out of range");
  }
  return true;
}

bool JsonReader::Literal(std::string_view word) {
  for (const char c : word) {
    if (!in_.Take(c)) return Unexpected(word);
  }
  return true;
}

bool JsonReader::Skip() {
  std::bitset<kMaxDepth + 1> is_object;
  int open = 0;
  for (;;) {
    bool opened = false;
    std::string_view text;
    const int next = PeekValue();
    switch (next) {
      case '{':
      case '[': {
        if (depth_ + open + 1 > kMaxDepth) {
          return in_.Fail(absl::StrCat("JSON is nested deeper than ", kMaxDepth, " levels"));
        }
        in_.Take(static_cast<char>(next));
        is_object[static_cast<size_t>(open++)] = next == '{';
        opened = true;
        break;
      }
      case '"':
        if (!String("a string", &text)) return false;
        break;
      case 't':
        if (!Literal("true")) return false;
        break;
      case 'f':
        if (!Literal("false")) return false;
        break;
      case 'n':
        if (!Literal("null")) return false;
        break;
      default:
        if (next != '-' && (next < 0 || !IsDigit(static_cast<uint8_t>(next)))) {
          return Unexpected("a value");
        }
        if (!Number()) return false;
    }
    // Close whatever ends here, until another value is due.
    for (;;) {
      if (open == 0) return true;
      const bool object = is_object[static_cast<size_t>(open - 1)];
      Space();
      if (in_.Take(object ? '}' : ']')) {
        --open;
        opened = false;
        continue;
      }
      if (!opened && !in_.Take(',')) return Unexpected(object ? "',' or '}'" : "',' or ']'");
      if (object && !Key(&text)) return false;
      break;
    }
  }
}

bool JsonReader::End() {
  Space();
  if (in_.remaining() != 0) return Unexpected("the end of the JSON");
  return in_.ok();
}

}  // namespace modelhost
