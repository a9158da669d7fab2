#include "daemon/format/onnx_values.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/onnx_tensor.h"
#include "daemon/format/text.h"
#include "daemon/format/wire_reader.h"

namespace modelhost {
namespace {

constexpr std::string_view kValuesHint = "the file changed since it was indexed: index it again";

// Reads the values of a checked TensorProto once more and writes them as bytes.
class ValueDecoder {
 public:
  ValueDecoder(ByteReader& in, const OnnxTensor& tensor) : wire_(in), tensor_(tensor) {
    out_.reserve(tensor.nbytes);
  }

  bool Run() {
    const auto number = static_cast<uint32_t>(tensor_.typed);
    return wire_.Fields([&](const WireField& field) {
      if (field.number != number) return wire_.Skip(field);
      switch (tensor_.typed) {
        case OnnxValues::kFloat:
          return Floats(field, WireType::kFixed32, 4);
        case OnnxValues::kDouble:
          return Floats(field, WireType::kFixed64, 8);
        default:
          return Varints(field);
      }
    });
  }

  std::vector<std::byte> Take() { return std::move(out_); }

 private:
  void Append(std::string_view raw) {
    for (const char c : raw) out_.push_back(static_cast<std::byte>(c));
  }

  bool Floats(const WireField& field, WireType single, uint64_t size) {
    std::string_view raw;
    if (field.type == single) {
      if (!wire_.in().Text("a value", size, &raw)) return false;
    } else if (field.type != WireType::kBytes) {
      return wire_.Skip(field);
    } else if (!wire_.Bytes("values", &raw)) {
      return false;
    }
    Append(raw);
    return true;
  }

  bool Varints(const WireField& field) {
    const auto add = [this](uint64_t value) { return Add(value); };
    uint64_t value = 0;
    if (field.type == WireType::kVarint) return wire_.Varint("a value", &value) && add(value);
    if (field.type == WireType::kBytes) return wire_.Varints("values", add);
    return wire_.Skip(field);
  }

  // The lowest bits of a value that a number of so many bits can be, with a sign or without.
  bool Add(uint64_t value) {
    const bool boolean = tensor_.dtype->dtype == abi::DType::kBool;
    // Small types come packed, a byte in each number.
    const uint32_t bits = boolean ? 32 : tensor_.dtype->bits < 8 ? 8 : tensor_.dtype->bits;
    if (bits < 64) {
      const auto number = static_cast<int64_t>(value);
      const int64_t least = tensor_.typed == OnnxValues::kUint64 ? 0 : -(int64_t{1} << (bits - 1));
      if (number < least || number >= int64_t{1} << bits) {
        return FailOnnxTensor(wire_.in(), tensor_,
                              absl::StrCat("has the value ", number, ", which is none of type ",
                                           AsAbsl(tensor_.dtype->name)),
                              "the model's writer is broken: export it again");
      }
    }
    if (boolean) value = value != 0 ? 1 : 0;
    for (uint32_t bit = 0; bit < (boolean ? 8 : bits); bit += 8) {
      out_.push_back(static_cast<std::byte>(value >> bit & 0xff));
    }
    return true;
  }

  WireReader wire_;
  const OnnxTensor& tensor_;
  std::vector<std::byte> out_;
};

}  // namespace

absl::StatusOr<std::vector<std::byte>> DecodeOnnxValues(const std::string& name,
                                                        std::span<const std::byte> file,
                                                        const TensorInfo& info) {
  if (info.dtype == abi::DType::kString) {
    return ModelError(name, absl::StrCat("tensor ", Quoted(info.name), " holds strings"),
                      "strings have no form as plain bytes: leave the tensor out",
                      absl::StatusCode::kUnimplemented);
  }
  ByteReader in(name, kValuesHint, file);
  uint64_t outer = 0;
  if (!in.Skip("a tensor", info.offset) || !in.Narrow("a tensor", info.nbytes, &outer)) {
    return in.status();
  }
  OnnxTensor tensor;
  tensor.begin = info.offset;
  WireReader wire(in);
  if (!ReadOnnxTensorFields(wire, &tensor) || !CheckOnnxTensor(in, &tensor)) return in.status();
  const bool same =
      tensor.dtype->dtype == info.dtype &&
      std::equal(tensor.dims.begin(), tensor.dims.end(), info.shape.begin(), info.shape.end());
  if (!same || tensor.has_raw || tensor.is_external()) {
    FailOnnxTensor(in, tensor, "is not the one that was indexed");
    return in.status();
  }
  in.Rewind(info.offset);
  ValueDecoder decoder(in, tensor);
  if (!decoder.Run()) return in.status();
  return decoder.Take();
}

}  // namespace modelhost
