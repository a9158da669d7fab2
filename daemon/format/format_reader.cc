#include "daemon/format/format_reader.h"

#include <utility>
#include <vector>

#include "daemon/format/gguf.h"
#include "daemon/format/safetensors.h"
#include "daemon/format/sharded.h"
#include "daemon/format/sniff.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

absl::StatusOr<TensorIndex> ReadSingleSafetensors(const std::string& name,
                                                  std::span<const std::byte> bytes) {
  TensorIndex index("safetensors");
  const uint32_t file = index.AddFile(name);
  std::vector<MetadataItem> metadata;
  absl::Status status = ReadSafetensors(name, bytes, file, index, metadata);
  if (!status.ok()) return status;
  for (MetadataItem& item : metadata) {
    index.AddMetadata(std::move(item.key), std::move(item.value));
  }
  return index;
}

}  // namespace

absl::StatusOr<TensorIndex> ReadModel(const std::string& name, FileSource& source) {
  if (!IsPlainRelativeName(name)) {
    return ModelError(Quoted(name), "not a plain relative name",
                      "a model may not name files outside its folder");
  }
  absl::StatusOr<std::span<const std::byte>> bytes = source.Open(name);
  if (!bytes.ok()) return bytes.status();
  if (bytes->empty()) return ModelError(name, "the file is empty", "get it again");
  const FileFormat format = SniffFormat(*bytes, name);
  switch (format) {
    case FileFormat::kSafetensors:
      return ReadSingleSafetensors(name, *bytes);
    case FileFormat::kSafetensorsIndex: {
      TensorIndex index("safetensors");
      index.AddFile(name);
      absl::Status status = ReadSharded(name, *bytes, source, index);
      if (!status.ok()) return status;
      return index;
    }
    case FileFormat::kGguf: {
      TensorIndex index("gguf");
      index.AddFile(name);
      absl::Status status = ReadGguf(name, *bytes, source, index);
      if (!status.ok()) return status;
      return index;
    }
    default:
      return RefuseFormat(name, format, *bytes);
  }
}

bool IsPlainRelativeName(absl::string_view name) {
  if (name.empty() || name.front() == '/') return false;
  for (const char c : name) {
    if (c == '\0' || c == '\\') return false;
  }
  std::string_view rest = AsStd(name);
  for (;;) {
    const size_t slash = rest.find('/');
    const std::string_view part = rest.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == std::string_view::npos) return true;
    rest.remove_prefix(slash + 1);
  }
}

}  // namespace modelhost
