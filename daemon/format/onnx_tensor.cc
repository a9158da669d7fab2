#include "daemon/format/onnx_tensor.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "daemon/format/onnx_plain.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

using abi::DType;

struct OnnxType {
  DType dtype = DType::kInvalid;
  OnnxValues typed = OnnxValues::kNone;
};

// By TensorProto.DataType.
constexpr auto kOnnxTypes = std::to_array<OnnxType>({
    {},
    {DType::kF32, OnnxValues::kFloat},
    {DType::kU8, OnnxValues::kInt32},
    {DType::kI8, OnnxValues::kInt32},
    {DType::kU16, OnnxValues::kInt32},
    {DType::kI16, OnnxValues::kInt32},
    {DType::kI32, OnnxValues::kInt32},
    {DType::kI64, OnnxValues::kInt64},
    {DType::kString, OnnxValues::kString},
    {DType::kBool, OnnxValues::kInt32},
    {DType::kF16, OnnxValues::kInt32},
    {DType::kF64, OnnxValues::kDouble},
    {DType::kU32, OnnxValues::kUint64},
    {DType::kU64, OnnxValues::kUint64},
    {DType::kC64, OnnxValues::kFloat},
    {DType::kC128, OnnxValues::kDouble},
    {DType::kBF16, OnnxValues::kInt32},
    {DType::kF8E4M3, OnnxValues::kInt32},
    {DType::kF8E4M3Fnuz, OnnxValues::kInt32},
    {DType::kF8E5M2, OnnxValues::kInt32},
    {DType::kF8E5M2Fnuz, OnnxValues::kInt32},
    {DType::kU4, OnnxValues::kInt32},
    {DType::kI4, OnnxValues::kInt32},
    {DType::kF4, OnnxValues::kInt32},
    {DType::kF8E8M0, OnnxValues::kInt32},
    {DType::kU2, OnnxValues::kInt32},
    {DType::kI2, OnnxValues::kInt32},
});

std::string_view TypedFieldName(OnnxValues field) {
  switch (field) {
    case OnnxValues::kFloat:
      return "float_data";
    case OnnxValues::kInt32:
      return "int32_data";
    case OnnxValues::kString:
      return "string_data";
    case OnnxValues::kInt64:
      return "int64_data";
    case OnnxValues::kDouble:
      return "double_data";
    case OnnxValues::kUint64:
      return "uint64_data";
    case OnnxValues::kNone:
      break;
  }
  return "no field";
}

// Collects the fields of one TensorProto.
class TensorFields {
 public:
  TensorFields(WireReader& wire, OnnxTensor& tensor) : wire_(wire), tensor_(tensor) {}

  bool Field(const WireField& field) {
    const bool bytes = field.type == WireType::kBytes;
    switch (field.number) {
      case 1:
        return Dims(field);
      case 2:
        if (field.type != WireType::kVarint) break;
        return wire_.Varint("data_type", &tensor_.data_type);
      case 3:
        if (!bytes) break;
        tensor_.segment = true;
        return wire_.Skip(field);
      case 4:
        return Floats(field, OnnxValues::kFloat, WireType::kFixed32, 4);
      case 5:
        return Varints(field, OnnxValues::kInt32);
      case 6:
        if (!bytes) break;
        return Count(OnnxValues::kString, 1) && wire_.Skip(field);
      case 7:
        return Varints(field, OnnxValues::kInt64);
      case 8:
        if (!bytes) break;
        return wire_.Bytes("a tensor's name", &tensor_.name);
      case 9:
        if (!bytes) break;
        return Raw();
      case 10:
        return Floats(field, OnnxValues::kDouble, WireType::kFixed64, 8);
      case 11:
        return Varints(field, OnnxValues::kUint64);
      case 13: {
        if (!bytes) break;
        OnnxEntry entry;
        return ReadOnnxEntry(wire_, &entry) && External(entry);
      }
      case 14:
        if (field.type != WireType::kVarint) break;
        return wire_.Varint("data_location", &tensor_.data_location);
      default:
        break;
    }
    return SkipOnnxField(wire_, OnnxPart::kTensor, field);
  }

 private:
  bool Dims(const WireField& field) {
    const auto add = [this](uint64_t dim) {
      if (++tensor_.rank <= kMostOnnxRank) tensor_.dims.push_back(static_cast<int64_t>(dim));
      return true;
    };
    uint64_t dim = 0;
    if (field.type == WireType::kVarint) return wire_.Varint("a dimension", &dim) && add(dim);
    if (field.type == WireType::kBytes) return wire_.Varints("dims", add);
    return wire_.Skip(field);
  }

  bool External(const OnnxEntry& entry) {
    OnnxExternalData& data = tensor_.external;
    std::optional<std::string_view>* place = entry.key == "location" ? &data.location
                                             : entry.key == "offset" ? &data.offset
                                             : entry.key == "length" ? &data.length
                                                                     : nullptr;
    if (place == nullptr) return true;
    if (place->has_value() && data.twice.empty()) data.twice = entry.key;
    *place = entry.value;
    return true;
  }

