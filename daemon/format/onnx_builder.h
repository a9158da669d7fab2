// ONNX models made in memory, for tests: messages from their fields, right or wrong as asked.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace modelhost::testing {

// TensorProto.DataType.
inline constexpr uint64_t kOnnxFloat = 1;
inline constexpr uint64_t kOnnxInt32 = 6;
inline constexpr uint64_t kOnnxInt64 = 7;
inline constexpr uint64_t kOnnxString = 8;
inline constexpr uint64_t kOnnxDouble = 11;

inline std::string VarintBytes(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(0x80 | (value & 0x7f));
  return out + static_cast<char>(value);
}

// A message of protobuf's wire format, field after field.
class Proto {
 public:
  Proto& Raw(std::string_view bytes) {
    bytes_ += bytes;
    return *this;
  }
  Proto& Tag(uint32_t field, uint32_t type) {
    return Raw(VarintBytes(uint64_t{field} << 3 | type));
  }
  Proto& Varint(uint32_t field, uint64_t value) { return Tag(field, 0).Raw(VarintBytes(value)); }
  Proto& Bytes(uint32_t field, std::string_view bytes) {
    return Tag(field, 2).Raw(VarintBytes(bytes.size())).Raw(bytes);
  }
  Proto& Add(uint32_t field, const Proto& message) { return Bytes(field, message.bytes_); }
  Proto& Packed(uint32_t field, const std::vector<uint64_t>& values) {
    std::string run;
    for (const uint64_t value : values) run += VarintBytes(value);
    return Bytes(field, run);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A TensorProto without values.
inline Proto OnnxTensorOf(std::string_view name, uint64_t type, const std::vector<int64_t>& dims) {
  Proto tensor;
  for (const int64_t dim : dims) tensor.Varint(1, static_cast<uint64_t>(dim));
  tensor.Varint(2, type);
  if (!name.empty()) tensor.Bytes(8, name);
  return tensor;
}
inline Proto OnnxRaw(std::string_view name, uint64_t type, const std::vector<int64_t>& dims,
                     std::string_view raw) {
  return OnnxTensorOf(name, type, dims).Bytes(9, raw);
}
// F32 of `count` values.
inline Proto OnnxFloats(std::string_view name, size_t count) {
  return OnnxRaw(name, kOnnxFloat, {static_cast<int64_t>(count)}, std::string(4 * count, '\x3f'));
}
using OnnxEntries = std::vector<std::pair<std::string, std::string>>;
inline Proto OnnxExternal(std::string_view name, uint64_t type, const std::vector<int64_t>& dims,
                          const OnnxEntries& entries) {
  Proto tensor = OnnxTensorOf(name, type, dims);
  for (const auto& [key, value] : entries) tensor.Add(13, Proto().Bytes(1, key).Bytes(2, value));
  return tensor.Varint(14, 1);
}
inline Proto OnnxSparse(const Proto& values, const Proto& indices) {
  return Proto().Add(1, values).Add(2, indices).Varint(3, 100);
}
// `field` is 5 for a tensor, 6 for a graph, 10 and 11 for lists of them, 22 and 23 for sparse ones.
inline Proto OnnxAttribute(std::string_view name, uint32_t field, const Proto& value) {
  return Proto().Bytes(1, name).Add(field, value);
}
inline Proto OnnxNode(std::string_view name, std::string_view output, const Proto& attribute) {
  Proto node;
  node.Bytes(2, output);
  if (!name.empty()) node.Bytes(3, name);
  return node.Bytes(4, "Constant").Add(5, attribute);
}
inline Proto OnnxGraph(const std::vector<Proto>& initializers,
                       const std::vector<Proto>& nodes = {}) {
  Proto graph;
  for (const Proto& node : nodes) graph.Add(1, node);
  graph.Bytes(2, "graph");
  for (const Proto& initializer : initializers) graph.Add(5, initializer);
  return graph;
}
inline Proto OnnxModel(const Proto& graph) {
  return Proto().Varint(1, 8).Bytes(2, "test").Add(7, graph).Add(
      8, Proto().Bytes(1, "").Varint(2, 17));
}
// One model of one initializer.
inline std::string OnnxOf(const Proto& initializer) {
  return OnnxModel(OnnxGraph({initializer})).bytes();
}

}  // namespace modelhost::testing
