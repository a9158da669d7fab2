#include "daemon/format/safetensors.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"
#include "daemon/format/name_table.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"

namespace modelhost {
namespace {

constexpr std::string_view kSafetensorsHint =
    "the file is damaged or its writer is broken: get it again, or convert it again";
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kPrefixBytes = 8;

// Block types and what only ONNX has are no words of this format.
const abi::DTypeInfo* FindSafetensorsDType(std::string_view name) {
  const abi::DTypeInfo* info = abi::FindDType(name);
  if (info == nullptr || info->bits == 0) return nullptr;
  switch (info->dtype) {
    case abi::DType::kC128:
    case abi::DType::kU4:
    case abi::DType::kI4:
    case abi::DType::kU2:
    case abi::DType::kI2:
      return nullptr;
    default:
      return info;
  }
}

class HeaderParser {
 public:
  HeaderParser(std::string_view name, std::span<const std::byte> header, uint64_t file_bytes,
               uint32_t file, TensorIndex& index, std::vector<MetadataItem>& metadata)
      : name_(name),
        file_bytes_(file_bytes),
        header_bytes_(header.size()),
        file_(file),
        first_(index.size()),
        index_(index),
        metadata_(metadata),
        in_(name, kSafetensorsHint, header),
        json_(in_) {}

  absl::Status Run() {
    uint64_t unused = 0;
    in_.Little("the length prefix", &unused);
    // A usual tensor takes 100 bytes of header. Growing step by step would copy it all several
    // times.
    index_.Reserve(header_bytes_ / 100, header_bytes_ / 3, header_bytes_ / 50);
    // Whitespace in front would let a polyglot through; the format forbids it.
    if (in_.Peek() != '{') {
      in_.Fail(in_.Peek() == 0 ? "the header is filled with zeros"
                               : "the header must start with '{'");
    }
    json_.Object("'{'", [this](std::string_view key) {
      return key == kMetadataKey ? Metadata() : Tensor(key);
    });
    json_.End();
    if (!in_.ok()) return in_.status();
    if (absl::Status status = CheckNames(); !status.ok()) return status;
    return CheckRanges();
  }

 private:
  bool Metadata() {
    if (std::exchange(seen_metadata_, true)) return in_.Fail("__metadata__ occurs twice");
    if (json_.PeekValue() == 'n') return json_.Skip();  // null is as good as absent.
    const size_t first = metadata_.size();
    if (!json_.Object("__metadata__ as an object of strings", [this](std::string_view key) {
          MetadataItem item{std::string(key), {}};
          std::string_view value;
          if (!json_.String("a string as value in __metadata__", &value)) return false;
          item.value = value;
          metadata_.push_back(std::move(item));
          return true;
        })) {
      return false;
    }
    std::vector<std::string_view> keys;
    for (size_t i = first; i < metadata_.size(); ++i) keys.push_back(metadata_[i].key);
    if (const auto pair = NameTable(keys).Duplicate()) {
      return in_.Fail(absl::StrCat("duplicate key in __metadata__: ", Quoted(keys[pair->first]),
                                   " occurs twice"));
    }
    return true;
  }

  bool Tensor(std::string_view key) {
    tensor_name_ = key;
    if (key.find('\0') != std::string_view::npos) {
      return in_.Fail(absl::StrCat("tensor name ", Quoted(key), " contains a NUL"));
    }
    dtype_ = nullptr;
    has_shape_ = has_range_ = false;
    other_fields_.clear();
    if (!json_.Object("a tensor as an object", [this](std::string_view f) { return Field(f); })) {
      return false;
    }
    const char* missing = dtype_ == nullptr ? "dtype"
                          : !has_shape_     ? "shape"
                          : !has_range_     ? "data_offsets"
                                            : nullptr;
    if (missing != nullptr) return FailTensor(absl::StrCat("has no ", missing));
    return AddTensor();
  }

  bool Field(std::string_view field) {
    if (field == "dtype") {
      if (dtype_ != nullptr) return FailTensor("has dtype twice");
      std::string_view text;
      if (!json_.String("dtype as a string", &text)) return false;
      dtype_ = FindSafetensorsDType(text);
      return dtype_ != nullptr ||
             FailTensor(absl::StrCat("has the unknown dtype ", Quoted(text)),
                        "the file may be newer than this version, or its writer is broken",
                        absl::StatusCode::kUnimplemented);
    }
    if (field == "shape") {
      if (std::exchange(has_shape_, true)) return FailTensor("has shape twice");
      shape_.clear();
      return json_.Array("shape as a list", [this] {
        uint64_t dim = 0;
        if (!json_.Unsigned("a dimension as a whole number", &dim)) return false;
        shape_.push_back(static_cast<int64_t>(dim));
        return true;
      });
    }
    if (field == "data_offsets") {
      if (std::exchange(has_range_, true)) return FailTensor("has data_offsets twice");
      size_t count = 0;
      if (!json_.Array("data_offsets as a list", [this, &count] {
            if (count == 2) return FailTensor("has more than two data_offsets");
            return json_.Unsigned("an offset as a whole number", &range_[count++]);
          })) {
        return false;
      }
      return count == 2 || FailTensor("has fewer than two data_offsets");
    }
    if (!other_fields_.insert(std::string(field)).second) {
      return FailTensor(absl::StrCat("has the field ", Quoted(field), " twice"));
    }
    return json_.Skip();
  }

