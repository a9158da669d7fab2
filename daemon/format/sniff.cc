#include "daemon/format/sniff.h"

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/sharded.h"
#include "daemon/format/text.h"
#include "daemon/format/wire_reader.h"

namespace modelhost {
namespace {

constexpr std::string_view kIndexEnding = ".safetensors.index.json";

bool EndsWith(std::string_view name, std::string_view ending) {
  return absl::EndsWithIgnoreCase(AsAbsl(name), AsAbsl(ending));
}

bool AnyOf(std::string_view text, std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words) {
    if (text == word) return true;
  }
  return false;
}

// `magic` at `offset`.
bool HasAt(std::span<const std::byte> bytes, uint64_t offset, std::string_view magic) {
  ByteReader in("", "", bytes);
  std::string_view found;
  return in.Skip("", offset) && in.Text("", magic.size(), &found) && found == magic;
}

// The header's length could be one, and what follows looks like a header.
bool LooksLikeSafetensors(std::span<const std::byte> bytes, bool named) {
  ByteReader in("", "", bytes);
  uint64_t header = 0;
  if (!in.Little("", &header)) return false;
  // JSON text has no zero bytes, so a length that fits 32 bits is not text.
  return header <= UINT32_MAX && (in.Peek() == '{' || named);
}

// ONNX has no magic: a protobuf message whose top fields are those of ModelProto, with a graph.
bool LooksLikeOnnx(std::span<const std::byte> bytes) {
  constexpr int kFieldsLookedAt = 64;
  constexpr uint32_t kMaxField = 26;
  constexpr uint32_t kGraph = 7;
  ByteReader in("", "", bytes);
  WireReader wire(in);
  bool graph = false;
  WireField field;
  for (int i = 0; i < kFieldsLookedAt && wire.Next(&field); ++i) {
    if (field.number > kMaxField) return false;
    if (field.type != WireType::kVarint && field.type != WireType::kBytes) return false;
    graph = graph || field.Is(kGraph, WireType::kBytes);
    // A model that is cut in its graph is still an ONNX file.
    if (!wire.Skip(field)) return graph;
  }
  return graph && in.ok();
}

bool LooksLikeTensorRt(std::span<const std::byte> bytes) {
  if (HasAt(bytes, 0, "ptrt") || HasAt(bytes, 0, "ftrt")) return true;
  // Some exporters put a length and a JSON text in front.
  ByteReader in("", "", bytes);
  uint32_t length = 0;
  if (!in.Little("", &length) || in.Peek() != '{' || !in.Skip("", length)) return false;
  std::string_view magic;
  return in.Text("", 4, &magic) && AnyOf(magic, {"ptrt", "ftrt"});
}

bool LooksLikePickle(std::span<const std::byte> bytes) {
  ByteReader in("", "", bytes);
  uint8_t proto = 0;
  uint8_t version = 0;
  return in.Little("", &proto) && in.Little("", &version) && proto == 0x80 && version >= 2 &&
         version <= 5;
}

int FirstVisible(std::span<const std::byte> bytes) {
  ByteReader in("", "", bytes);
  in.TakeWhile([](uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; });
  return in.Peek();
}

// Content says nothing: what the name claims decides whose error the user sees.
FileFormat ByName(std::string_view name) {
  if (EndsWith(name, ".safetensors")) return FileFormat::kSafetensors;
  if (EndsWith(name, kIndexEnding)) return FileFormat::kSafetensorsIndex;
  if (EndsWith(name, ".gguf")) return FileFormat::kGguf;
  if (EndsWith(name, ".onnx")) return FileFormat::kOnnx;
  if (EndsWith(name, ".pt") || EndsWith(name, ".pth")) return FileFormat::kTorchLegacy;
  if (EndsWith(name, ".engine") || EndsWith(name, ".plan")) return FileFormat::kTensorRt;
  return FileFormat::kUnknown;
}

std::string_view FormatTitle(FileFormat format) {
  switch (format) {
    case FileFormat::kOnnx:
      return "ONNX";
    case FileFormat::kTorchZip:
      return "PyTorch (a ZIP archive)";
    case FileFormat::kTorchLegacy:
      return "PyTorch's legacy pickle or tar";
    case FileFormat::kTensorRt:
      return "TensorRT";
    case FileFormat::kSevenZip:
      return "7z";
    case FileFormat::kSafetensors:
      return "safetensors";
    case FileFormat::kSafetensorsIndex:
      return "an index of sharded safetensors";
    case FileFormat::kGguf:
      return "GGUF";
    case FileFormat::kUnknown:
    case FileFormat::kGitLfsPointer:
    case FileFormat::kLegacyGgml:
      break;
  }
  return "";
}

}  // namespace

