#include "client/modelctl/gguf_writer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

constexpr size_t kMaxGgufNameBytes = 63;
constexpr size_t kMaxGgufRank = 4;
constexpr uint32_t kTypeU32 = 4;
constexpr uint32_t kTypeI32 = 5;
constexpr uint32_t kTypeF32 = 6;
constexpr uint32_t kTypeBool = 7;
constexpr uint32_t kTypeString = 8;
constexpr uint32_t kTypeArray = 9;
constexpr uint32_t kTypeU64 = 10;
constexpr uint32_t kTypeI64 = 11;
// Of u8 i8 u16 i16 u32 i32 f32 bool string array u64 i64 f64; 0 where the value tells.
constexpr std::array<uint64_t, 13> kValueBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

template <typename T>
void AppendLittle(T value, std::string* out) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    out->push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i) & 0xff));
  }
}

void AppendGgufText(std::string_view text, std::string* out) {
  AppendLittle<uint64_t>(text.size(), out);
  out->append(text);
}

std::optional<uint32_t> GgmlType(abi::DType dtype) {
  using abi::DType;
  switch (dtype) {
    case DType::kF32:
      return 0;
    case DType::kF16:
      return 1;
    case DType::kI8:
      return 24;
    case DType::kI16:
      return 25;
    case DType::kI32:
      return 26;
    case DType::kI64:
      return 27;
    case DType::kF64:
      return 28;
    case DType::kBF16:
      return 30;
    default:
      break;
  }
  const abi::DTypeInfo* info = abi::FindDType(dtype);
  if (info == nullptr || info->block_bytes == 0) return std::nullopt;
  return static_cast<uint32_t>(dtype) - 0x100;
}

uint64_t PadGguf(uint64_t size) {
  return (size + kGgufAlignment - 1) / kGgufAlignment * kGgufAlignment;
}

// Past a value of `type`. The file has been accepted, so that a failure is a file that changed.
bool SkipValue(ByteReader& in, uint32_t type) {
  uint64_t count = 1;
  if (type == kTypeArray) {
    if (!in.Little("an array's type", &type) || !in.Little("an array's length", &count)) {
      return false;
    }
    if (type == kTypeArray) return in.Fail("an array of arrays");
  }
  if (type >= kValueBytes.size()) return in.Fail("an unknown value type");
  if (type != kTypeString) {
    if (count > in.remaining() / kValueBytes[type]) return in.Fail("an array beyond the file");
    return in.Skip("a value", count * kValueBytes[type]);
  }
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t bytes = 0;
    if (!in.Little("a string's length", &bytes) || !in.Skip("a string", bytes)) return false;
  }
  return true;
}

}  // namespace

bool IsReservedGgufKey(std::string_view key) {
  return key == "general.alignment" || absl::StartsWith(AsAbsl(key), "split.");
}

std::string WhyNotInGguf(std::string_view name, abi::DType dtype, std::span<const int64_t> shape) {
  if (name.size() > kMaxGgufNameBytes) {
    return absl::StrCat("its name has ", name.size(), " bytes, and GGUF allows ",
                        kMaxGgufNameBytes);
  }
  if (shape.size() > kMaxGgufRank) {
    return absl::StrCat("it has ", shape.size(), " dimensions, and GGUF allows ", kMaxGgufRank);
  }
  if (!GgmlType(dtype).has_value()) {
    return absl::StrCat("GGUF has no type ", AsAbsl(abi::DTypeName(dtype)));
  }
  if (std::any_of(shape.begin(), shape.end(), [](int64_t dim) { return dim < 0; })) {
    return "GGUF cannot express its dimensions";
  }
  return "";
}

absl::Status GgufKeys::CopyFrom(const std::string& name, std::span<const std::byte> file) {
  ByteReader in(name, "the file changed while it was read: try again", file);
  uint64_t count = 0;
  in.Skip("the magic, version and tensor count", 4 + 4 + 8);
  in.Little("the key count", &count);
  for (uint64_t i = 0; i < count && in.ok(); ++i) {
    uint64_t bytes = 0;
    std::string_view key;
    uint32_t type = 0;
    if (!in.Little("a key's length", &bytes) || !in.Text("a key", bytes, &key)) break;
    const uint64_t from = in.offset();
    if (!in.Little("a value type", &type) || !SkipValue(in, type)) break;
    if (IsReservedGgufKey(key) || !at_.emplace(key, entries_.size()).second) continue;
    entries_.push_back({std::string(key), std::string(in.Since(from))});
  }
  return in.status();
}

