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

constexpr uint32_t kOnnxGraph = 7;
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

bool IsPlanName(std::string_view name) {
  return EndsWith(name, ".engine") || EndsWith(name, ".plan") || EndsWith(name, ".trt");
}

// The header's length could be one, and what follows looks like a header. Under a plan's name that
// takes more, since an unknown plan can start with any bytes.
bool LooksLikeSafetensors(std::span<const std::byte> bytes, std::string_view name) {
  ByteReader in("", "", bytes);
  uint64_t header = 0;
  // JSON text has no zero bytes, so a length that fits 32 bits is not text.
  if (!in.Little("", &header) || header > UINT32_MAX) return false;
  if (EndsWith(name, ".safetensors")) return true;
  if (!in.Take('{') || !IsPlanName(name)) return in.offset() > sizeof(header);
  in.TakeWhile([](uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; });
  return in.remaining() == 0 || in.Peek() == '"' || in.Peek() == '}';
}

// ONNX has no magic: a protobuf message whose top fields are those of ModelProto, with a graph.
bool LooksLikeOnnx(std::span<const std::byte> bytes) {
  constexpr int kFieldsLookedAt = 64;
  constexpr uint32_t kMaxField = 26;
  constexpr uint32_t kIrVersion = 1;
  ByteReader in("", "", bytes);
  WireReader wire(in);
  bool version = false;
  bool graph = false;
  WireField field;
  for (int i = 0; i < kFieldsLookedAt && wire.Next(&field); ++i) {
    if (field.number > kMaxField) return false;
    if (field.type != WireType::kVarint && field.type != WireType::kBytes) return false;
    version = version || field.Is(kIrVersion, WireType::kVarint);
    graph = graph || field.Is(kOnnxGraph, WireType::kBytes);
    // A model that is cut in its graph is still an ONNX file. Raw data that starts with the byte of
    // a graph is not.
    if (!wire.Skip(field)) return version && graph;
  }
  return graph && in.ok();
}

// True for fields of a GraphProto up to the end of `content`, or up to where the file is cut.
bool IsOnnxGraph(std::span<const std::byte> content, bool cut) {
  ByteReader in("", "", content);
  WireReader wire(in);
  bool known = false;
  WireField field;
  while (wire.Next(&field)) {
    for (const uint32_t number : {1, 2, 5, 11, 12, 13, 15}) {
      known = known || field.Is(number, WireType::kBytes);
    }
    if (!wire.Skip(field)) break;
  }
  return known && (cut || in.ok());
}

// A model under a plan's name can be made to look like something else by what stands in front of
// its graph, so every field is looked at, and the graph itself.
bool HasOnnxGraph(std::span<const std::byte> bytes) {
  ByteReader in("", "", bytes);
  WireReader wire(in);
  bool graph = false;
  WireField field;
  while (wire.Next(&field)) {
    if (field.Is(kOnnxGraph, WireType::kBytes)) {
      graph = true;
      ByteReader value("", "", bytes.subspan(in.offset()));
      uint64_t length = 0;
      if (!WireReader(value).Varint("", &length)) return false;
      const bool cut = length > value.remaining();
      std::string_view content;
      if (!value.Text("", cut ? value.remaining() : length, &content)) return false;
      if (IsOnnxGraph(std::as_bytes(std::span(content)), cut)) return true;
    }
    if (!wire.Skip(field)) return false;
  }
  return graph && in.ok();
}

