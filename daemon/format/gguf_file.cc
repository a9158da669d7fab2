#include "daemon/format/gguf_file.h"

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/name_table.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"

namespace modelhost {
namespace {

constexpr std::string_view kHint =
    "the file is cut short, damaged or badly written: get it again, or convert it again";
constexpr uint64_t kMaxStringBytes = uint64_t{1} << 30;    // As the reference reader.
constexpr uint64_t kMaxArrayElements = uint64_t{1} << 30;  // As the reference reader.
constexpr uint64_t kMaxNameBytes = 63;
constexpr uint32_t kMaxDims = 4;
constexpr uint32_t kDefaultAlignment = 32;
// The least bytes of an entry: a count that needs more than the file has is refused at once.
constexpr uint64_t kMinKeyValueBytes = 8 + 1 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;
constexpr uint64_t kShownElements = 64;  // A longer array (a vocabulary) is only counted.

enum ValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

struct ValueTypeInfo {
  std::string_view name;
  uint64_t bytes;  // Of one value; the least for a string.
};
constexpr std::array<ValueTypeInfo, 13> kValueTypes = {{{"u8", 1},
                                                        {"i8", 1},
                                                        {"u16", 2},
                                                        {"i16", 2},
                                                        {"u32", 4},
                                                        {"i32", 4},
                                                        {"f32", 4},
                                                        {"bool", 1},
                                                        {"string", 8},
                                                        {"array", 12},
                                                        {"u64", 8},
                                                        {"i64", 8},
                                                        {"f64", 8}}};

// Types that ggml took out again; their ids are not given to others.
bool IsRemovedType(uint32_t id) {
  return id == 4 || id == 5 || (id >= 31 && id <= 33) || (id >= 36 && id <= 38);
}

const abi::DTypeInfo* FindGgmlType(uint32_t id) {
  switch (id) {
    case 0:
      return abi::FindDType(abi::DType::kF32);
    case 1:
      return abi::FindDType(abi::DType::kF16);
    case 24:
      return abi::FindDType(abi::DType::kI8);
    case 25:
      return abi::FindDType(abi::DType::kI16);
    case 26:
      return abi::FindDType(abi::DType::kI32);
    case 27:
      return abi::FindDType(abi::DType::kI64);
    case 28:
      return abi::FindDType(abi::DType::kF64);
    case 30:
      return abi::FindDType(abi::DType::kBF16);
    default:
      return id < 0x100 ? abi::FindDType(static_cast<abi::DType>(0x100 + id)) : nullptr;
  }
}

// Rounds up to a power of two; false when the result does not fit.
bool PadTo(uint64_t alignment, uint64_t* value) {
  if (__builtin_add_overflow(*value, alignment - 1, value)) return false;
  *value &= ~(alignment - 1);
  return true;
}

template <typename Float>
std::string FloatText(Float value, bool in_json) {
  if (!std::isfinite(value)) {
    const char* word = std::isnan(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
    return in_json ? absl::StrCat("\"", word, "\"") : word;
  }
  char buffer[32];
  const std::to_chars_result result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

class Parser {
 public:
  Parser(std::string_view name, std::span<const std::byte> bytes, const GgufFileWants& wants,
         GgufSplit* split)
      : in_(name, kHint, bytes), wants_(wants), split_(*split) {}

  absl::Status Run() {
    if (!Start() || !KeyValues()) return in_.status();
    if (wants_.tensors != nullptr) Tensors();
    return in_.status();
  }

 private:
  bool Refuse(std::string_view why, std::string_view hint) {
    return in_.Fail(why, hint, absl::StatusCode::kUnimplemented);
  }

  bool Start() {
    constexpr std::string_view kBigEndianHint = "convert it to little-endian with the gguf tools";
    std::string_view magic;
    uint32_t version = 0;
    if (!in_.Text("the magic", 4, &magic)) return false;
    if (magic == "FUGG") return Refuse("a big-endian GGUF file", kBigEndianHint);
    if (magic != "GGUF") {
      return in_.Fail(absl::StrCat("not a GGUF file: it starts with ", Quoted(magic)),
                      "give the file its right name, or get it again");
    }
    if (!in_.Little("the version", &version)) return false;
    if (version == 0) return in_.Fail("GGUF version 0 does not exist");
    if ((version & 0xffff) == 0) return Refuse("a big-endian GGUF file", kBigEndianHint);
    if (version == 1) return Refuse("GGUF version 1 is no longer read", "convert it again");
    if (version > 3) {
      return Refuse(absl::StrCat("GGUF version ", version, " is newer than this version reads"),
                    "update modelhost");
    }
    return in_.Little("the tensor count", &tensor_count_) &&
           in_.Little("the key count", &key_count_) &&
           CheckCount("tensors", tensor_count_, kMinTensorBytes) &&
           CheckCount("keys", key_count_, kMinKeyValueBytes);
  }

  bool CheckCount(std::string_view what, uint64_t count, uint64_t least_bytes) {
    if (count <= in_.remaining() / least_bytes) return true;
    return in_.Fail(absl::StrCat("the file announces ", static_cast<int64_t>(count), " ",
                                 AsAbsl(what), ", more than its ", in_.remaining(),
                                 " remaining bytes can hold"));
  }

  bool String(std::string_view what, std::string_view* text) {
    uint64_t bytes = 0;
    if (!in_.Little(what, &bytes)) return false;
    if (bytes > kMaxStringBytes) {
      return in_.Fail(absl::StrCat(AsAbsl(what), " has ", bytes, " bytes, more than 1 GiB"));
    }
    return in_.Text(what, bytes, text);
  }

  bool KeyValues() {
    std::vector<std::string_view> keys;
    for (uint64_t i = 0; i < key_count_; ++i) {
      std::string_view key;
      uint32_t type = 0;
      if (!String("a metadata key", &key)) return false;
      if (key.empty()) return in_.Fail("a metadata key is empty");
      keys.push_back(key);
      if (!in_.Little("a value type", &type)) return false;
      if (!KeyValue(key, type)) return false;
    }
    if (const auto pair = NameTable(keys).Duplicate()) {
      return in_.Fail(absl::StrCat("duplicate key: ", Quoted(keys[pair->first]),
                                   " occurs twice in the metadata"));
    }
    return true;
  }

  bool KeyValue(std::string_view key, uint32_t type) {
    std::string text;
    std::string* wanted = wants_.metadata == nullptr ? nullptr : &text;
    number_.reset();
    if (type == kArray) {
      if (!Array(key, wanted)) return false;
    } else if (type >= kValueTypes.size()) {
      return in_.Fail(absl::StrCat("metadata ", Quoted(key), " has the unknown value type ",
                                   static_cast<int32_t>(type)));
    } else if (!Value(type, false, wanted)) {
      return false;
    }
    if (key == "general.alignment" && !Alignment(type)) return false;
    if (key == "split.no" && !SplitNumber(key, &split_.number)) return false;
    if (key == "split.count" && !SplitNumber(key, &split_.count)) return false;
    if (key == "split.tensors.count" && !SplitNumber(key, &split_.tensors)) return false;
    if (wants_.metadata != nullptr) {
      if (IsUtf8(key)) {
        wants_.metadata->AddMetadata(std::string(key), std::move(text));
      } else {
        wants_.metadata->AddWarning(
            absl::StrCat("the metadata key ", Quoted(key), " is not UTF-8 and is left out"));
      }
    }
    return true;
  }

  bool Alignment(uint32_t type) {
    if (type != kU32 || !std::has_single_bit(*number_)) {
      return in_.Fail(absl::StrCat("general.alignment must be a u32 and a power of two, not ",
                                   number_.has_value() ? absl::StrCat(*number_) : "this",
                                   type < kValueTypes.size()
                                       ? absl::StrCat(" (", AsAbsl(kValueTypes[type].name), ")")
                                       : ""));
    }
    alignment_ = *number_;
    return true;
  }

  bool SplitNumber(std::string_view key, std::optional<uint64_t>* field) {
    if (!number_.has_value()) {
      return in_.Fail(absl::StrCat(AsAbsl(key), " must be a whole number from 0"));
    }
    *field = number_;
    return true;
  }

  // One value that is no array. Whole numbers from 0 are left in number_.
  bool Value(uint32_t type, bool in_json, std::string* text) {
    switch (type) {
      case kU8:
        return Whole<uint8_t, uint8_t>(text);
      case kI8:
        return Whole<uint8_t, int8_t>(text);
      case kU16:
        return Whole<uint16_t, uint16_t>(text);
      case kI16:
        return Whole<uint16_t, int16_t>(text);
      case kU32:
        return Whole<uint32_t, uint32_t>(text);
      case kI32:
        return Whole<uint32_t, int32_t>(text);
      case kU64:
        return Whole<uint64_t, uint64_t>(text);
      case kI64:
        return Whole<uint64_t, int64_t>(text);
      case kF32: {
        uint32_t bits = 0;
        if (!in_.Little("a value", &bits)) return false;
        if (text != nullptr) *text += FloatText(std::bit_cast<float>(bits), in_json);
        return true;
      }
      case kF64: {
        uint64_t bits = 0;
        if (!in_.Little("a value", &bits)) return false;
        if (text != nullptr) *text += FloatText(std::bit_cast<double>(bits), in_json);
        return true;
      }
      case kBool: {
        uint8_t byte = 0;
        if (!in_.Little("a value", &byte)) return false;
        if (text != nullptr) *text += byte == 0 ? "false" : "true";
        return true;
      }
      default: {
        std::string_view value;
        if (!String("a string", &value)) return false;
        if (text == nullptr) return true;
        if (in_json) {
          AppendJsonString(value, text);
        } else {
          *text = ToUtf8(value);
        }
        return true;
      }
    }
  }

  template <typename Raw, typename Number>
  bool Whole(std::string* text) {
    Raw raw = 0;
    if (!in_.Little("a value", &raw)) return false;
    const auto value = static_cast<Number>(raw);
    if (value >= 0) number_ = static_cast<uint64_t>(value);
    if (text != nullptr) absl::StrAppend(text, +value);
    return true;
  }

  bool Array(std::string_view key, std::string* text) {
    uint32_t type = 0;
    uint64_t count = 0;
    if (!in_.Little("an array's type", &type) || !in_.Little("an array's length", &count)) {
      return false;
    }
    if (type == kArray) {
      return Refuse(absl::StrCat("metadata ", Quoted(key), " is an array of arrays"),
                    "nested arrays are not read; remove the key with the gguf tools");
    }
    if (type >= kValueTypes.size()) {
      return in_.Fail(absl::StrCat("metadata ", Quoted(key), " has the unknown element type ",
                                   static_cast<int32_t>(type)));
    }
    const ValueTypeInfo& info = kValueTypes[type];
    if (count > kMaxArrayElements || count > in_.remaining() / info.bytes) {
      return in_.Fail(absl::StrCat("metadata ", Quoted(key), " has ", count,
                                   " elements, more than the file can hold"));
    }
    const bool shown = text != nullptr && count <= kShownElements;
    if (text != nullptr && !shown) {
      absl::StrAppend(text, "{\"type\":\"", AsAbsl(info.name), "\",\"count\":", count, "}");
    }
    if (!shown && type != kString) return in_.Skip("an array", count * info.bytes);
    if (shown) *text += '[';
    for (uint64_t i = 0; i < count; ++i) {
      if (shown && i > 0) *text += ',';
      if (!Value(type, true, shown ? text : nullptr)) return false;
    }
    if (shown) *text += ']';
    number_.reset();
    return true;
  }

  bool Tensors() {
    TensorIndex& index = *wants_.tensors;
    const size_t first = index.size();
    index.Reserve(tensor_count_, 0, 0);
    uint64_t end = 0;  // Where the next tensor must start in the data section.
    for (uint64_t i = 0; i < tensor_count_; ++i) {
      if (!Tensor(index, &end)) return false;
    }
    if (!CheckNames(index, first)) return false;
    if (tensor_count_ == 0) return true;
    uint64_t data = in_.offset();
    if (!PadTo(alignment_, &data) || data > in_.size()) {
      return in_.Fail("the file ends before its tensor data");
    }
    // The offsets of the infos are relative to the data, whose start is known only now.
    for (size_t i = first; i < index.size(); ++i) {
      const TensorInfo tensor = index.at(i);
      const uint64_t room = in_.size() - data;
      if (tensor.offset > room || tensor.nbytes > room - tensor.offset) {
        return in_.Fail(absl::StrCat("tensor ", Quoted(tensor.name), " needs ", tensor.nbytes,
                                     " bytes at ", data, " + ", tensor.offset,
                                     ", but the file has ", in_.size(), " bytes"));
      }
    }
    index.ShiftOffsets(first, data);
    return true;
  }

  bool CheckNames(const TensorIndex& index, size_t first) {
    std::vector<std::string_view> names;
    names.reserve(index.size() - first);
    for (size_t i = first; i < index.size(); ++i) names.push_back(index.at(i).name);
    if (const auto pair = NameTable(names).Duplicate()) {
      return in_.Fail(absl::StrCat("duplicate tensor name: ", Quoted(names[pair->first])));
    }
    return true;
  }

  bool Tensor(TensorIndex& index, uint64_t* end) {
    std::string_view name;
    uint32_t rank = 0;
    if (!String("a tensor name", &name)) return false;
    if (name.size() > kMaxNameBytes) {
      return in_.Fail(absl::StrCat("the tensor name ", Quoted(name), " has ", name.size(),
                                   " bytes; the limit is ", kMaxNameBytes));
    }
    const auto fail = [&](std::string_view why) {
      return in_.Fail(absl::StrCat("tensor ", Quoted(name), " ", AsAbsl(why)));
    };
    if (name.find('\0') != std::string_view::npos) return fail("has a NUL in its name");
    // Nothing that speaks to clients can carry such a name: JSON, Protobuf, Python.
    if (!IsUtf8(name)) return fail("has a name that is not UTF-8");
    if (!in_.Little("a rank", &rank)) return false;
    if (rank > kMaxDims) return fail(absl::StrCat("has ", rank, " dimensions; the limit is 4"));

    // In the file the row comes first; a shape has it last.
    std::array<int64_t, kMaxDims> shape{};
    uint64_t row = 1;
    uint64_t elements = 1;
    bool empty = false;
    bool fits = true;
    for (uint32_t i = 0; i < rank; ++i) {
      uint64_t dim = 0;
      if (!in_.Little("a dimension", &dim)) return false;
      if (dim > INT64_MAX) return fail("has a negative dimension");
      if (i == 0) row = dim;
      empty = empty || dim == 0;
      fits = fits && !__builtin_mul_overflow(elements, dim, &elements) && elements <= INT64_MAX;
      shape[rank - 1 - i] = static_cast<int64_t>(dim);
    }
    // With a 0 among them there is no element, whatever the other dimensions are.
    if (empty) elements = 0;
    if (!empty && !fits) return fail("has more elements than 63 bits can count");

    uint32_t type = 0;
    if (!in_.Little("a type", &type)) return false;
    const abi::DTypeInfo* info = FindGgmlType(type);
    if (IsRemovedType(type)) {
      return Refuse(absl::StrCat("tensor ", Quoted(name), " has type ", type,
                                 ", which was removed from the format"),
                    "convert the model again with a current version of llama.cpp");
    }
    if (info == nullptr) {
      return Refuse(absl::StrCat("tensor ", Quoted(name), " has the unknown type ",
                                 static_cast<int32_t>(type), ", newer than this version"),
                    "update modelhost, or convert the model to another type");
    }
    if (row % info->block_elements != 0) {
      return fail(absl::StrCat("has rows of ", row, " elements, no multiple of the block of ",
                               info->block_elements, " of ", AsAbsl(info->name)));
    }
    const uint64_t block_bytes = info->block_bytes == 0 ? info->bits / 8 : info->block_bytes;
    uint64_t bytes = 0;
    uint64_t padded = 0;
    if (__builtin_mul_overflow(elements / info->block_elements, block_bytes, &bytes) ||
        (padded = bytes, !PadTo(alignment_, &padded)) || padded > INT64_MAX) {
      return fail("has a size that does not fit 63 bits");
    }

    uint64_t offset = 0;
    if (!in_.Little("an offset", &offset)) return false;
    if (offset != *end) {
      return fail(absl::StrCat("starts at data offset ", offset, ", but ", *end,
                               " is the end of the one before it"));
    }
    if (__builtin_add_overflow(*end, padded, end)) return fail("ends beyond 64 bits");
    TensorInfo tensor;
    tensor.name = name;
    tensor.dtype = info->dtype;
    tensor.shape = std::span<const int64_t>(shape).first(rank);
    tensor.file = wants_.file;
    tensor.offset = offset;
    tensor.nbytes = bytes;
    index.Add(tensor);
    return true;
  }

  ByteReader in_;
  const GgufFileWants& wants_;
  GgufSplit& split_;
  uint64_t tensor_count_ = 0;
  uint64_t key_count_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  std::optional<uint64_t> number_;  // The last value, if it was a whole number from 0.
};

}  // namespace

absl::Status ReadGgufFile(std::string_view name, std::span<const std::byte> bytes,
                          const GgufFileWants& wants, GgufSplit* split) {
  return Parser(name, bytes, wants, split).Run();
}

}  // namespace modelhost
