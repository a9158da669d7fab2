#include "daemon/format/onnx_plain.h"

#include <array>

namespace modelhost {
namespace {

// A field of one kind of message that is a message itself.
struct OnnxPlainField {
  OnnxPart in;
  uint32_t number;
  OnnxPart is;
};

constexpr auto kPlainFields = std::to_array<OnnxPlainField>({
    {OnnxPart::kGraph, 11, OnnxPart::kValueInfo},   // input
    {OnnxPart::kGraph, 12, OnnxPart::kValueInfo},   // output
    {OnnxPart::kGraph, 13, OnnxPart::kValueInfo},   // value_info
    {OnnxPart::kGraph, 14, OnnxPart::kAnnotation},  // quantization_annotation
    {OnnxPart::kGraph, 16, OnnxPart::kEntry},       // metadata_props
    {OnnxPart::kNode, 9, OnnxPart::kEntry},         // metadata_props
    {OnnxPart::kAttribute, 14, OnnxPart::kType},    // tp
    {OnnxPart::kAttribute, 15, OnnxPart::kType},    // type_protos
    {OnnxPart::kFunction, 9, OnnxPart::kOpset},     // opset_import
    {OnnxPart::kFunction, 12, OnnxPart::kValueInfo},
    {OnnxPart::kFunction, 14, OnnxPart::kEntry},  // metadata_props
    {OnnxPart::kTensor, 16, OnnxPart::kEntry},    // metadata_props
    {OnnxPart::kValueInfo, 2, OnnxPart::kType},
    {OnnxPart::kValueInfo, 4, OnnxPart::kEntry},   // metadata_props
    {OnnxPart::kAnnotation, 2, OnnxPart::kEntry},  // quant_parameter_tensor_names
    {OnnxPart::kType, 1, OnnxPart::kTensorType},
    {OnnxPart::kType, 4, OnnxPart::kSequenceType},
    {OnnxPart::kType, 5, OnnxPart::kMapType},
    {OnnxPart::kType, 7, OnnxPart::kOpaqueType},
    {OnnxPart::kType, 8, OnnxPart::kTensorType},  // sparse_tensor_type, with the same fields
    {OnnxPart::kType, 9, OnnxPart::kOptionalType},
    {OnnxPart::kTensorType, 2, OnnxPart::kShape},
    {OnnxPart::kShape, 1, OnnxPart::kDimension},
    {OnnxPart::kSequenceType, 1, OnnxPart::kType},
    {OnnxPart::kMapType, 2, OnnxPart::kType},
    {OnnxPart::kOptionalType, 1, OnnxPart::kType},
});

}  // namespace

bool SkipOnnxField(WireReader& wire, OnnxPart part, const WireField& field) {
  for (const OnnxPlainField& known : kPlainFields) {
    if (known.in != part || !field.Is(known.number, WireType::kBytes)) continue;
    return wire.Message(
        "a message", [&](const WireField& inner) { return SkipOnnxField(wire, known.is, inner); });
  }
  return wire.Skip(field);
}

}  // namespace modelhost
