#include "client/modelctl/safetensors_writer.h"

#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/tensor_reader.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// Punctuation, words, type and offsets of a tensor.
constexpr size_t kRoomBesideName = 80;
constexpr std::string_view kMetadataKey = "__metadata__";

bool HasSafetensorsName(abi::DType dtype) {
  using abi::DType;
  switch (dtype) {
    case DType::kInvalid:
    case DType::kString:
    case DType::kC128:
    case DType::kU4:
    case DType::kI4:
    case DType::kU2:
    case DType::kI2:
      return false;
    default:
      return abi::FindDType(dtype) != nullptr && abi::FindDType(dtype)->block_bytes == 0;
  }
}

}  // namespace

std::string WhyNotInSafetensors(std::string_view name, abi::DType dtype,
                                std::span<const int64_t> shape) {
  if (name == kMetadataKey) return "a safetensors file cannot have a tensor of this name";
  if (!HasSafetensorsName(dtype)) {
    return absl::StrCat("safetensors has no type ", AsAbsl(abi::DTypeName(dtype)));
  }
  const std::optional<uint64_t> elements = ElementCount(shape);
  const uint64_t bits = abi::FindDType(dtype)->bits;
  uint64_t all_bits = 0;
  if (elements.has_value() && !__builtin_mul_overflow(*elements, bits, &all_bits) &&
      all_bits % 8 != 0) {
    return absl::StrCat(*elements, " elements of ", AsAbsl(abi::DTypeName(dtype)),
                        " are no whole bytes, which safetensors needs");
  }
  return "";
}

absl::StatusOr<std::string> SafetensorsHead(const std::vector<OutputTensor>& tensors,
                                            const std::vector<MetadataItem>& metadata) {
  // A string that grows by doubling would be twice as large for a while.
  size_t room = 1024;
  for (const OutputTensor& tensor : tensors) {
    room += tensor.name.size() + tensor.shape.size() * 8 + kRoomBesideName;
  }
  std::string head;
  head.reserve(room);
  head.assign(8, '\0');
  head += '{';
  if (!metadata.empty()) {
    AppendJsonString(kMetadataKey, &head);
    head += ":{";
    std::set<std::string_view> keys;
    for (const MetadataItem& item : metadata) {
      if (!keys.insert(item.key).second) continue;
      if (keys.size() > 1) head += ',';
      AppendJsonString(item.key, &head);
      head += ':';
      AppendJsonString(item.value, &head);
    }
    head += '}';
  }
  uint64_t offset = 0;
  for (const OutputTensor& tensor : tensors) {
    if (head.back() != '{') head += ',';
    AppendJsonString(tensor.name, &head);
    absl::StrAppend(&head, ":{\"dtype\":\"", AsAbsl(abi::DTypeName(tensor.dtype)),
                    "\",\"shape\":[");
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      absl::StrAppend(&head, i == 0 ? "" : ",", static_cast<uint64_t>(tensor.shape[i]));
    }
    absl::StrAppend(&head, "],\"data_offsets\":[", offset, ",", offset + tensor.nbytes, "]}");
    offset += tensor.nbytes;
  }
  head += '}';
  head.resize((head.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = head.size() - 8;
  if (header_bytes > kMaxHeaderBytes) {
    return absl::OutOfRangeError(
        absl::StrCat("the header of ", tensors.size(), " tensors would take ", header_bytes,
                     " bytes, more than the 100,000,000 that a safetensors file may have"));
  }
  for (size_t i = 0; i < 8; ++i) head[i] = static_cast<char>(header_bytes >> (8 * i) & 0xff);
  return head;
}

}  // namespace modelhost::modelctl