void GgufKeys::Set(const std::string& key, uint32_t type, std::string_view bytes) {
  std::string typed;
  AppendLittle(type, &typed);
  typed.append(bytes);
  const auto [at, fresh] = at_.emplace(key, entries_.size());
  if (fresh) {
    entries_.push_back({key, std::move(typed)});
  } else {
    entries_[at->second].typed = std::move(typed);
  }
}

void GgufKeys::SetText(const std::string& key, std::string_view value) {
  std::string bytes;
  AppendGgufText(value, &bytes);
  Set(key, kTypeString, bytes);
}

void GgufKeys::SetU32(const std::string& key, uint32_t value) {
  std::string bytes;
  AppendLittle(value, &bytes);
  Set(key, kTypeU32, bytes);
}

template <typename T>
bool GgufKeys::SetNumber(const std::string& key, uint32_t type, const std::string& value) {
  T number = 0;
  std::string bytes;
  if constexpr (std::is_floating_point_v<T>) {
    if (!absl::SimpleAtof(value, &number)) return false;
    AppendLittle(std::bit_cast<uint32_t>(number), &bytes);
  } else {
    if (!absl::SimpleAtoi(value, &number)) return false;
    AppendLittle(number, &bytes);
  }
  Set(key, type, bytes);
  return true;
}

bool GgufKeys::SetByLook(const std::string& key, const std::string& value) {
  const bool text = absl::StartsWith(key, "general.") && key != "general.file_type" &&
                    key != "general.quantization_version" && !absl::EndsWith(key, ".count");
  if (text) return SetValue(key, GgufValueType::kText, value);
  if (SetValue(key, GgufValueType::kBool, value) || SetNumber<uint32_t>(key, kTypeU32, value) ||
      SetNumber<int64_t>(key, kTypeI64, value)) {
    return true;
  }
  // "inf", "nan" and the like are names more often than numbers.
  const bool digits = value.find_first_of("0123456789") != std::string::npos;
  return (digits && SetNumber<float>(key, kTypeF32, value)) ||
         SetValue(key, GgufValueType::kText, value);
}

bool GgufKeys::SetValue(const std::string& key, GgufValueType type, const std::string& value) {
  switch (type) {
    case GgufValueType::kByLook:
      return SetByLook(key, value);
    case GgufValueType::kText:
      SetText(key, value);
      return true;
    case GgufValueType::kU32:
      return SetNumber<uint32_t>(key, kTypeU32, value);
    case GgufValueType::kI32:
      return SetNumber<int32_t>(key, kTypeI32, value);
    case GgufValueType::kU64:
      return SetNumber<uint64_t>(key, kTypeU64, value);
    case GgufValueType::kF32:
      return SetNumber<float>(key, kTypeF32, value);
    case GgufValueType::kBool:
      if (value != "true" && value != "false") return false;
      Set(key, kTypeBool, std::string(1, value == "true" ? '\1' : '\0'));
      return true;
  }
  return false;
}

std::optional<GgufValueType> FindGgufValueType(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, GgufValueType>, 6> kTypes = {
      {{"str", GgufValueType::kText},
       {"u32", GgufValueType::kU32},
       {"i32", GgufValueType::kI32},
       {"u64", GgufValueType::kU64},
       {"f32", GgufValueType::kF32},
       {"bool", GgufValueType::kBool}}};
  for (const auto& [known, type] : kTypes) {
    if (known == name) return type;
  }
  return std::nullopt;
}

std::string GgufHead(const GgufKeys& keys, const std::vector<OutputTensor>& tensors) {
  std::string head = "GGUF";
  AppendLittle<uint32_t>(3, &head);
  AppendLittle<uint64_t>(tensors.size(), &head);
  AppendLittle<uint64_t>(keys.entries_.size(), &head);
  for (const GgufKeys::Entry& entry : keys.entries_) {
    AppendGgufText(entry.key, &head);
    head += entry.typed;
  }
  uint64_t offset = 0;
  for (const OutputTensor& tensor : tensors) {
    AppendGgufText(tensor.name, &head);
    AppendLittle(static_cast<uint32_t>(tensor.shape.size()), &head);
    // The row comes first in the file.
    for (size_t i = tensor.shape.size(); i-- > 0;) {
      AppendLittle(static_cast<uint64_t>(tensor.shape[i]), &head);
    }
    AppendLittle(*GgmlType(tensor.dtype), &head);
    AppendLittle(offset, &head);
    offset += PadGguf(tensor.nbytes);
  }
  head.resize(PadGguf(head.size()), '\0');
  return head;
}

}  // namespace modelhost::modelctl
