#include "client/modelctl/import_metadata.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

constexpr size_t kMaxKeyBytes = 65535;
constexpr uint32_t kQuantizationVersion = 2;  // Of ggml's block types.
constexpr char kArchitecture[] = "general.architecture";

// ggml's number for "mostly of this type".
uint32_t GgufFileType(const ImportChoices& choices) {
  if (choices.quantize_q8) return 7;
  if (choices.dtype == abi::DType::kF32) return 0;
  return choices.dtype == abi::DType::kF16 ? 1 : 32;
}

// {"type":"string","count":32000}: the index has counted a list of a GGUF file, not kept it.
bool IsCountedList(const TensorIndex& index, std::string_view value) {
  return index.format() == "gguf" && absl::StartsWith(AsAbsl(value), "{\"type\":\"") &&
         absl::StrContains(AsAbsl(value), "\",\"count\":");
}

}  // namespace

std::vector<MetadataItem> SafetensorsMetadata(const MetadataSource& from) {
  std::vector<MetadataItem> items;
  for (const AddedKey& added : from.added) items.push_back({added.key, added.value});
  if (from.index.format() == "torch") items.push_back({"format", "pt"});
  size_t left = 0;
  for (const MetadataItem& item : from.index.metadata()) {
    if (IsCountedList(from.index, item.value)) {
      ++left;
    } else {
      items.push_back(item);
    }
  }
  if (left > 0) {
    from.note(absl::StrCat(left, left == 1 ? " long list" : " long lists",
                           " of the metadata (a vocabulary) cannot be kept in safetensors"));
  }
  return items;
}

absl::StatusOr<GgufKeys> GgufMetadata(const MetadataSource& from, const ImportChoices& choices) {
  GgufKeys keys;
  if (from.index.format() == "gguf") {
    // Of a set the first part has the keys.
    const std::string& first =
        *std::min_element(from.index.files().begin(), from.index.files().end());
    const absl::StatusOr<std::span<const std::byte>> bytes = from.files.Open(first);
    if (!bytes.ok()) return bytes.status();
    if (absl::Status status = keys.CopyFrom(first, *bytes); !status.ok()) return status;
  } else {
    for (const MetadataItem& item : from.index.metadata()) {
      if (item.key.empty() || item.key.size() > kMaxKeyBytes || IsReservedGgufKey(item.key)) {
        from.note(absl::StrCat("the metadata key ", Quoted(item.key), " cannot be kept in GGUF"));
      } else if (!keys.Has(item.key)) {
        keys.SetText(item.key, item.value);
      }
    }
  }
  if (choices.quantize_q8) keys.SetU32("general.quantization_version", kQuantizationVersion);
  if (choices.quantize_q8 || choices.dtype.has_value()) {
    keys.SetU32("general.file_type", GgufFileType(choices));
  }
  for (const AddedKey& added : from.added) {
    if (keys.SetValue(added.key, added.type, added.value)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--meta ", added.key, ": ", Quoted(added.value), " is not of its type"));
  }
  if (!keys.Has(kArchitecture)) {
    keys.SetText(kArchitecture, "unknown");
    from.note(
        "the source does not say its architecture, and programs that run GGUF files want "
        "to know (--meta general.architecture=NAME)");
  }
  return keys;
}

}  // namespace modelhost::modelctl