FileFormat SniffFormat(std::span<const std::byte> bytes, absl::string_view absl_name) {
  const std::string_view name = AsStd(absl_name);
  if (HasAt(bytes, 0, "version https://git-lfs")) return FileFormat::kGitLfsPointer;
  if (HasAt(bytes, 0, "GGUF") || HasAt(bytes, 0, "FUGG")) return FileFormat::kGguf;
  for (const std::string_view magic :
       {"lmgg", "fmgg", "tjgg", "algg", "ggml", "ggmf", "ggjt", "ggla"}) {
    if (HasAt(bytes, 0, magic)) return FileFormat::kLegacyGgml;
  }
  if (LooksLikeSafetensors(bytes, EndsWith(name, ".safetensors"))) return FileFormat::kSafetensors;
  if (HasAt(bytes, 0, "PK\x03\x04") || HasAt(bytes, 0, "PK\x05\x06")) return FileFormat::kTorchZip;
  if (HasAt(bytes, 0, "7z\xbc\xaf\x27\x1c")) return FileFormat::kSevenZip;
  if (HasAt(bytes, 257, "ustar") || LooksLikePickle(bytes)) return FileFormat::kTorchLegacy;
  if (LooksLikeTensorRt(bytes)) return FileFormat::kTensorRt;
  if (FirstVisible(bytes) == '{' && (EndsWith(name, kIndexEnding) || HasWeightMap(bytes))) {
    return FileFormat::kSafetensorsIndex;
  }
  if (LooksLikeOnnx(bytes)) return FileFormat::kOnnx;
  return ByName(name);
}

bool HasWeightsExtension(std::string_view name) { return ByName(name) != FileFormat::kUnknown; }

bool IsServed(FileFormat format) {
  return format == FileFormat::kSafetensors || format == FileFormat::kSafetensorsIndex ||
         format == FileFormat::kGguf || format == FileFormat::kOnnx ||
         format == FileFormat::kTorchZip;
}

absl::Status RefuseFormat(std::string_view name, FileFormat format,
                          std::span<const std::byte> bytes) {
  switch (format) {
    case FileFormat::kGitLfsPointer:
      return ModelError(name, "a Git LFS pointer, not the file that it stands for",
                        "run `git lfs pull` in the clone, or download the file itself");
    case FileFormat::kLegacyGgml: {
      std::string_view magic;
      ByteReader in(name, "", bytes);
      in.Text("", 4, &magic);
      const std::string_view word = AnyOf(magic, {"lmgg", "ggml"})   ? "GGML"
                                    : AnyOf(magic, {"fmgg", "ggmf"}) ? "GGMF"
                                    : AnyOf(magic, {"tjgg", "ggjt"}) ? "GGJT"
                                                                     : "GGLA";
      return ModelError(name, absl::StrCat("a ", AsAbsl(word), " file, from before GGUF"),
                        "convert it to GGUF with the tools of llama.cpp, or get a GGUF file",
                        absl::StatusCode::kUnimplemented);
    }
    case FileFormat::kUnknown:
      if (FirstVisible(bytes) == '<') {
        return ModelError(name, "a web page or XML, not a model",
                          "the download failed: look at the file, then get it again");
      }
      return ModelError(name, "not a model file of any kind known here",
                        "safetensors, sharded safetensors, GGUF and ONNX are served");
    default:
      return ModelError(
          name,
          absl::StrCat(AsAbsl(FormatTitle(format)), " is not a format that this version serves",
                       IsServed(format) ? " in this place" : ""),
          "convert it to safetensors or GGUF", absl::StatusCode::kUnimplemented);
  }
}

}  // namespace modelhost
