#include "daemon/store/toml_document.h"

#include <toml++/toml.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 20;
// A dotted key nests one table per dot and cannot go over the end of its line. toml++ bounds the
// nesting of brackets, not this, and destroys its tree recursively.
constexpr size_t kMaxDotsPerLine = 512;

TomlValue::Kind KindOf(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return TomlValue::Kind::kString;
    case toml::node_type::integer:
      return TomlValue::Kind::kInteger;
    case toml::node_type::floating_point:
      return TomlValue::Kind::kFloat;
    case toml::node_type::boolean:
      return TomlValue::Kind::kBoolean;
    case toml::node_type::array:
      return TomlValue::Kind::kArray;
    case toml::node_type::table:
      return TomlValue::Kind::kTable;
    default:
      return TomlValue::Kind::kTime;
  }
}

TomlValue Convert(const toml::node& node) {
  TomlValue value;
  value.kind = KindOf(node);
  value.line = node.source().begin.line;
  value.column = node.source().begin.column;
  value.end_line = node.source().end.line;
  value.end_column = node.source().end.column;
  if (const auto* string = node.as_string()) {
    value.string = string->get();
  } else if (const auto* integer = node.as_integer()) {
    value.integer = integer->get();
  } else if (const auto* boolean = node.as_boolean()) {
    value.boolean = boolean->get();
  } else if (const auto* array = node.as_array()) {
    for (const toml::node& item : *array) value.array.push_back(Convert(item));
  } else if (const auto* table = node.as_table()) {
    for (const auto& [key, item] : *table) {
      value.table.push_back({std::string(key.str()), key.source().begin.line, Convert(item)});
    }
    std::stable_sort(value.table.begin(), value.table.end(),
                     [](const TomlEntry& a, const TomlEntry& b) { return a.line < b.line; });
  }
  return value;
}

absl::string_view KindName(TomlValue::Kind kind) {
  switch (kind) {
    case TomlValue::Kind::kString:
      return "a string";
    case TomlValue::Kind::kInteger:
      return "an integer";
    case TomlValue::Kind::kFloat:
      return "a number with a fraction";
    case TomlValue::Kind::kBoolean:
      return "a boolean";
    case TomlValue::Kind::kArray:
      return "an array";
    case TomlValue::Kind::kTable:
      return "a table";
    case TomlValue::Kind::kTime:
      return "a date or time";
  }
  return "something else";
}

}  // namespace

absl::StatusOr<TomlValue> ParseToml(absl::string_view text, absl::string_view file) {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": larger than ", kMaxTextBytes, " bytes"));
  }
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (std::count(line.begin(), line.end(), '.') > static_cast<ptrdiff_t>(kMaxDotsPerLine)) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ":", number, ": more than ", kMaxDotsPerLine, " dots in one line"));
    }
  }
  try {
    return Convert(toml::parse(AsStd(text)));
  } catch (const toml::parse_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ":", error.source().begin.line, ": ", AsAbsl(error.description())));
  }
}

std::string TomlField::Path() const {
  return absl::StrCat(table_, table_.empty() ? "" : ".", entry_.key);
}

absl::Status TomlField::Error(absl::string_view why) const {
  return absl::InvalidArgumentError(
      absl::StrCat(file_, ":", entry_.line, ": key '", Path(), "': ", why));
}

absl::Status TomlField::Expected(absl::string_view what) const {
  return Error(absl::StrCat("expected ", what, ", found ", KindName(entry_.value.kind)));
}

absl::StatusOr<std::string> TomlField::String() const {
  if (entry_.value.kind != TomlValue::Kind::kString) return Expected("a string");
  return entry_.value.string;
}

absl::StatusOr<int64_t> TomlField::Integer() const {
  if (entry_.value.kind != TomlValue::Kind::kInteger) return Expected("an integer");
  return entry_.value.integer;
}

absl::StatusOr<bool> TomlField::Boolean() const {
  if (entry_.value.kind != TomlValue::Kind::kBoolean) return Expected("true or false");
  return entry_.value.boolean;
}

absl::StatusOr<std::vector<std::string>> TomlField::Strings() const {
  if (entry_.value.kind != TomlValue::Kind::kArray) return Expected("an array of strings");
  std::vector<std::string> strings;
  for (const TomlValue& item : entry_.value.array) {
    if (item.kind != TomlValue::Kind::kString) {
      return Error(
          absl::StrCat("expected an array of strings, found ", KindName(item.kind), " in it"));
    }
    strings.push_back(item.string);
  }
  return strings;
}

}  // namespace modelhost
