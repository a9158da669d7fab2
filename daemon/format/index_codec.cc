#include "daemon/format/index_codec.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"

namespace modelhost {
namespace {

// Raised with every change of the layout: a daemon may not talk to another build's indexer.
constexpr uint64_t kRequestMagic = 0x3172'7164'6e69'686d;
constexpr uint64_t kAnswerMagic = 0x3173'6e61'6e69'686d;
constexpr uint32_t kMaxAnswerRank = 1U << 20;
constexpr uint64_t kMaxRefusalBytes = 8192;
// Readers bound what they say besides the tensors; so many of each are more than any of them says.
constexpr uint32_t kMaxWarnings = 10'000;
constexpr uint32_t kMaxMetadata = 1'000'000;
constexpr uint32_t kMappable = 1;
constexpr uint32_t kStrided = 2;
// The least bytes of an entry: a count that needs more than came is refused at once.
constexpr uint64_t kMinTensorAnswerBytes = 4 * 6 + 8 * 2;

class Encoder {
 public:
  explicit Encoder(absl::FunctionRef<bool(std::string_view)> put) : put_(put) {}
  void Number32(uint64_t value) { Put(value, 4); }
  void Number64(uint64_t value) { Put(value, 8); }
  void Text(std::string_view text) {
    Number32(text.size());
    piece_.append(text);
    if (piece_.size() >= kPieceBytes) Flush();
  }
  bool Flush() {
    ok_ = ok_ && put_(piece_);
    piece_.clear();
    return ok_;
  }

 private:
  static constexpr size_t kPieceBytes = size_t{64} << 10;
  void Put(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) piece_ += static_cast<char>(value >> (8 * i) & 0xff);
  }

  const absl::FunctionRef<bool(std::string_view)> put_;
  std::string piece_;
  bool ok_ = true;
};

bool SizedText(ByteReader& in, std::string_view what, std::string* text) {
  uint32_t bytes = 0;
  std::string_view view;
  if (!in.Little(what, &bytes) || !in.Text(what, bytes, &view)) return false;
  text->assign(view);
  return true;
}

bool SizedUtf8(ByteReader& in, std::string_view what, std::string* text) {
  if (!SizedText(in, what, text)) return false;
  return IsUtf8(*text) || in.Fail(absl::StrCat(AsAbsl(what), " is not UTF-8"));
}

bool Count(ByteReader& in, std::string_view what, uint64_t least_bytes, uint32_t* count) {
  if (!in.Little(what, count)) return false;
  if (*count <= in.remaining() / least_bytes) return true;
  return in.Fail(absl::StrCat(AsAbsl(what), ": ", *count, " do not fit into what came"));
}

void PutIndex(const ComponentIndex& component, Encoder& out) {
  const TensorIndex& index = component.index;
  out.Text(component.name);
  out.Text(index.format());
  out.Number32(index.files().size());
  for (const std::string& file : index.files()) out.Text(file);
  out.Number32(index.size());
  for (size_t i = 0; i < index.size(); ++i) {
    const TensorInfo tensor = index.at(i);
    out.Text(tensor.name);
    out.Number32(static_cast<uint32_t>(tensor.dtype));
    out.Number32(tensor.file);
    out.Number64(tensor.offset);
    out.Number64(tensor.nbytes);
    out.Number32((tensor.mappable ? kMappable : 0) | (tensor.strides.empty() ? 0 : kStrided));
    out.Number32(tensor.shape.size());
    for (const int64_t dim : tensor.shape) out.Number64(static_cast<uint64_t>(dim));
    for (const int64_t stride : tensor.strides) out.Number64(static_cast<uint64_t>(stride));
    out.Text(tensor.reason);
  }
  out.Number32(index.metadata().size());
  for (const MetadataItem& item : index.metadata()) {
    out.Text(item.key);
    out.Text(item.value);
  }
  out.Number32(index.warnings().size());
  for (const std::string& warning : index.warnings()) out.Text(warning);
}

bool IsKnownFormat(std::string_view format) {
  for (const std::string_view known : {"safetensors", "gguf", "onnx", "torch", "tensorrt"}) {
    if (format == known) return true;
  }
  return false;
}

// The bytes of the range are those that shape, strides and type reach.
bool FitsItsBytes(const TensorInfo& tensor) {
  const abi::DTypeInfo& type = *abi::FindDType(tensor.dtype);
  for (const int64_t dim : tensor.shape) {
    if (dim == 0) return tensor.nbytes == 0;
  }
  uint64_t elements = 1;  // Of the range: one more than the farthest.
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    const auto dim = static_cast<uint64_t>(tensor.shape[i]);
    if (tensor.shape[i] < 0) return false;
    if (tensor.strides.empty()) {
      if (__builtin_mul_overflow(elements, dim, &elements)) return false;
      continue;
    }
    uint64_t reach = 0;
    if (tensor.strides[i] < 0 ||
        __builtin_mul_overflow(dim - 1, static_cast<uint64_t>(tensor.strides[i]), &reach) ||
        __builtin_add_overflow(elements, reach, &elements)) {
      return false;
    }
  }
  uint64_t bits = 0;
  if (type.block_bytes != 0) {
    return elements % type.block_elements == 0 &&
           !__builtin_mul_overflow(elements / type.block_elements, uint64_t{type.block_bytes},
                                   &bits) &&
           bits == tensor.nbytes;
  }
  // Texts have no place.
  return type.bits != 0 && !__builtin_mul_overflow(elements, uint64_t{type.bits}, &bits) &&
         bits / 8 + (bits % 8 != 0 ? 1 : 0) == tensor.nbytes;
}

