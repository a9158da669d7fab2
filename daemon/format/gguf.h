// GGUF, versions 2 and 3, little-endian: metadata, tensor infos, then the padded data section.
//
// A file whose split.count is above 1 stands for its whole set PREFIX-00001-of-0000N.gguf.
// The index does arithmetic on general.alignment and split.* alone; all other metadata is text to
// it. Stricter than ggml: no size may overflow, every range lies inside its file. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

// What a file says about its place in a set.
struct GgufSplit {
  std::optional<uint64_t> number;   // split.no, from 0.
  std::optional<uint64_t> count;    // split.count
  std::optional<uint64_t> tensors;  // split.tensors.count, over all files.
  bool IsSet() const { return count.value_or(0) > 1; }
};

// "a/b-00002-of-00003.gguf" is {"a/b", 2, 3}.
struct GgufSetName {
  std::string prefix;
  uint64_t part = 0;  // From 1.
  uint64_t count = 0;
};
std::optional<GgufSetName> ParseGgufSetName(std::string_view name);
std::string FormatGgufSetName(const GgufSetName& name);

// By what the file says, or, for a later part that has split.no alone, by its name as well. A plain
// file that only has such a name is not.
bool IsPartOfSet(std::string_view name, const GgufSplit& split);

// Reads the metadata only.
absl::StatusOr<GgufSplit> ReadGgufSplit(std::string_view name, std::span<const std::byte> bytes);

// Fills an index that has `name` as its file 0: this file, or the whole set.
absl::Status ReadGguf(const std::string& name, std::span<const std::byte> bytes, FileSource& source,
                      TensorIndex& index);

}  // namespace modelhost
