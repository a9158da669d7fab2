// One TensorProto of an ONNX model: where its values lie and whether they are all there.
//
// Nothing is copied: texts and ranges are those of the file. Offsets are absolute in it, sizes in
// bytes. Errors stick in the reader. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "daemon/format/tensor_index.h"
#include "daemon/format/wire_reader.h"
#include "proto/abi/dtype.h"

namespace modelhost {

// What all messages here mean by "key" and "value" (StringStringEntryProto).
struct OnnxEntry {
  std::string_view key;
  std::string_view value;
};
bool ReadOnnxEntry(WireReader& wire, OnnxEntry* entry);

// What is used of a tensor's external_data.
struct OnnxExternalData {
  std::optional<std::string_view> location;
  std::optional<std::string_view> offset;
  std::optional<std::string_view> length;
  std::string_view twice;  // The first of these keys that occurs again.
};

// The fields of TensorProto that hold values, by their numbers.
enum class OnnxValues : uint32_t {
  kNone = 0,
  kFloat = 4,
  kInt32 = 5,
  kString = 6,
  kInt64 = 7,
  kDouble = 10,
  kUint64 = 11,
};

// A dimension takes one byte of the file and eight of the index.
inline constexpr size_t kMostOnnxRank = 1024;

struct OnnxTensor {
  uint64_t begin = 0;  // The message, without its tag and length.
  uint64_t end = 0;
  std::string_view name;
  std::vector<int64_t> dims;  // Not more than kMostOnnxRank of them.
  uint64_t rank = 0;
  uint64_t data_type = 0;
  bool segment = false;
  // Several: two of the typed fields have values.
  OnnxValues typed = OnnxValues::kNone;
  bool several = false;
  uint64_t values = 0;  // In the typed fields.
  uint64_t runs = 0;    // Of packed values; `run_at` is the last one.
  uint64_t run_at = 0;
  uint64_t singles = 0;  // Values with a tag of their own.
  bool has_raw = false;
  uint64_t raw_at = 0;
  uint64_t raw_bytes = 0;
  uint64_t data_location = 0;
  OnnxExternalData external;

  // Filled by CheckOnnxTensor.
  const abi::DTypeInfo* dtype = nullptr;
  uint64_t elements = 0;
  uint64_t nbytes = 0;  // That shape and type need; 0 for STRING.

  bool is_external() const { return data_location == 1; }
};

// Reads the TensorProto that comes next in `wire`, with its length.
bool ReadOnnxTensor(WireReader& wire, OnnxTensor* tensor);
// Reads the fields of a message up to its end; `begin` and `end` stay alone.
bool ReadOnnxTensorFields(WireReader& wire, OnnxTensor* tensor);

// Type, shape and the amount of values must fit. An external tensor's file is not looked at here.
bool CheckOnnxTensor(ByteReader& in, OnnxTensor* tensor);

// Place of the values of a checked tensor that is not external, in the file it was read from.
// Leaves `name` and `file` alone.
void PlaceOnnxTensor(const OnnxTensor& tensor, TensorInfo* info);

// Fails with the tensor's name in front of `why`, at the place of the tensor.
bool FailOnnxTensor(ByteReader& in, const OnnxTensor& tensor, std::string_view why,
                    std::string_view hint = {},
                    absl::StatusCode code = absl::StatusCode::kInvalidArgument);

// How many values of the typed field one tensor needs (a complex number takes two, a byte holds
// several of the small types).
uint64_t TypedValuesOf(const OnnxTensor& tensor);

}  // namespace modelhost
