// The beginning of a GGUF v3 file: all but the data. Alignment is 32.
//
// Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/modelctl/safetensors_writer.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

inline constexpr uint64_t kGgufAlignment = 32;

// Empty when a GGUF file can hold such a tensor; else why not.
std::string WhyNotInGguf(std::string_view name, abi::DType dtype, std::span<const int64_t> shape);

// kByLook: true and false are bools, whole numbers u32 or, where they do not fit, i64, other
// numbers f32, the rest strings; of general.* only file_type, quantization_version and the counts
// are numbers, so that a model may be called 2024.
enum class GgufValueType { kByLook, kText, kU32, kI32, kU64, kF32, kBool };

// "str" "u32" "i32" "u64" "f32" "bool"; nothing for another name.
std::optional<GgufValueType> FindGgufValueType(std::string_view name);

// The keys of a file: unique, in the order in which they came.
class GgufKeys {
 public:
  // All of a GGUF file that ReadModel accepted but what the target decides for itself: the
  // alignment and the numbers of a split set.
  absl::Status CopyFrom(const std::string& name, std::span<const std::byte> file);

  // These replace a key that is there.
  void SetText(const std::string& key, std::string_view value);
  void SetU32(const std::string& key, uint32_t value);
  // False, and nothing set, when `value` is not one of the type.
  bool SetValue(const std::string& key, GgufValueType type, const std::string& value);

  bool Has(const std::string& key) const { return at_.contains(key); }

 private:
  friend std::string GgufHead(const GgufKeys&, const std::vector<OutputTensor>&);
  bool SetByLook(const std::string& key, const std::string& value);
  template <typename T>
  bool SetNumber(const std::string& key, uint32_t type, const std::string& value);
  void Set(const std::string& key, uint32_t type, std::string_view bytes);

  struct Entry {
    std::string key;
    std::string typed;  // The type's number and the value, as in a file.
  };
  std::vector<Entry> entries_;
  absl::flat_hash_map<std::string, size_t> at_;  // Numbers in entries_.
};

// Keys that the writer decides and nobody else may set.
bool IsReservedGgufKey(std::string_view key);

// Header, keys, infos, padding. Each tensor's data follows, padded to the alignment; every tensor
// has passed WhyNotInGguf.
std::string GgufHead(const GgufKeys& keys, const std::vector<OutputTensor>& tensors);

}  // namespace modelhost::modelctl
