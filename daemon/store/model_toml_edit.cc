#include "daemon/store/model_toml_edit.h"

#include <cstdint>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/toml_document.h"

namespace modelhost {
namespace {

constexpr absl::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Where a line and column (code points, both from 1) stand in `text`.
std::optional<size_t> OffsetOf(absl::string_view text, uint32_t line, uint32_t column) {
  size_t at = 0;
  for (uint32_t i = 1; i < line; ++i) {
    const size_t end = text.find('\n', at);
    if (end == absl::string_view::npos) return std::nullopt;
    at = end + 1;
  }
  for (uint32_t i = 1; i < column; ++i) {
    const size_t length = Utf8CharBytes(AsStd(text.substr(at)));
    if (length == 0) return std::nullopt;
    at += length;
  }
  return at;
}

absl::StatusOr<std::string> Edit(absl::string_view text, absl::string_view file,
                                 absl::string_view quoted) {
  auto top = ParseToml(text, file);
  if (!top.ok()) return top.status();
  for (const TomlEntry& entry : top->table) {
    if (entry.key != "residency") continue;
    const auto begin = OffsetOf(text, entry.value.line, entry.value.column);
    const auto end = OffsetOf(text, entry.value.end_line, entry.value.end_column);
    if (!begin.has_value() || !end.has_value() || *end < *begin) break;
    return absl::StrCat(text.substr(0, *begin), quoted, text.substr(*end));
  }
  // At the top, where no table header can have begun.
  return absl::StrCat("residency = ", quoted, "\n", text);
}

}  // namespace

absl::StatusOr<std::string> WithResidency(absl::string_view text, absl::string_view file,
                                          Residency residency) {
  if (absl::StartsWith(text, kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const auto before = ParseModelToml(text, file);
  if (!before.ok()) return before.status();
  auto edited = Edit(text, file, absl::StrCat("\"", ResidencyName(residency), "\""));
  if (!edited.ok()) return edited.status();
  // Positions come from another parser: prove the result before anybody keeps it.
  const auto after = ParseModelToml(*edited, file);
  if (!after.ok() || after->residency != residency) {
    return absl::InternalError(
        absl::StrCat(file, ": cannot change residency in place (edit the file by hand)"));
  }
  return edited;
}

}  // namespace modelhost
