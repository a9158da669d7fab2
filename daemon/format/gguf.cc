#include "daemon/format/gguf.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "daemon/format/gguf_file.h"
#include "daemon/format/name_table.h"
#include "daemon/format/sniff.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kSetHint = "put the files of one set together, under their own names";
constexpr size_t kShownNames = 8;

struct Part {
  std::string name;
  std::span<const std::byte> bytes;
};

// The file that was asked for says what set it belongs to; its name says how the others are called.
absl::StatusOr<GgufSetName> SetOf(const std::string& name, const GgufSplit& split) {
  const std::optional<GgufSetName> set = ParseGgufSetName(name);
  if (!set.has_value()) {
    return ModelError(
        name,
        absl::StrCat("part of a set of ", split.count.value_or(0),
                     " files, but its name does not end like \"-00001-of-00002.gguf\""),
        "give the files of the set their own names back");
  }
  if (!split.number.has_value()) return ModelError(name, "has split.count, but no split.no", "");
  const uint64_t count = split.count.value_or(set->count);
  if (set->count != count || set->part != *split.number + 1) {
    return ModelError(name,
                      absl::StrCat("is part ", *split.number + 1, " of ", count,
                                   ", but is named part ", set->part, " of ", set->count),
                      kSetHint);
  }
  return *set;
}

absl::StatusOr<std::vector<Part>> OpenSet(const std::string& name, GgufSetName set,
                                          std::span<const std::byte> bytes, FileSource& source) {
  std::vector<Part> parts;
  std::vector<std::string> missing;
  size_t missing_count = 0;
  const uint64_t asked = set.part;
  for (set.part = 1; set.part <= set.count; ++set.part) {
    Part part{FormatGgufSetName(set), bytes};
    if (set.part != asked) {
      absl::StatusOr<std::span<const std::byte>> opened = source.Open(part.name);
      if (absl::IsNotFound(opened.status())) {
        if (++missing_count <= kShownNames) missing.push_back(Quoted(part.name));
        continue;
      }
      if (!opened.ok()) return opened.status();
      part.bytes = *opened;
      const FileFormat format = SniffFormat(part.bytes, part.name);
      if (format != FileFormat::kGguf) return RefuseFormat(part.name, format, part.bytes);
    }
    parts.push_back(std::move(part));
  }
  if (missing_count > 0) {
    return ModelError(name,
                      absl::StrCat("files of the set are missing: ", absl::StrJoin(missing, ", "),
                                   missing_count > kShownNames
                                       ? absl::StrCat(" and ", missing_count - kShownNames, " more")
                                       : ""),
                      "get the missing files");
  }
  return parts;
}

absl::Status CheckPart(const Part& part, const GgufSplit& split, size_t i, size_t count) {
  if (split.number.value_or(UINT64_MAX) != i) {
    return ModelError(part.name,
                      split.number.has_value()
                          ? absl::StrCat("split.no is ", *split.number, ", but its name says ", i)
                          : "has no split.no",
                      kSetHint);
  }
  if (split.count.value_or(count) != count) {
    return ModelError(
        part.name,
        absl::StrCat("split.count is ", *split.count, ", but the set has ", count, " files"),
        kSetHint);
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<GgufSetName> ParseGgufSetName(std::string_view name) {
  // "-00001-of-00002.gguf"
  constexpr size_t kDigits = 5;
  constexpr std::string_view kOf = "-of-";
  constexpr std::string_view kEnd = ".gguf";
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits + kEnd.size();
  if (name.size() <= kTail) return std::nullopt;
  const std::string_view tail = name.substr(name.size() - kTail);
  const std::string_view part = tail.substr(1, kDigits);
  const std::string_view count = tail.substr(1 + kDigits + kOf.size(), kDigits);
  const auto digits = [](std::string_view text) {
    return text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  GgufSetName set;
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf ||
      tail.substr(kTail - kEnd.size()) != kEnd || !digits(part) || !digits(count) ||
      !absl::SimpleAtoi(AsAbsl(part), &set.part) || !absl::SimpleAtoi(AsAbsl(count), &set.count)) {
    return std::nullopt;
  }
  if (set.part == 0 || set.part > set.count) return std::nullopt;
  set.prefix = name.substr(0, name.size() - kTail);
  return set;
}

std::string FormatGgufSetName(const GgufSetName& name) {
  return absl::StrFormat("%s-%05d-of-%05d.gguf", name.prefix, name.part, name.count);
}

bool IsPartOfSet(std::string_view name, const GgufSplit& split) {
  if (split.IsSet()) return true;
  const auto set = ParseGgufSetName(name);
  return split.number.has_value() && !split.count.has_value() && set.has_value() && set->count > 1;
}

absl::StatusOr<GgufSplit> ReadGgufSplit(std::string_view name, std::span<const std::byte> bytes) {
  GgufSplit split;
  absl::Status status = ReadGgufFile(name, bytes, {}, &split);
  if (!status.ok()) return status;
  return split;
}

absl::Status ReadGguf(const std::string& name, std::span<const std::byte> bytes, FileSource& source,
                      TensorIndex& index) {
  absl::StatusOr<GgufSplit> asked = ReadGgufSplit(name, bytes);
  if (!asked.ok()) return asked.status();
  if (!IsPartOfSet(name, *asked)) {
    GgufSplit unused;
    return ReadGgufFile(name, bytes, {&index, &index, 0}, &unused);
  }

  absl::StatusOr<GgufSetName> set = SetOf(name, *asked);
  if (!set.ok()) return set.status();
  absl::StatusOr<std::vector<Part>> parts = OpenSet(name, *set, bytes, source);
  if (!parts.ok()) return parts.status();
  std::optional<uint64_t> total;
  for (size_t i = 0; i < parts->size(); ++i) {
    const Part& part = (*parts)[i];
    // File 0 is the one asked for, wherever it stands in the set.
    const uint32_t file = part.name == name ? 0 : index.AddFile(part.name);
    GgufSplit split;
    absl::Status status =
        ReadGgufFile(part.name, part.bytes, {&index, i == 0 ? &index : nullptr, file}, &split);
    if (status.ok()) status = CheckPart(part, split, i, parts->size());
    if (!status.ok()) return status;
    if (i == 0 && !split.tensors.has_value()) {
      return ModelError(part.name, "the first file of the set has no split.tensors.count",
                        kSetHint);
    }
    if (i == 0) total = split.tensors;
    if (split.tensors.value_or(*total) != *total) {
      return ModelError(part.name,
                        absl::StrCat("split.tensors.count is ", *split.tensors,
                                     ", but the first file says ", *total),
                        kSetHint);
    }
  }
  if (*total != index.size()) {
    return ModelError(name,
                      absl::StrCat("the files of the set have ", index.size(),
                                   " tensors, but split.tensors.count is ", *total),
                      kSetHint);
  }
  std::vector<std::string_view> names;
  names.reserve(index.size());
  for (size_t i = 0; i < index.size(); ++i) names.push_back(index.at(i).name);
  if (const auto pair = NameTable(names).Duplicate()) {
    return ModelError(name,
                      absl::StrCat("duplicate tensor name: ", Quoted(names[pair->first]), " is in ",
                                   Quoted(index.files()[index.at(pair->first).file]), " and in ",
                                   Quoted(index.files()[index.at(pair->second).file])),
                      kSetHint);
  }
  return absl::OkStatus();
}

}  // namespace modelhost
