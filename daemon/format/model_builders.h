// Model files made in memory, for tests: good ones by default, wrong ones by hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"

namespace modelhost::testing {

// Files by name.
class MemoryFiles : public FileSource {
 public:
  MemoryFiles() = default;
  explicit MemoryFiles(std::map<std::string, std::string> files) : files_(std::move(files)) {}

  void Put(const std::string& name, std::string bytes) { files_[name] = std::move(bytes); }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : files_) names.push_back(name);
    return names;
  }
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    const auto at = files_.find(name);
    if (at == files_.end()) return absl::NotFoundError(name + ": no such file");
    return std::as_bytes(std::span<const char>(at->second));
  }

 private:
  std::map<std::string, std::string> files_;
};

template <typename T>
std::string Le(T value) {
  std::string out;
  for (size_t i = 0; i < sizeof(T); ++i) {
    out += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i) & 0xff);
  }
  return out;
}

// The length prefix, `header` as it is, and `data_bytes` bytes of data.
inline std::string Safetensors(std::string_view header, size_t data_bytes) {
  return Le<uint64_t>(header.size()) + std::string(header) + std::string(data_bytes, '\x5a');
}

// `"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}`; `shape` as JSON.
inline std::string TensorJson(std::string_view name, std::string_view dtype, std::string_view shape,
                              uint64_t begin, uint64_t end) {
  std::string out = "\"";
  out.append(name).append("\":{\"dtype\":\"").append(dtype).append("\",\"shape\":").append(shape);
  absl::StrAppend(&out, ",\"data_offsets\":[", begin, ",", end, "]}");
  return out;
}

// One U8 tensor of 4 bytes per name.
inline std::string SmallSafetensors(const std::vector<std::string>& names) {
  std::string header = "{";
  for (size_t i = 0; i < names.size(); ++i) {
    header += (i == 0 ? "" : ",") + TensorJson(names[i], "U8", "[4]", 4 * i, 4 * i + 4);
  }
  return Safetensors(header + "}", 4 * names.size());
}

// A GGUF file from its parts. Offsets are laid out unless a tensor brings its own.
class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;         // Used for the layout; Key() it when it is not 32.
  int64_t tensor_count_error = 0;  // Added to the announced count.
  int64_t key_count_error = 0;
  bool last_padding = true;

  static std::string Text(std::string_view text) {
    return Le<uint64_t>(text.size()) + std::string(text);
  }
  GgufBuilder& Key(std::string_view key, uint32_t type, const std::string& value) {
    keys_ += Text(key) + Le(type) + value;
    ++key_count_;
    return *this;
  }
  GgufBuilder& KeyU32(std::string_view key, uint32_t value) { return Key(key, 4, Le(value)); }
  GgufBuilder& KeyText(std::string_view key, std::string_view v) { return Key(key, 8, Text(v)); }
  // Of a set: part `number` (from 0) of `count`; the first part says how many tensors there are.
  GgufBuilder& Split(uint16_t number, uint16_t count, int32_t tensors) {
    Key("split.no", 2, Le(number)).Key("split.count", 2, Le(count));
    return Key("split.tensors.count", 5, Le(tensors));
  }
  // `dims` in the order of the file: the row first. `bytes` is what it takes in the data.
  GgufBuilder& Tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                      uint64_t bytes) {
    return TensorAt(name, dims, type, bytes, data_);
  }
  GgufBuilder& TensorAt(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t bytes, uint64_t offset) {
    infos_ += Text(name) + Le(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) infos_ += Le(dim);
    infos_ += Le(type) + Le(offset);
    ++tensor_count_;
    end_ = offset + bytes;
    data_ = (end_ + alignment - 1) / alignment * alignment;
    return *this;
  }
  std::string Build() const {
    std::string out = "GGUF" + Le(version) + Le(tensor_count_ + tensor_count_error) +
                      Le(key_count_ + key_count_error) + keys_ + infos_;
    if (tensor_count_ == 0) return out;
    out.resize((out.size() + alignment - 1) / alignment * alignment);
    out.resize(out.size() + (last_padding ? data_ : end_), '\x5a');
    return out;
  }

 private:
  std::string keys_;
  std::string infos_;
  int64_t key_count_ = 0;
  int64_t tensor_count_ = 0;
  uint64_t data_ = 0;
  uint64_t end_ = 0;
};

}  // namespace modelhost::testing