class AnswerReader {
 public:
  AnswerReader(std::span<const std::byte> answer, const IndexRequest& asked)
      : in_("the indexer's answer", "this is a fault of modelhost: report it", answer) {
    for (const IndexRequest::File& file : asked.files) sizes_.emplace(file.name, file.bytes);
  }

  absl::StatusOr<std::vector<ComponentIndex>> Run() {
    uint64_t magic = 0;
    uint32_t code = 0;
    if (!in_.Little("the magic", &magic) || !in_.Little("a status", &code)) return Broken();
    if (magic != kAnswerMagic) {
      in_.Fail("it is from another build", "install all programs of one version");
      return Broken();
    }
    if (code != 0) return Refusal(code);
    std::vector<ComponentIndex> components;
    uint32_t count = 0;
    if (!Count(in_, "components", 1, &count)) return Broken();
    if (count > sizes_.size()) in_.Fail("more components than files");
    if (!in_.ok()) return Broken();
    for (uint32_t i = 0; i < count; ++i) {
      if (!Component(components)) return Broken();
    }
    if (in_.remaining() != 0) in_.Fail("bytes are left over");
    if (!in_.ok()) return Broken();
    return components;
  }

 private:
  absl::Status Broken() const { return absl::InternalError(in_.status().message()); }

  absl::Status Refusal(uint32_t code) {
    std::string text;
    if (!SizedUtf8(in_, "a refusal", &text)) return Broken();
    const auto status = static_cast<absl::StatusCode>(code);
    const bool known = status == absl::StatusCode::kInvalidArgument ||
                       status == absl::StatusCode::kUnimplemented ||
                       status == absl::StatusCode::kNotFound;
    if (!known || text.empty() || text.size() > kMaxRefusalBytes) {
      in_.Fail("a refusal of a kind that no reader gives");
      return Broken();
    }
    return absl::Status(status, text);
  }

  bool Component(std::vector<ComponentIndex>& components) {
    std::string name;
    std::string format;
    uint32_t files = 0;
    if (!SizedUtf8(in_, "a component", &name) || !SizedUtf8(in_, "a format", &format) ||
        !Count(in_, "files", 4, &files)) {
      return false;
    }
    if (!IsKnownFormat(format)) return in_.Fail("a format that does not exist");
    if (files == 0 || files > sizes_.size())
      return in_.Fail("a component of no files, or too many");
    TensorIndex index(std::move(format));
    file_bytes_.clear();
    for (uint32_t i = 0; i < files; ++i) {
      std::string file;
      if (!SizedText(in_, "a file", &file)) return false;
      const auto known = sizes_.find(file);
      if (known == sizes_.end()) return in_.Fail("a file that was not asked about");
      file_bytes_.push_back(known->second);
      index.AddFile(std::move(file));
    }
    if (!Tensors(index) || !Words(index)) return false;
    components.push_back({std::move(name), std::move(index)});
    return true;
  }

  bool Tensors(TensorIndex& index) {
    uint32_t count = 0;
    if (!Count(in_, "tensors", kMinTensorAnswerBytes, &count)) return false;
    index.Reserve(count, 0, 0);
    for (uint32_t i = 0; i < count; ++i) {
      if (!Tensor(index)) return false;
    }
    return true;
  }

  bool Tensor(TensorIndex& index) {
    TensorInfo tensor;
    uint32_t dtype = 0;
    uint32_t flags = 0;
    uint32_t rank = 0;
    if (!SizedUtf8(in_, "a tensor's name", &name_) || !in_.Little("a type", &dtype) ||
        !in_.Little("a file number", &tensor.file) || !in_.Little("an offset", &tensor.offset) ||
        !in_.Little("a size", &tensor.nbytes) || !in_.Little("flags", &flags) ||
        !in_.Little("a rank", &rank)) {
      return false;
    }
    tensor.dtype = static_cast<abi::DType>(dtype);
    if (dtype > UINT16_MAX || abi::FindDType(tensor.dtype) == nullptr) {
      return in_.Fail("an unknown type");
    }
    if (name_.find('\0') != std::string::npos) return in_.Fail("a name with a NUL");
    if (tensor.file >= file_bytes_.size()) return in_.Fail("a file number that does not exist");
    const uint64_t bytes = file_bytes_[tensor.file];
    if (tensor.offset > bytes || tensor.nbytes > bytes - tensor.offset) {
      return in_.Fail("a range that leaves its file");
    }
    const bool strided = (flags & kStrided) != 0;
    if ((flags & ~(kMappable | kStrided)) != 0) return in_.Fail("unknown flags");
    if (rank > kMaxAnswerRank) return in_.Fail("too many dimensions");
    if (!Dims(rank, &shape_) || !Dims(strided ? rank : 0, &strides_) ||
        !SizedUtf8(in_, "a reason", &reason_)) {
      return false;
    }
    tensor.name = name_;
    tensor.shape = shape_;
    tensor.strides = strides_;
    tensor.mappable = (flags & kMappable) != 0;
    tensor.reason = reason_;
    if (tensor.mappable != reason_.empty()) return in_.Fail("a reason that does not fit");
    if (tensor.mappable && !FitsItsBytes(tensor)) return in_.Fail("a shape that does not fit");
    index.Add(tensor);
    return true;
  }

