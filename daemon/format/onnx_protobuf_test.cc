// The reader against Protobuf's own parse of the same bytes (onnx_subset/model.proto): every tensor
// that Protobuf finds is listed with its type, shape and bytes, no other one is, and no message is
// accepted that Protobuf refuses.
#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx_builder.h"
#include "daemon/format/onnx_values.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "onnx_subset/model.pb.h"

namespace modelhost {
namespace {

namespace fs = std::filesystem;
namespace pb = onnx_subset;
using testing::kOnnxDouble;
using testing::kOnnxFloat;
using testing::kOnnxInt64;
using testing::kOnnxString;
using testing::Le;
using testing::MemoryFiles;
using testing::OnnxAttribute;
using testing::OnnxExternal;
using testing::OnnxFloats;
using testing::OnnxGraph;
using testing::OnnxModel;
using testing::OnnxNode;
using testing::OnnxRaw;
using testing::OnnxSparse;
using testing::OnnxTensorOf;
using testing::Proto;
using ::testing::UnorderedElementsAreArray;

// Type, shape and bytes of a tensor as text. The names of what are no initializers are the
// reader's own.
std::string Line(std::string_view name, uint64_t type, const std::vector<int64_t>& dims,
                 const std::string& bytes) {
  std::string line = absl::StrCat(std::string(name), "|", type, "|");
  for (const int64_t dim : dims) absl::StrAppend(&line, dim, ",");
  return line + "|" + bytes;
}

// By TensorProto.DataType.
constexpr auto kTypes = std::to_array<abi::DType>(
    {abi::DType::kInvalid,    abi::DType::kF32,    abi::DType::kU8,         abi::DType::kI8,
     abi::DType::kU16,        abi::DType::kI16,    abi::DType::kI32,        abi::DType::kI64,
     abi::DType::kString,     abi::DType::kBool,   abi::DType::kF16,        abi::DType::kF64,
     abi::DType::kU32,        abi::DType::kU64,    abi::DType::kC64,        abi::DType::kC128,
     abi::DType::kBF16,       abi::DType::kF8E4M3, abi::DType::kF8E4M3Fnuz, abi::DType::kF8E5M2,
     abi::DType::kF8E5M2Fnuz, abi::DType::kU4,     abi::DType::kI4,         abi::DType::kF4,
     abi::DType::kF8E8M0,     abi::DType::kU2,     abi::DType::kI2});

// Of a type that has a size, in bytes.
uint64_t NeededBytes(const pb::Tensor& tensor) {
  uint64_t bits = abi::FindDType(kTypes[static_cast<size_t>(tensor.data_type())])->bits;
  for (const int64_t dim : tensor.dims()) bits *= static_cast<uint64_t>(dim);
  return (bits + 7) / 8;
}

// What Protobuf finds.
class ProtobufTensors {
 public:
  ProtobufTensors(const pb::Model& model, FileSource& files) : files_(files) {
    GraphOf(model.graph(), true);
    for (const pb::Function& function : model.functions()) {
      for (const pb::Node& node : function.node()) NodeOf(node);
      for (const pb::Attribute& attribute : function.attribute_proto()) AttributeOf(attribute);
    }
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  void GraphOf(const pb::Graph& graph, bool main) {
    for (const pb::Tensor& tensor : graph.initializer()) TensorOf(tensor, main);
    for (const pb::SparseTensor& sparse : graph.sparse_initializer()) SparseOf(sparse);
    for (const pb::Node& node : graph.node()) NodeOf(node);
  }
  void NodeOf(const pb::Node& node) {
    for (const pb::Attribute& attribute : node.attribute()) AttributeOf(attribute);
  }
  void AttributeOf(const pb::Attribute& attribute) {
    if (attribute.has_t()) TensorOf(attribute.t(), false);
    if (attribute.has_g()) GraphOf(attribute.g(), false);
    if (attribute.has_sparse_tensor()) SparseOf(attribute.sparse_tensor());
    for (const pb::Tensor& tensor : attribute.tensors()) TensorOf(tensor, false);
    for (const pb::Graph& graph : attribute.graphs()) GraphOf(graph, false);
    for (const pb::SparseTensor& sparse : attribute.sparse_tensors()) SparseOf(sparse);
  }
  void SparseOf(const pb::SparseTensor& sparse) {
    if (sparse.has_values()) TensorOf(sparse.values(), false);
    if (sparse.has_indices()) TensorOf(sparse.indices(), false);
  }
  void TensorOf(const pb::Tensor& tensor, bool main) {
    lines_.push_back(Line(main ? tensor.name() : "", static_cast<uint64_t>(tensor.data_type()),
                          {tensor.dims().begin(), tensor.dims().end()}, BytesOf(tensor)));
  }
  std::string BytesOf(const pb::Tensor& tensor) {
    if (tensor.data_location() == 1) return ExternalOf(tensor);
    if (tensor.has_raw_data()) return tensor.raw_data();
    std::string out;
    for (const float value : tensor.float_data()) out += Le(std::bit_cast<uint32_t>(value));
    for (const double value : tensor.double_data()) out += Le(std::bit_cast<uint64_t>(value));
    for (const int64_t value : tensor.int64_data()) out += Le(value);
    for (const uint64_t value : tensor.uint64_data()) {
      out += tensor.data_type() == 12 ? Le(static_cast<uint32_t>(value)) : Le(value);
    }
    for (const int32_t value : tensor.int32_data()) {
      const int type = tensor.data_type();
      const bool two = type == 4 || type == 5 || type == 10 || type == 16;
      out += type == 6   ? Le(value)
             : two       ? Le(static_cast<uint16_t>(value))
             : type == 9 ? Le(static_cast<uint8_t>(value != 0 ? 1 : 0))
                         : Le(static_cast<uint8_t>(value));
    }
    return out;
  }
  std::string ExternalOf(const pb::Tensor& tensor) {
    std::string location;
    std::string offset = "0";
    std::string length;
    for (const pb::Entry& entry : tensor.external_data()) {
      if (entry.key() == "location") location = entry.value();
      if (entry.key() == "offset") offset = entry.value();
      if (entry.key() == "length") length = entry.value();
    }
    const auto bytes = files_.Open(fs::path(location).lexically_normal().string());
    if (!bytes.ok()) return std::string(bytes.status().message());
    const std::string all(reinterpret_cast<const char*>(bytes->data()), bytes->size());
    return all.substr(std::stoull(offset),
                      length.empty() ? NeededBytes(tensor) : std::stoull(length));
  }

  FileSource& files_;
  std::vector<std::string> lines_;
};

// What the reader finds; nothing when it refuses the model or a value in it. `initializers` are
// those of the main graph, which come first.
std::optional<std::vector<std::string>> ReaderTensors(const std::string& name, FileSource& files,
                                                      size_t initializers) {
  const auto index = ReadModel(name, files);
  if (!index.ok() || index->format() != "onnx") return std::nullopt;
  std::vector<std::string> lines;
  for (size_t i = 0; i < index->size(); ++i) {
    const TensorInfo tensor = index->at(i);
    const auto file = files.Open(index->files()[tensor.file]);
    std::string bytes;
    if (!tensor.mappable && tensor.dtype != abi::DType::kString) {
      const auto values = DecodeOnnxValues(index->files()[tensor.file], *file, tensor);
      if (!values.ok()) return std::nullopt;
      bytes.assign(reinterpret_cast<const char*>(values->data()), values->size());
    } else if (tensor.mappable) {
      const auto range = file->subspan(tensor.offset, tensor.nbytes);
      bytes.assign(reinterpret_cast<const char*>(range.data()), range.size());
    }
    const auto type = std::find(kTypes.begin(), kTypes.end(), tensor.dtype) - kTypes.begin();
    lines.push_back(Line(i < initializers ? tensor.name : "", static_cast<uint64_t>(type),
                         {tensor.shape.begin(), tensor.shape.end()}, bytes));
  }
  return lines;
}

// True when both accept the model; what both find must be the same.
bool Compare(const std::string& name, FileSource& files) {
  const auto bytes = files.Open(name);
  if (!bytes.ok()) return false;
  pb::Model model;
  const bool parsed = model.ParseFromArray(bytes->data(), static_cast<int>(bytes->size()));
  const auto lines =
      ReaderTensors(name, files, static_cast<size_t>(model.graph().initializer_size()));
  if (!lines.has_value()) return false;
  EXPECT_TRUE(parsed) << name;
  EXPECT_THAT(*lines, UnorderedElementsAreArray(ProtobufTensors(model, files).lines())) << name;
  return true;
}

std::vector<std::string> GoodModels() {
  const std::string four(16, '\x2a');
  const std::string indices(16, '\0');
  const Proto sparse = OnnxSparse(OnnxFloats("sp", 2), OnnxRaw("i", kOnnxInt64, {2}, indices));
  const Proto attributes =
      OnnxNode("n", "o", OnnxAttribute("a", 5, OnnxFloats("a", 1)))
          .Add(5, OnnxAttribute("b", 6, OnnxGraph({OnnxFloats("w", 2)}).Add(15, sparse)))
          .Add(5, OnnxAttribute("c", 10, OnnxFloats("c", 1)).Add(10, OnnxFloats("c", 3)))
          .Add(5, OnnxAttribute("d", 11, OnnxGraph({OnnxFloats("w", 1)})).Add(11, OnnxGraph({})))
          .Add(5, OnnxAttribute("e", 22, sparse))
          .Add(5, OnnxAttribute("f", 23, sparse).Add(23, sparse));
  Proto function = Proto().Bytes(1, "F").Bytes(10, "d").Add(7, attributes);
  function.Add(11, OnnxAttribute("g", 5, OnnxFloats("", 2)));
  std::vector<Proto> typed;
  for (const uint64_t type : {2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 24}) {
    typed.push_back(OnnxTensorOf(absl::StrCat("t", type), type, {3}).Packed(5, {1, 0, 100}));
  }
  typed.push_back(OnnxTensorOf("i32", 6, {2}).Varint(5, UINT64_MAX).Packed(5, {7}));
  typed.push_back(OnnxTensorOf("u4", 21, {3}).Packed(5, {0x21, 3}));
  typed.push_back(OnnxTensorOf("u2", 25, {5}).Packed(5, {0xe4, 1}));
  typed.push_back(OnnxTensorOf("i64", 7, {2, 1}).Packed(7, {UINT64_MAX, 1}).Varint(99, 1));
  typed.push_back(OnnxTensorOf("u32", 12, {2}).Packed(11, {UINT32_MAX, 1}));
  typed.push_back(OnnxTensorOf("u64", 13, {2}).Packed(11, {UINT64_MAX, 1}));
  typed.push_back(OnnxTensorOf("f32", kOnnxFloat, {4}).Bytes(4, four));
  typed.push_back(OnnxTensorOf("c64", 14, {2}).Bytes(4, four.substr(8)).Bytes(4, four.substr(8)));
  typed.push_back(OnnxTensorOf("f64", kOnnxDouble, {2}).Bytes(10, four));
  typed.push_back(
      OnnxTensorOf("c128", 15, {1}).Tag(10, 1).Raw(four.substr(8)).Tag(10, 1).Raw(four.substr(8)));
  typed.push_back(OnnxTensorOf("s", kOnnxString, {2}).Bytes(6, "a").Bytes(6, "b"));
  typed.push_back(OnnxRaw("empty", kOnnxFloat, {2, 0}, ""));
  typed.push_back(
      Proto().Packed(1, {2, 2}).Bytes(9, "x").Bytes(9, four).Varint(2, 1).Bytes(8, "o"));
  typed.push_back(OnnxExternal("ext", kOnnxFloat, {2},
                               {{"location", "./w.bin"}, {"offset", "4"}, {"length", "8"}}));
  // Messages without tensors, everywhere they can be.
  const Proto entry = Proto().Bytes(1, "k").Bytes(2, "v");
  const Proto shape =
      Proto().Add(1, Proto().Varint(1, 4)).Add(1, Proto().Bytes(2, "n").Bytes(3, "d"));
  const Proto plain = Proto().Add(1, Proto().Varint(1, 1).Add(2, shape)).Bytes(6, "d");
  const Proto values = Proto().Bytes(1, "x").Bytes(3, "doc").Add(4, entry).Add(
      2, Proto().Add(5, Proto().Varint(1, 7).Add(2, Proto().Add(4, Proto().Add(1, plain)))));
  const Proto opaque = Proto().Add(7, Proto().Bytes(1, "d").Bytes(2, "n"));
  const Proto annotated =
      OnnxGraph(
          {OnnxFloats("w", 1).Add(16, entry)},
          {OnnxNode("n", "o", Proto().Bytes(1, "t").Add(14, plain).Add(15, opaque)).Add(9, entry)})
          .Add(11, Proto().Bytes(1, "i").Add(2, Proto().Add(8, Proto().Varint(1, 1).Add(2, shape))))
          .Add(12, Proto().Bytes(1, "o").Add(2, Proto().Add(9, Proto().Add(1, plain))))
          .Add(13, values)
          .Add(14, Proto().Bytes(1, "w").Add(2, entry))
          .Add(16, entry);
  const Proto typed_function = Proto()
                                   .Bytes(1, "G")
                                   .Add(9, Proto().Bytes(1, "d").Varint(2, 3))
                                   .Add(12, values)
                                   .Add(14, entry);
  return {
      OnnxModel(annotated).Add(25, typed_function).bytes(),
      OnnxModel(OnnxGraph(typed)).bytes(),
      OnnxModel(OnnxGraph({OnnxFloats("w", 4)}, {attributes}).Add(15, sparse))
          .Add(25, function)
          .bytes(),
      OnnxModel(OnnxGraph({OnnxFloats("a", 1)}, {attributes}))
          .Add(7, OnnxGraph({OnnxFloats("b", 1)}, {attributes}).Add(15, sparse))
          .Add(14, Proto().Bytes(1, "k").Bytes(2, "v"))
          .bytes(),
      OnnxModel(OnnxGraph({})).bytes(),
  };
}

MemoryFiles FilesWith(const std::string& model) {
  return MemoryFiles({{"m.onnx", model}, {"w.bin", std::string(64, 'w')}});
}

TEST(OnnxProtobufTest, GoodModelsAreReadAsProtobufReadsThem) {
  for (const std::string& model : GoodModels()) {
    MemoryFiles files = FilesWith(model);
    EXPECT_TRUE(Compare("m.onnx", files)) << ReadModel("m.onnx", files).status();
  }
}

TEST(OnnxProtobufTest, NestingEndsWhereProtobufEndsIt) {
  Proto graph = OnnxGraph({OnnxFloats("w", 1)});
  for (int depth = 0; depth < 40; ++depth) {
    MemoryFiles files = FilesWith(OnnxModel(graph).bytes());
    pb::Model model;
    EXPECT_EQ(ReadModel("m.onnx", files).ok(), model.ParseFromString(OnnxModel(graph).bytes()))
        << depth;
    graph = OnnxGraph({}, {OnnxNode("n", "o", OnnxAttribute("a", 6, graph))});
  }
}

// Whatever a byte is changed to: what the reader still accepts, Protobuf accepts and reads alike.
TEST(OnnxProtobufTest, DamagedModelsAreReadAlikeOrRefused) {
  std::mt19937_64 random(20260101);
  size_t accepted = 0;
  const std::vector<std::string> models = GoodModels();
  constexpr int kRuns = 20'000;
  for (int run = 0; run < kRuns && !HasFailure(); ++run) {
    std::string model = models[random() % 4];
    for (uint64_t changes = 1 + random() % 2; changes > 0; --changes) {
      const size_t at = random() % model.size();
      const auto byte = static_cast<char>(random());
      switch (random() % 4) {
        case 0:
          model[at] = byte;
          break;
        case 1:
          model[at] = static_cast<char>(model[at] ^ (1 << random() % 8));
          break;
        case 2:
          model.erase(at, 1);
          break;
        default:
          model.insert(at, 1, byte);
      }
    }
    MemoryFiles files = FilesWith(model);
    if (Compare("m.onnx", files)) ++accepted;
  }
  EXPECT_GT(accepted, size_t{kRuns / 100});
}

// The files of one folder.
class FolderFiles : public FileSource {
 public:
  explicit FolderFiles(fs::path folder) : folder_(std::move(folder)) {}
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    const auto known = files_.find(name);
    if (known != files_.end()) return std::as_bytes(std::span<const char>(known->second));
    std::ifstream in(folder_ / name, std::ios::binary);
    if (!in || !fs::is_regular_file(folder_ / name)) return absl::NotFoundError(name + ": missing");
    const auto added = files_.emplace(
        name, std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()));
    return std::as_bytes(std::span<const char>(added.first->second));
  }

 private:
  fs::path folder_;
  std::map<std::string, std::string> files_;
};

TEST(OnnxProtobufTest, FilesOfTheCorpusAreReadAsProtobufReadsThem) {
  const fs::path corpus = fs::path(MODELHOST_CORPUS);
  if (!fs::is_directory(corpus)) GTEST_SKIP() << "the corpus is not here: " << corpus;
  size_t accepted = 0;
  for (const char* folder : {"cases/onnx", "real/onnx"}) {
    for (const auto& entry : fs::recursive_directory_iterator(corpus / folder)) {
      if (entry.path().extension() != ".onnx") continue;
      FolderFiles files(entry.path().parent_path());
      if (Compare(entry.path().filename().string(), files)) ++accepted;
    }
  }
  EXPECT_GE(accepted, 30u);
}

}  // namespace
}  // namespace modelhost