// Some exporters put a length and a JSON text in front of a plan.
bool HasPlanBehindJson(std::span<const std::byte> bytes) {
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

// Protocols 0 and 1 have no mark at the start: a container, or the name of a global.
bool LooksLikeOldPickle(std::span<const std::byte> bytes) {
  for (const std::string_view start :
       {"(d", "(l", "(t", "(i", "(c", "}q", "]q", "}(", "](", "}.", "]."}) {
    if (HasAt(bytes, 0, start)) return true;
  }
  ByteReader in("", "", bytes);
  const auto name = [&in] {
    const std::string_view text = in.TakeWhile([](uint8_t c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             c == '_' || c == '.';
    });
    return !text.empty() && in.Take('\n');
  };
  return in.Take('c') && name() && name();
}

// The end record of a ZIP archive, with a comment or without, where the file ends.
bool EndsLikeZip(std::span<const std::byte> bytes) {
  constexpr uint64_t kRecordBytes = 22;
  constexpr uint64_t kMostBytes = kRecordBytes + UINT16_MAX;
  ByteReader in("", "", bytes);
  std::string_view tail;
  if (in.size() > kMostBytes && !in.Skip("", in.size() - kMostBytes)) return false;
  if (!in.Text("", in.remaining(), &tail)) return false;
  const size_t at = tail.rfind("PK\x05\x06");
  return at != std::string_view::npos && tail.size() - at >= kRecordBytes;
}

constexpr std::string_view kSevenZipMagic = "7z\xbc\xaf\x27\x1c";
constexpr std::string_view kTorchPreview = "PYTORCH1";
constexpr std::string_view kLegacyHint =
    "load it in Python with torch.load(..., weights_only=True) and torch.save its state_dict() "
    "again with a current version, or save it as safetensors";
constexpr uint64_t kTarMagicAt = 257;

// What torch.save wrote before it wrote ZIP archives, and what wraps checkpoints.
absl::Status RefuseTorch(std::string_view name, std::span<const std::byte> bytes) {
  const auto refuse = [&](std::string_view why, std::string_view hint = kLegacyHint) {
    return ModelError(name, why, hint, absl::StatusCode::kUnimplemented);
  };
  if (HasAt(bytes, 0, kSevenZipMagic)) {
    return refuse("a 7z archive, not a checkpoint", "unpack it, and check where it comes from");
  }
  if (HasAt(bytes, kTarMagicAt, "ustar")) {
    return refuse(
        "a tar archive: a legacy checkpoint of PyTorch before 0.1.10, or no checkpoint at all",
        "load it with a PyTorch that still reads it, where it is trusted, and save it as "
        "safetensors");
  }
  // The number 0x1950a86a20f9469cfc6c after PROTO 2.
  if (HasAt(bytes, 2, "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19")) {
    return refuse("a legacy pickle checkpoint of PyTorch, from before its ZIP archives (1.6)");
  }
  if (HasAt(bytes, 0, kTorchPreview)) return refuse("a preview format of PyTorch before 1.0");
  if (LooksLikePickle(bytes) || LooksLikeOldPickle(bytes)) {
    return refuse("a bare pickle, legacy of PyTorch or of another program, not a ZIP archive");
  }
  if (EndsLikeZip(bytes)) {
    return ModelError(name, "the ZIP archive of a checkpoint with other bytes in front of it",
                      "the file is damaged, or made to be read in two ways: get it again");
  }
  return ModelError(name, "named like a PyTorch checkpoint, but not a ZIP archive of torch.save",
                    "the file is damaged, or a legacy format: load it in Python with "
                    "weights_only=True and torch.save it again");
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
  if (IsPlanName(name)) return FileFormat::kTensorRt;
  return FileFormat::kUnknown;
}

std::string_view FormatTitle(FileFormat format) {
  switch (format) {
    case FileFormat::kOnnx:
      return "ONNX";
    case FileFormat::kTorchZip:
      return "PyTorch (a ZIP archive)";
    case FileFormat::kTensorRt:
      return "TensorRT";
    case FileFormat::kSafetensors:
      return "safetensors";
    case FileFormat::kSafetensorsIndex:
      return "an index of sharded safetensors";
    case FileFormat::kGguf:
      return "GGUF";
    case FileFormat::kUnknown:
    case FileFormat::kGitLfsPointer:
    case FileFormat::kLegacyGgml:
    case FileFormat::kTorchLegacy:
    case FileFormat::kSevenZip:
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
  // What could be a header's length too goes before safetensors only where that is longer than any
  // may be, or where no header follows: an archive has no '{' there, a pickle and a tar may.
  if (HasAt(bytes, 0, "ptrt") || HasAt(bytes, 0, "ftrt")) return FileFormat::kTensorRt;
  const bool member = HasAt(bytes, 0, "PK\x03\x04") && !HasAt(bytes, sizeof(uint64_t), "{");
  if (member || HasAt(bytes, 0, "PK\x05\x06")) return FileFormat::kTorchZip;
  if (LooksLikeSafetensors(bytes, name)) return FileFormat::kSafetensors;
  if (HasAt(bytes, 0, "PK\x03\x04")) return FileFormat::kTorchZip;
  if (HasAt(bytes, 0, kSevenZipMagic)) return FileFormat::kSevenZip;
  if (HasAt(bytes, kTarMagicAt, "ustar") || HasAt(bytes, 0, kTorchPreview) ||
      LooksLikePickle(bytes)) {
    return FileFormat::kTorchLegacy;
  }
  if (HasPlanBehindJson(bytes)) return FileFormat::kTensorRt;
  if (FirstVisible(bytes) == '{' && (EndsWith(name, kIndexEnding) || HasWeightMap(bytes))) {
    return FileFormat::kSafetensorsIndex;
  }
  if (LooksLikeOnnx(bytes) || (IsPlanName(name) && HasOnnxGraph(bytes))) return FileFormat::kOnnx;
  return ByName(name);
}

bool MayBeCheckpoint(std::string_view name, std::span<const std::byte> zip) {
  for (const std::string_view ending : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (EndsWith(name, ending)) return true;
  }
  // torch.save writes data.pkl first; the name's length is at byte 26 of a local header.
  ByteReader in("", "", zip);
  uint16_t name_size = 0;
  std::string_view member;
  return in.Skip("", 26) && in.Little("", &name_size) && in.Skip("", 2) &&
         in.Text("", name_size, &member) && EndsWith(member, "/data.pkl");
}

bool HasWeightsExtension(std::string_view name) { return ByName(name) != FileFormat::kUnknown; }

bool IsServed(FileFormat format) {
  return format == FileFormat::kSafetensors || format == FileFormat::kSafetensorsIndex ||
         format == FileFormat::kGguf || format == FileFormat::kOnnx ||
         format == FileFormat::kTorchZip || format == FileFormat::kTensorRt;
}

absl::Status CheckPlanName(std::string_view name, FileFormat format,
                           std::span<const std::byte> bytes) {
  if (!IsPlanName(name) || format == FileFormat::kTensorRt) return absl::OkStatus();
  const std::string_view title = FormatTitle(format);
  if (title.empty()) return RefuseFormat(name, format, bytes);
  return ModelError(name, absl::StrCat(AsAbsl(title), " under the name of a TensorRT plan"),
                    "build an engine from it, or give the file the ending of what it is");
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
      // Names that data of any kind has too.
      if ((EndsWith(name, ".bin") || EndsWith(name, ".ckpt")) &&
          (LooksLikeOldPickle(bytes) || EndsLikeZip(bytes))) {
        return RefuseTorch(name, bytes);
      }
      if (FirstVisible(bytes) == '<') {
        return ModelError(name, "a web page or XML, not a model",
                          "the download failed: look at the file, then get it again");
      }
      return ModelError(
          name, "not a model file of any kind known here",
          "safetensors, GGUF, ONNX, PyTorch checkpoints and TensorRT plans are served");
    case FileFormat::kTorchLegacy:
    case FileFormat::kSevenZip:
      return RefuseTorch(name, bytes);
    default:
      return ModelError(
          name,
          absl::StrCat(AsAbsl(FormatTitle(format)), " is not a format that this version serves",
                       IsServed(format) ? " in this place" : ""),
          "convert it to safetensors or GGUF", absl::StatusCode::kUnimplemented);
  }
}

}  // namespace modelhost