  bool Count(OnnxValues field, uint64_t values) {
    if (values == 0) return true;
    tensor_.several |= tensor_.typed != OnnxValues::kNone && tensor_.typed != field;
    tensor_.typed = field;
    tensor_.values += values;
    return true;
  }

  bool Run(OnnxValues field, uint64_t at, uint64_t values) {
    if (values == 0) return true;
    ++tensor_.runs;
    tensor_.run_at = at;
    return Count(field, values);
  }

  bool Floats(const WireField& field, OnnxValues values, WireType single, uint64_t size) {
    if (field.type == single) {
      ++tensor_.singles;
      return Count(values, 1) && wire_.Skip(field);
    }
    if (field.type != WireType::kBytes) return wire_.Skip(field);
    std::string_view run;
    if (!wire_.Bytes(TypedFieldName(values), &run)) return false;
    if (run.size() % size != 0) {
      return wire_.in().Fail(absl::StrCat("a run of ", AsAbsl(TypedFieldName(values)), " has ",
                                          run.size(), " bytes, which are no whole values"));
    }
    return Run(values, wire_.in().offset() - run.size(), run.size() / size);
  }

  bool Varints(const WireField& field, OnnxValues values) {
    if (field.type == WireType::kVarint) {
      ++tensor_.singles;
      return Count(values, 1) && wire_.Skip(field);
    }
    if (field.type != WireType::kBytes) return wire_.Skip(field);
    std::string_view run;
    uint64_t count = 0;
    if (!wire_.Bytes(TypedFieldName(values), &run)) return false;
    if (!CountVarints(run, &count)) {
      return wire_.in().Fail(
          absl::StrCat("a run of ", AsAbsl(TypedFieldName(values)), " is no row of numbers"));
    }
    return Run(values, wire_.in().offset() - run.size(), count);
  }

  bool Raw() {
    std::string_view raw;
    if (!wire_.Bytes("raw_data", &raw)) return false;
    tensor_.has_raw = true;
    tensor_.raw_bytes = raw.size();
    tensor_.raw_at = wire_.in().offset() - raw.size();
    return true;
  }

  WireReader& wire_;
  OnnxTensor& tensor_;
};

// The reference multiplies in order and refuses what overflows, even when a 0 follows.
bool CountElements(ByteReader& in, OnnxTensor* tensor) {
  if (tensor->rank > kMostOnnxRank) {
    return FailOnnxTensor(
        in, *tensor,
        absl::StrCat("has ", tensor->rank, " dimensions; the limit is ", kMostOnnxRank));
  }
  int64_t elements = 1;
  for (const int64_t dim : tensor->dims) {
    if (dim < 0) return FailOnnxTensor(in, *tensor, absl::StrCat("has the dimension ", dim));
    if (__builtin_mul_overflow(elements, dim, &elements)) {
      return FailOnnxTensor(in, *tensor, "has more elements than 63 bits can count");
    }
  }
  tensor->elements = static_cast<uint64_t>(elements);
  uint64_t bits = 0;
  if (__builtin_mul_overflow(tensor->elements, uint64_t{tensor->dtype->bits}, &bits) ||
      bits > static_cast<uint64_t>(INT64_MAX)) {
    return FailOnnxTensor(in, *tensor, "has more bits than 63 bits can count");
  }
  tensor->nbytes = (bits + 7) / 8;
  return true;
}

bool CheckValues(ByteReader& in, const OnnxTensor& tensor) {
  if (tensor.several) return FailOnnxTensor(in, tensor, "has values in several fields");
  const bool typed = tensor.typed != OnnxValues::kNone;
  const std::string_view field = TypedFieldName(tensor.typed);
  if (tensor.has_raw && typed) {
    return FailOnnxTensor(in, tensor,
                          absl::StrCat("has raw_data and values in ", AsAbsl(field), " too"));
  }
  if (tensor.is_external()) {
    if (typed || tensor.has_raw) {
      return FailOnnxTensor(in, tensor, "has its data in another file, and values here too");
    }
    return tensor.dtype->dtype != DType::kString ||
           FailOnnxTensor(in, tensor, "has strings in another file, which the format forbids");
  }
  if (tensor.has_raw) {
    if (tensor.dtype->dtype == DType::kString) {
      return FailOnnxTensor(in, tensor, "has strings in raw_data, which the format forbids");
    }
    return tensor.raw_bytes == tensor.nbytes ||
           FailOnnxTensor(in, tensor,
                          absl::StrCat("has raw_data of ", tensor.raw_bytes,
                                       " bytes, but its type and shape need ", tensor.nbytes));
  }
  if (typed && tensor.typed != kOnnxTypes[tensor.data_type].typed) {
    return FailOnnxTensor(in, tensor,
                          absl::StrCat("is of type ", AsAbsl(tensor.dtype->name),
                                       ", but its values are in ", AsAbsl(field), " instead of ",
                                       AsAbsl(TypedFieldName(kOnnxTypes[tensor.data_type].typed))));
  }
  const uint64_t needed = TypedValuesOf(tensor);
  if (tensor.values == needed) return true;
  if (!typed)
    return FailOnnxTensor(in, tensor, absl::StrCat("needs ", needed, " values, has none"));
  return FailOnnxTensor(in, tensor,
                        absl::StrCat("has ", tensor.values, " values in ", AsAbsl(field),
                                     ", but its type and shape need ", needed));
}

}  // namespace

