// The messages of an ONNX model that hold no tensors: types, annotations, properties.
//
// Nothing in them is used, but a field that Protobuf would refuse is refused here too: two readers
// shall not differ about what is a model. Errors stick in the reader, recursion ends at 100
// messages as in Protobuf, the cost is linear in the bytes. Not thread-safe.
#pragma once

#include <cstdint>

#include "daemon/format/wire_reader.h"

namespace modelhost {

// Where a field was found.
enum class OnnxPart : uint8_t {
  kGraph,
  kNode,
  kAttribute,
  kFunction,
  kTensor,
  // Only inside of the others.
  kEntry,
  kOpset,
  kValueInfo,
  kType,
  kTensorType,
  kShape,
  kDimension,
  kSequenceType,
  kMapType,
  kOptionalType,
  kOpaqueType,
  kAnnotation,
};

// Steps over the value of `field`, a field of `part`; through all of it when it is such a message.
bool SkipOnnxField(WireReader& wire, OnnxPart part, const WireField& field);

}  // namespace modelhost
