// TOML text as a plain tree with source positions. toml++ itself stays in toml_document.cc: it is
// slow to compile.
//
// Errors are INVALID_ARGUMENT, "file:line: why". Nesting is bounded. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace modelhost {

struct TomlEntry;

struct TomlValue {
  enum class Kind { kString, kInteger, kFloat, kBoolean, kArray, kTable, kTime };
  Kind kind = Kind::kTable;
  std::string string;
  int64_t integer = 0;
  bool boolean = false;
  std::vector<TomlValue> array;
  std::vector<TomlEntry> table;  // In the order of the text.
  // Where the value stands: lines and columns (code points) from 1, the end exclusive.
  uint32_t line = 0;
  uint32_t column = 0;
  uint32_t end_line = 0;
  uint32_t end_column = 0;
};

struct TomlEntry {
  std::string key;
  uint32_t line = 0;
  TomlValue value;
};

// The top table. Texts beyond 1 MiB are refused.
absl::StatusOr<TomlValue> ParseToml(absl::string_view text, absl::string_view file);

// One entry being read: its place for messages, and its value in the type that is expected.
class TomlField {
 public:
  // All lent. `table` is the dotted path of the table it stands in; empty at the top.
  TomlField(absl::string_view file, absl::string_view table, const TomlEntry& entry)
      : file_(file), table_(table), entry_(entry) {}

  const std::string& key() const { return entry_.key; }
  const TomlValue& value() const { return entry_.value; }
  absl::string_view file() const { return file_; }
  std::string Path() const;  // "table.key": what stands in it has this as its table.
  // "file:line: key 'table.key': why".
  absl::Status Error(absl::string_view why) const;

  // Errors say what was expected and what was found.
  absl::StatusOr<std::string> String() const;
  absl::StatusOr<int64_t> Integer() const;
  absl::StatusOr<bool> Boolean() const;
  absl::StatusOr<std::vector<std::string>> Strings() const;

 private:
  absl::Status Expected(absl::string_view what) const;

  absl::string_view file_;
  absl::string_view table_;
  const TomlEntry& entry_;
};

}  // namespace modelhost