bool ReadOnnxEntry(WireReader& wire, OnnxEntry* entry) {
  return wire.Message("an entry", [&](const WireField& field) {
    if (field.Is(1, WireType::kBytes)) return wire.Bytes("a key", &entry->key);
    if (field.Is(2, WireType::kBytes)) return wire.Bytes("a value", &entry->value);
    return wire.Skip(field);
  });
}

bool ReadOnnxTensor(WireReader& wire, OnnxTensor* tensor) {
  WireReader::Scope scope{};
  if (!wire.Enter("a tensor", &scope)) return false;
  tensor->begin = scope.begin;
  if (!ReadOnnxTensorFields(wire, tensor)) return false;
  tensor->end = wire.in().offset();
  return wire.Leave(scope);
}

bool ReadOnnxTensorFields(WireReader& wire, OnnxTensor* tensor) {
  TensorFields fields(wire, *tensor);
  return wire.Fields([&fields](const WireField& field) { return fields.Field(field); });
}

bool CheckOnnxTensor(ByteReader& in, OnnxTensor* tensor) {
  if (tensor->name.find('\0') != std::string_view::npos) {
    return FailOnnxTensor(in, *tensor, "has a NUL in its name");
  }
  if (!IsUtf8(tensor->name)) return FailOnnxTensor(in, *tensor, "has a name that is not UTF-8");
  if (tensor->data_type == 0) return FailOnnxTensor(in, *tensor, "has no data_type");
  if (tensor->data_type >= kOnnxTypes.size()) {
    return FailOnnxTensor(
        in, *tensor,
        absl::StrCat("has the unknown data_type ", static_cast<int64_t>(tensor->data_type)),
        "the file may be newer than this version, or its writer is broken",
        absl::StatusCode::kUnimplemented);
  }
  tensor->dtype = abi::FindDType(kOnnxTypes[tensor->data_type].dtype);
  if (tensor->segment) {
    return FailOnnxTensor(in, *tensor, "is stored in segments, which no reader supports",
                          "save the model again with whole tensors",
                          absl::StatusCode::kUnimplemented);
  }
  if (tensor->data_location > 1) {
    return FailOnnxTensor(in, *tensor,
                          absl::StrCat("has the unknown data_location ",
                                       static_cast<int64_t>(tensor->data_location)));
  }
  return CountElements(in, tensor) && CheckValues(in, *tensor);
}

void PlaceOnnxTensor(const OnnxTensor& tensor, TensorInfo* info) {
  info->dtype = tensor.dtype->dtype;
  info->shape = tensor.dims;
  info->mappable = true;
  info->nbytes = tensor.nbytes;
  if (tensor.has_raw) {
    info->offset = tensor.raw_at;
    return;
  }
  // One packed run of floats is what raw_data would hold.
  const bool floats = tensor.typed == OnnxValues::kFloat || tensor.typed == OnnxValues::kDouble;
  if (floats && tensor.runs == 1 && tensor.singles == 0) {
    info->offset = tensor.run_at;
    return;
  }
  info->offset = tensor.begin;
  if (tensor.elements == 0 && tensor.dtype->dtype != DType::kString) return;
  info->mappable = false;
  info->nbytes = tensor.end - tensor.begin;
  info->reason = tensor.dtype->dtype == DType::kString ? "strings have no fixed size"
                 : floats                              ? "the values lie in pieces"
                                                       : "the values are varints";
}

bool FailOnnxTensor(ByteReader& in, const OnnxTensor& tensor, std::string_view why,
                    std::string_view hint, absl::StatusCode code) {
  in.Rewind(tensor.begin);
  return in.Fail(absl::StrCat("tensor ", Quoted(tensor.name), " ", AsAbsl(why)), hint, code);
}

uint64_t TypedValuesOf(const OnnxTensor& tensor) {
  switch (tensor.dtype->dtype) {
    case DType::kC64:
    case DType::kC128:
      return 2 * tensor.elements;
    default:
      // Small types stand packed in the lowest 8 bits of each number.
      return tensor.dtype->bits > 0 && tensor.dtype->bits < 8 ? tensor.nbytes : tensor.elements;
  }
}

}  // namespace modelhost