  bool Dims(uint32_t count, std::vector<int64_t>* dims) {
    if (count > in_.remaining() / 8) return in_.Fail("dimensions do not fit into what came");
    dims->resize(count);
    for (int64_t& dim : *dims) {
      uint64_t value = 0;
      if (!in_.Little("a dimension", &value)) return false;
      dim = static_cast<int64_t>(value);
    }
    return true;
  }

  bool Words(TensorIndex& index) {
    uint32_t items = 0;
    uint32_t warnings = 0;
    if (!Count(in_, "metadata", 8, &items)) return false;
    if (items > kMaxMetadata) return in_.Fail("too much metadata");
    for (uint32_t i = 0; i < items; ++i) {
      std::string key;
      std::string value;
      if (!SizedUtf8(in_, "a key", &key) || !SizedUtf8(in_, "a value", &value)) return false;
      index.AddMetadata(std::move(key), std::move(value));
    }
    if (!Count(in_, "warnings", 4, &warnings)) return false;
    if (warnings > kMaxWarnings) return in_.Fail("too many warnings");
    for (uint32_t i = 0; i < warnings; ++i) {
      std::string warning;
      if (!SizedUtf8(in_, "a warning", &warning)) return false;
      index.AddWarning(std::move(warning));
    }
    return true;
  }

  ByteReader in_;
  absl::flat_hash_map<std::string, uint64_t> sizes_;
  std::vector<uint64_t> file_bytes_;  // Of the component at hand.
  std::string name_;
  std::string reason_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
};

}  // namespace

uint64_t MaxAnswerBytes(uint64_t file_bytes) {
  // An entry here is at most so many times as long as the shortest that a header can hold.
  constexpr uint64_t kMost = 8;
  constexpr uint64_t kLargestHeader = uint64_t{128} << 20;
  return (uint64_t{16} << 20) + kMost * std::min(file_bytes, kLargestHeader);
}

std::string EncodeIndexRequest(const IndexRequest& request) {
  std::string text;
  const auto put = [&](std::string_view piece) {
    text.append(piece);
    return true;
  };
  Encoder out(put);
  out.Number64(kRequestMagic);
  out.Number32(request.probe ? 1 : 0);
  out.Number32(request.files.size());
  for (const IndexRequest::File& file : request.files) {
    out.Number64(file.bytes);
    out.Text(file.name);
  }
  out.Flush();
  return text;
}

absl::StatusOr<IndexRequest> DecodeIndexRequest(std::span<const std::byte> bytes) {
  ByteReader in("the request", "install all programs of one version", bytes);
  IndexRequest request;
  uint64_t magic = 0;
  uint32_t count = 0;
  uint32_t probe = 0;
  if (!in.Little("the magic", &magic)) return in.status();
  if (magic != kRequestMagic) in.Fail("it is from another build");
  if (!in.Little("what to do", &probe)) return in.status();
  request.probe = probe == 1;
  if (probe > 1) in.Fail("another thing to do");
  if (!in.ok() || !Count(in, "files", 12, &count)) return in.status();
  for (uint32_t i = 0; i < count; ++i) {
    IndexRequest::File& file = request.files.emplace_back();
    if (!in.Little("a size", &file.bytes) || !SizedText(in, "a name", &file.name)) {
      return in.status();
    }
  }
  if (in.remaining() != 0) in.Fail("bytes are left over");
  if (!in.ok()) return in.status();
  return request;
}

bool EncodeIndexes(const absl::StatusOr<std::vector<ComponentIndex>>& answer,
                   absl::FunctionRef<bool(std::string_view)> put) {
  Encoder out(put);
  out.Number64(kAnswerMagic);
  out.Number32(static_cast<uint32_t>(answer.status().code()));
  if (!answer.ok()) {
    out.Text(AsStd(answer.status().message()));
    return out.Flush();
  }
  out.Number32(answer->size());
  for (const ComponentIndex& component : *answer) PutIndex(component, out);
  return out.Flush();
}

std::string EncodeIndexes(const absl::StatusOr<std::vector<ComponentIndex>>& answer) {
  std::string text;
  EncodeIndexes(answer, [&](std::string_view piece) {
    text.append(piece);
    return true;
  });
  return text;
}

absl::StatusOr<std::vector<ComponentIndex>> DecodeIndexes(std::span<const std::byte> answer,
                                                          const IndexRequest& asked) {
  return AnswerReader(answer, asked).Run();
}

}  // namespace modelhost
