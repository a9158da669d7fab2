#include "daemon/format/onnx_external.h"

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/sharded.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kExternalHint =
    "the model is damaged or its writer is broken: get it again, or export it again";
constexpr std::string_view kFolderHint = "a model may not name files outside its folder";
// ONNX Runtime marks data in its own memory like this; in a file it is an attack or a mistake.
constexpr std::string_view kMemoryMarker = "*/_ORT_MEM_ADDR_/*";

absl::Status TensorError(std::string_view model, const OnnxTensor& tensor, std::string_view why,
                         std::string_view hint = kExternalHint) {
  return ModelError(
      model,
      absl::StrCat("at byte ", tensor.begin, ": tensor ", Quoted(tensor.name), " ", AsAbsl(why)),
      hint);
}

// Decimal digits that fit 63 bits: no sign, no blanks.
absl::StatusOr<uint64_t> ReadNumber(std::string_view model, const OnnxTensor& tensor,
                                    std::string_view key, std::string_view text) {
  uint64_t number = 0;
  bool good = !text.empty();
  for (const char c : text) {
    good = good && c >= '0' && c <= '9' && !__builtin_mul_overflow(number, 10, &number) &&
           !__builtin_add_overflow(number, static_cast<uint64_t>(c - '0'), &number);
  }
  if (!good || number > static_cast<uint64_t>(INT64_MAX)) {
    return TensorError(model, tensor,
                       absl::StrCat("has the external data ", AsAbsl(key), " ", Quoted(text),
                                    ", which is no decimal number of bytes"));
  }
  return number;
}

// Without "." and empty parts; empty when what is left is no file inside the folder.
std::string PlainLocation(std::string_view location) {
  if (location.empty() || location.front() == '/' || location.back() == '/') return {};
  std::string plain;
  std::string_view part;
  for (std::string_view rest = location; !rest.empty();) {
    const size_t slash = rest.find('/');
    part = rest.substr(0, slash);
    rest.remove_prefix(slash == std::string_view::npos ? rest.size() : slash + 1);
    if (part.empty() || part == ".") continue;
    if (!plain.empty()) plain += '/';
    plain += part;
  }
  if (part == "." || !IsPlainRelativeName(plain)) return {};
  return plain;
}

}  // namespace

absl::StatusOr<std::string> OnnxDataFileName(std::string_view model, const OnnxTensor& tensor) {
  if (!tensor.external.twice.empty()) {
    return TensorError(
        model, tensor,
        absl::StrCat("has the external data key ", AsAbsl(tensor.external.twice), " twice"));
  }
  if (!tensor.external.location.has_value()) {
    return TensorError(model, tensor, "has its data in another file, but no location says where");
  }
  const std::string_view text = *tensor.external.location;
  // A name that is not UTF-8 could not be listed as it is.
  const bool readable = !text.empty() && text.front() != '#' && IsUtf8(text);
  std::string plain = readable ? PlainLocation(text) : std::string();
  if (plain.empty()) {
    return TensorError(model, tensor,
                       absl::StrCat("has its data in ", Quoted(text),
                                    ", which is no plain name of a file in this folder"),
                       kFolderHint);
  }
  if (plain == kMemoryMarker) {
    return TensorError(model, tensor, "claims that its data is in the memory of ONNX Runtime",
                       "the model was not saved as a file should be: export it again");
  }
  return plain;
}

absl::StatusOr<OnnxDataFiles::DataFile> OnnxDataFiles::Open(const OnnxTensor& tensor,
                                                            std::string_view location) {
  absl::StatusOr<std::string> plain = OnnxDataFileName(model_, tensor);
  if (!plain.ok()) return plain.status();
  const std::string name = SiblingName(model_, *plain);
  auto known = by_name_.find(name);
  if (known == by_name_.end()) {
    const absl::StatusOr<std::span<const std::byte>> bytes = source_.Open(name);
    if (absl::IsNotFound(bytes.status())) {
      return TensorError(model_, tensor,
                         absl::StrCat("has its data in ", Quoted(name), ", which is missing"),
                         "get the missing file: it belongs to the model");
    }
    if (!bytes.ok()) {
      return SourceError(model_,
                         absl::StrCat("at byte ", tensor.begin, ": tensor ", Quoted(tensor.name),
                                      " has its data in ", Quoted(name)),
                         bytes.status(), "it has to be a file that can be read");
    }
    const uint32_t number = name == model_ ? 0 : index_.AddFile(name);
    known = by_name_.emplace(name, DataFile{number, bytes->size()}).first;
  }
  by_location_.emplace(location, known->second);
  return known->second;
}

absl::Status OnnxDataFiles::Place(const OnnxTensor& tensor, TensorInfo* info) {
  const OnnxExternalData& data = tensor.external;
  const std::string_view text = data.location.value_or(std::string_view());
  absl::StatusOr<DataFile> file = absl::InternalError("");
  const auto known = by_location_.find(AsAbsl(text));
  if (known != by_location_.end() && data.twice.empty()) {
    file = known->second;
  } else {
    file = Open(tensor, text);
  }
  if (!file.ok()) return file.status();

  uint64_t at = 0;
  if (data.offset.has_value()) {
    const auto offset = ReadNumber(model_, tensor, "offset", *data.offset);
    if (!offset.ok()) return offset.status();
    at = *offset;
  }
  uint64_t size = tensor.nbytes;
  if (data.length.has_value()) {
    const auto length = ReadNumber(model_, tensor, "length", *data.length);
    if (!length.ok()) return length.status();
    size = *length;
  }
  if (at > file->bytes || size > file->bytes - at) {
    return TensorError(
        model_, tensor,
        absl::StrCat("has ", size, " bytes at offset ", at, " of ", Quoted(text),
                     ", but that file has ", file->bytes, " bytes"),
        "the data file is cut short or of another model: get the files of the model again");
  }
  if (size != tensor.nbytes) {
    return TensorError(model_, tensor,
                       absl::StrCat("has a length of ", size,
                                    " bytes, but its type and shape need ", tensor.nbytes));
  }
  info->dtype = tensor.dtype->dtype;
  info->shape = tensor.dims;
  info->file = file->number;
  info->offset = at;
  info->nbytes = tensor.nbytes;
  return absl::OkStatus();
}

}  // namespace modelhost