  bool AddTensor() {
    // The order of the checks is that of the reference reader: [0, 2^63, 2^63] is empty and good,
    // [2^63, 2^63, 0] overflows.
    uint64_t bits = 1;
    bool fits = true;
    for (const int64_t dim : shape_) {
      fits = fits && !__builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits);
    }
    fits = fits && !__builtin_mul_overflow(bits, uint64_t{dtype_->bits}, &bits);
    if (!fits) return FailTensor("has a size that does not fit 64 bits");
    if (bits % 8 != 0) {
      return FailTensor(absl::StrCat("has ", bits, " bits, which do not fill whole bytes"));
    }
    const auto [begin, end] = std::pair(range_[0], range_[1]);
    if (end < begin) {
      return FailTensor(absl::StrCat("ends at ", end, ", before its begin at ", begin));
    }
    if (end - begin != bits / 8) {
      return FailTensor(absl::StrCat("has a range of ", end - begin,
                                     " bytes, but its dtype and shape need ", bits / 8));
    }
    if (end > UINT64_MAX - header_bytes_) {
      return FailTensor(absl::StrCat("ends at ", end, ", far past the end of the file"));
    }
    TensorInfo tensor;
    tensor.name = tensor_name_;
    tensor.dtype = dtype_->dtype;
    tensor.shape = shape_;
    tensor.file = file_;
    tensor.offset = header_bytes_ + begin;
    tensor.nbytes = end - begin;
    index_.Add(tensor);
    return true;
  }

  bool FailTensor(std::string_view why, std::string_view hint = {},
                  absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    return in_.Fail(absl::StrCat("tensor ", Quoted(tensor_name_), " ", AsAbsl(why)), hint, code);
  }

  absl::Status Error(std::string_view why, std::string_view hint = kSafetensorsHint) const {
    return ModelError(name_, why, hint);
  }

  absl::Status CheckNames() const {
    std::vector<std::string_view> names;
    names.reserve(index_.size() - first_);
    for (size_t i = first_; i < index_.size(); ++i) names.push_back(index_.at(i).name);
    if (const auto pair = NameTable(names).Duplicate()) {
      return Error(absl::StrCat("duplicate key: tensor ", Quoted(names[pair->first]),
                                " occurs twice in the header"));
    }
    return absl::OkStatus();
  }

  // Sorted by offset the ranges must touch each other and fill the file: no hole, no overlap.
  absl::Status CheckRanges() const {
    struct Range {
      uint64_t begin, end;
      size_t number;
    };
    std::vector<Range> ranges;
    ranges.reserve(index_.size() - first_);
    for (size_t i = first_; i < index_.size(); ++i) {
      const TensorInfo tensor = index_.at(i);
      ranges.push_back({tensor.offset, tensor.offset + tensor.nbytes, i});
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    uint64_t end = header_bytes_;
    for (const Range& range : ranges) {
      if (range.begin != end) {
        return Error(
            absl::StrCat("tensor ", Quoted(index_.at(range.number).name), " starts at data offset ",
                         range.begin - header_bytes_, ", but ",
                         range.begin > end ? "there is a hole from " : "it overlaps up to ",
                         end - header_bytes_));
      }
      end = range.end;
    }
    if (end > file_bytes_) {
      return Error(absl::StrCat("the file has ", file_bytes_, " bytes, but its header needs ", end),
                   "the file is cut short: download or copy it again");
    }
    if (end < file_bytes_) {
      return Error(absl::StrCat("the file has ", file_bytes_, " bytes, but its tensors end at ",
                                end, ": ", file_bytes_ - end, " bytes belong to no tensor"));
    }
    return absl::OkStatus();
  }

  std::string_view name_;
  uint64_t file_bytes_;
  uint64_t header_bytes_;  // With the length prefix: where the data starts.
  uint32_t file_;
  size_t first_;  // Number of the first tensor of this file.
  TensorIndex& index_;
  std::vector<MetadataItem>& metadata_;
  ByteReader in_;
  JsonReader json_;
  bool seen_metadata_ = false;

  // The tensor being read.
  std::string tensor_name_;
  const abi::DTypeInfo* dtype_ = nullptr;
  std::vector<int64_t> shape_;
  uint64_t range_[2] = {};
  bool has_shape_ = false;
  bool has_range_ = false;
  absl::flat_hash_set<std::string> other_fields_;
};

}  // namespace

absl::Status ReadSafetensors(std::string_view name, std::span<const std::byte> bytes, uint32_t file,
                             TensorIndex& index, std::vector<MetadataItem>& metadata) {
  ByteReader prefix(name, "the file is cut short: download or copy it again", bytes);
  uint64_t header = 0;
  if (!prefix.Little("the header's length", &header)) return prefix.status();
  if (header == 0) {
    return ModelError(name, "the header has a length of 0", kSafetensorsHint);
  }
  if (header > kSafetensorsHeaderCap) {
    return ModelError(name,
                      absl::StrCat("the header has a length of ", header, " bytes; the limit is ",
                                   kSafetensorsHeaderCap),
                      "the file is no safetensors file, or has too many tensors: use shards");
  }
  if (header > prefix.remaining()) {
    return ModelError(name,
                      absl::StrCat("the header has a length of ", header, " bytes, but only ",
                                   prefix.remaining(), " follow"),
                      "the file is cut short or not safetensors: get it again");
  }
  return HeaderParser(name, bytes.first(kPrefixBytes + header), bytes.size(), file, index, metadata)
      .Run();
}

}  // namespace modelhost
