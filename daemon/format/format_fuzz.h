// Shared by the fuzzers: what must hold for every index that a reader hands out.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "daemon/format/format_reader.h"
#include "daemon/format/text.h"

namespace modelhost::testing {

inline void Require(bool holds) {
  if (!holds) std::abort();
}

// Nothing from outside may break a line of a log, or a terminal.
inline bool IsOneLine(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  return IsUtf8(text);
}

// Every range lies in its file, every text is one line, names are UTF-8 without NUL.
inline void CheckIndex(const TensorIndex& index, FileSource& source) {
  Require(!index.files().empty());
  for (size_t i = 0; i < index.size(); ++i) {
    const TensorInfo tensor = index.at(i);
    Require(tensor.file < index.files().size());
    const auto bytes = source.Open(index.files()[tensor.file]);
    Require(bytes.ok());
    Require(tensor.offset <= bytes->size() && tensor.nbytes <= bytes->size() - tensor.offset);
    Require(abi::FindDType(tensor.dtype) != nullptr);
    Require(IsUtf8(tensor.name) && tensor.name.find('\0') == std::string_view::npos);
  }
  for (const std::string& warning : index.warnings()) Require(IsOneLine(warning));
  for (const MetadataItem& item : index.metadata()) {
    Require(IsUtf8(item.key) && IsUtf8(item.value));
  }
}

inline void CheckRead(const std::string& name, FileSource& source) {
  const absl::StatusOr<TensorIndex> index = ReadModel(name, source);
  if (index.ok()) {
    CheckIndex(*index, source);
    return;
  }
  const std::string text(index.status().message());
  Require(!text.empty() && text.size() < 4096 && IsOneLine(text));
}

}  // namespace modelhost::testing
