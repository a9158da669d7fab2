#include "daemon/format/format_reader.h"

#include <utility>
#include <vector>

#include "daemon/format/gguf.h"
#include "daemon/format/onnx.h"
#include "daemon/format/safetensors.h"
#include "daemon/format/sharded.h"
#include "daemon/format/sniff.h"
#include "daemon/format/tensorrt.h"
#include "daemon/format/text.h"
#include "daemon/format/torch_zip.h"

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

// A reader that fills an index whose file 0 is `name`.
template <typename Reader>
absl::StatusOr<TensorIndex> ReadInto(const char* format, const std::string& name, Reader read) {
  TensorIndex index(format);
  index.AddFile(name);
  if (absl::Status status = read(index); !status.ok()) return status;
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
  if (absl::Status named = CheckPlanName(name, format, *bytes); !named.ok()) return named;
  switch (format) {
    case FileFormat::kSafetensors:
      return ReadSingleSafetensors(name, *bytes);
    case FileFormat::kSafetensorsIndex:
      return ReadInto("safetensors", name,
                      [&](TensorIndex& index) { return ReadSharded(name, *bytes, source, index); });
    case FileFormat::kGguf:
      return ReadInto("gguf", name,
                      [&](TensorIndex& index) { return ReadGguf(name, *bytes, source, index); });
    case FileFormat::kOnnx:
      return ReadInto("onnx", name,
                      [&](TensorIndex& index) { return ReadOnnx(name, *bytes, source, index); });
    case FileFormat::kTorchZip:
      return ReadInto("torch", name,
                      [&](TensorIndex& index) { return ReadTorchZip(name, *bytes, 0, index); });
    case FileFormat::kTensorRt:
      return ReadInto("tensorrt", name,
                      [&](TensorIndex& index) { return ReadTensorRt(name, *bytes, index); });
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
