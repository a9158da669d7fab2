#include "daemon/format/onnx.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/abi/dtype.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kOnnxFloat;
using testing::kOnnxInt64;
using testing::kOnnxString;
using testing::MemoryFiles;
using testing::OnnxAttribute;
using testing::OnnxFloats;
using testing::OnnxGraph;
using testing::OnnxModel;
using testing::OnnxNode;
using testing::OnnxOf;
using testing::OnnxRaw;
using testing::OnnxSparse;
using testing::OnnxTensorOf;
using testing::Proto;

constexpr uint64_t kNegative = UINT64_MAX;

absl::StatusOr<TensorIndex> ReadOnnx(std::string bytes) {
  MemoryFiles files({{"m.onnx", std::move(bytes)}});
  return ReadModel("m.onnx", files);
}

std::string OnnxRefusal(const absl::StatusOr<TensorIndex>& index) {
  if (index.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(index.status()) || absl::IsUnimplemented(index.status()))
      << index.status();
  EXPECT_THAT(std::string(index.status().message()), HasSubstr("m.onnx: "));
  return std::string(index.status().message());
}

std::string RefusalOf(const Proto& initializer) {
  return OnnxRefusal(ReadOnnx(OnnxOf(initializer)));
}

std::vector<std::string> NamesOf(const absl::StatusOr<TensorIndex>& index) {
  if (!index.ok()) return {std::string(index.status().message())};
  std::vector<std::string> names;
  for (size_t i = 0; i < index->size(); ++i) names.emplace_back(index->at(i).name);
  return names;
}

std::string OnnxMetadata(const TensorIndex& index, std::string_view key) {
  for (const MetadataItem& item : index.metadata()) {
    if (item.key == key) return item.value;
  }
  return "absent";
}

TEST(OnnxTest, ListsInitializersWhereTheyLie) {
  const std::string raw = "the sixteen byte";
  const std::string bytes =
      OnnxModel(OnnxGraph({OnnxRaw("w", kOnnxFloat, {2, 2}, raw), OnnxRaw("s", 11, {}, "8 bytes!"),
                           OnnxRaw("empty", kOnnxFloat, {0, 4}, "")}))
          .bytes();
  auto index = ReadOnnx(bytes);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "onnx");
  EXPECT_THAT(index->files(), ElementsAre("m.onnx"));
  ASSERT_EQ(index->size(), 3u);
  const TensorInfo w = index->at(0);
  EXPECT_EQ(w.name, "w");
  EXPECT_EQ(w.dtype, abi::DType::kF32);
  EXPECT_THAT(w.shape, ElementsAre(2, 2));
  EXPECT_TRUE(w.mappable);
  EXPECT_EQ(bytes.substr(w.offset, w.nbytes), raw);
  EXPECT_EQ(bytes.substr(index->at(1).offset, index->at(1).nbytes), "8 bytes!");
  EXPECT_TRUE(index->at(1).shape.empty());
  EXPECT_EQ(index->at(2).nbytes, 0u);
  EXPECT_THAT(index->at(2).shape, ElementsAre(0, 4));
}

TEST(OnnxTest, KnowsEveryDataTypeAndItsSize) {
  const std::vector<std::pair<const char*, uint64_t>> types = {
      {"F32", 20},  {"U8", 5},      {"I8", 5},          {"U16", 10},    {"I16", 10},
      {"I32", 20},  {"I64", 40},    {"STRING", 0},      {"BOOL", 5},    {"F16", 10},
      {"F64", 40},  {"U32", 20},    {"U64", 40},        {"C64", 40},    {"C128", 80},
      {"BF16", 10}, {"F8_E4M3", 5}, {"F8_E4M3FNUZ", 5}, {"F8_E5M2", 5}, {"F8_E5M2FNUZ", 5},
      {"U4", 3},    {"I4", 3},      {"F4", 3},          {"F8_E8M0", 5}, {"U2", 2},
      {"I2", 2}};
  for (size_t i = 0; i < types.size(); ++i) {
    const auto& [name, bytes] = types[i];
    const uint64_t type = i + 1;
    if (type == kOnnxString) continue;
    auto index = ReadOnnx(OnnxOf(OnnxRaw("w", type, {5}, std::string(bytes, 'x'))));
    ASSERT_TRUE(index.ok()) << name << " " << index.status();
    EXPECT_EQ(abi::DTypeName(index->at(0).dtype), name);
    EXPECT_EQ(index->at(0).nbytes, bytes) << name;
    for (const uint64_t wrong : {bytes - 1, bytes + 1}) {
      EXPECT_THAT(RefusalOf(OnnxRaw("w", type, {5}, std::string(wrong, 'x'))),
                  HasSubstr(absl::StrCat("need ", bytes)))
          << name;
    }
  }
  for (const uint64_t type :
       {uint64_t{0}, uint64_t{27}, uint64_t{255}, uint64_t{1} << 32 | 1, kNegative}) {
    EXPECT_THAT(RefusalOf(OnnxRaw("w", type, {4}, std::string(16, 'x'))), HasSubstr("data_type"))
        << type;
  }
}

TEST(OnnxTest, ValuesInTypedFieldsAreListedWithAReason) {
  for (const auto& [type, field, count] : std::vector<std::tuple<uint64_t, uint32_t, size_t>>{
           {2, 5, 5},  {3, 5, 5},  {4, 5, 5},  {5, 5, 5},  {6, 5, 5},  {9, 5, 5},   {10, 5, 5},
           {16, 5, 5}, {17, 5, 5}, {18, 5, 5}, {19, 5, 5}, {20, 5, 5}, {24, 5, 5},  {21, 5, 3},
           {22, 5, 3}, {23, 5, 3}, {25, 5, 2}, {26, 5, 2}, {7, 7, 5},  {12, 11, 5}, {13, 11, 5}}) {
    const auto tensor = [&, type = type, field = field](size_t values) {
      return OnnxTensorOf("w", type, {5}).Packed(field, std::vector<uint64_t>(values, 1));
    };
    const std::string bytes = OnnxOf(tensor(count));
    auto index = ReadOnnx(bytes);
    ASSERT_TRUE(index.ok()) << type << " " << index.status();
    EXPECT_FALSE(index->at(0).mappable) << type;
    EXPECT_THAT(std::string(index->at(0).reason), HasSubstr("varints"));
    EXPECT_EQ(bytes.substr(index->at(0).offset, index->at(0).nbytes), tensor(count).bytes());
    EXPECT_THAT(RefusalOf(tensor(count - 1)), HasSubstr("values in")) << type;
    EXPECT_THAT(RefusalOf(tensor(count + 1)), HasSubstr("values in")) << type;
    for (const uint32_t other : {4u, 5u, 7u, 10u, 11u}) {
      if (other == field) continue;
      Proto wrong = OnnxTensorOf("w", type, {5});
      wrong.Bytes(other, std::string(40, '\1'));
      EXPECT_THAT(RefusalOf(wrong), HasSubstr("instead of")) << type;
    }
  }
  auto strings = ReadOnnx(OnnxOf(OnnxTensorOf("w", kOnnxString, {2}).Bytes(6, "a").Bytes(6, "")));
  ASSERT_TRUE(strings.ok()) << strings.status();
  EXPECT_EQ(strings->at(0).dtype, abi::DType::kString);
  EXPECT_FALSE(strings->at(0).mappable);
  EXPECT_THAT(std::string(strings->at(0).reason), HasSubstr("strings"));
}

TEST(OnnxTest, OnePackedRunOfFloatsIsMappedInPlace) {
  const std::string four(16, '\x11');
  for (const auto& [type, field, dim] : std::vector<std::tuple<uint64_t, uint32_t, int64_t>>{
           {1, 4, 4}, {14, 4, 2}, {11, 10, 2}, {15, 10, 1}}) {
    const std::string bytes = OnnxOf(OnnxTensorOf("w", type, {dim}).Bytes(field, four));
    auto index = ReadOnnx(bytes);
    ASSERT_TRUE(index.ok()) << type << " " << index.status();
    EXPECT_TRUE(index->at(0).mappable) << type;
    EXPECT_EQ(bytes.substr(index->at(0).offset, index->at(0).nbytes), four);
    // In two runs, in a run and one value, and one by one it is no range.
    const std::string half = four.substr(8);
    const uint32_t wire = field == 4 ? 5 : 1;
    const std::string one = four.substr(0, field == 4 ? 4 : 8);
    Proto two = OnnxTensorOf("w", type, {dim}).Bytes(field, half).Bytes(field, half);
    Proto singles = OnnxTensorOf("w", type, {dim});
    for (size_t at = 0; at < four.size(); at += one.size()) singles.Tag(field, wire).Raw(one);
    Proto mixed = OnnxTensorOf("w", type, {dim}).Tag(field, wire).Raw(one);
    mixed.Bytes(field, four.substr(one.size()));
    for (const Proto& pieces : {two, singles, mixed}) {
      auto unmapped = ReadOnnx(OnnxOf(pieces));
      ASSERT_TRUE(unmapped.ok()) << type << " " << unmapped.status();
      EXPECT_FALSE(unmapped->at(0).mappable);
      EXPECT_THAT(std::string(unmapped->at(0).reason), HasSubstr("pieces"));
    }
    EXPECT_THAT(RefusalOf(OnnxTensorOf("w", type, {dim}).Bytes(field, four.substr(1))),
                HasSubstr("no whole values"));
    EXPECT_THAT(RefusalOf(OnnxTensorOf("w", type, {dim}).Bytes(field, half)),
                HasSubstr("values in"));
  }
}

TEST(OnnxTest, RefusesBadTensors) {
  const std::string four(16, 'x');
  EXPECT_THAT(RefusalOf(OnnxTensorOf("w", kOnnxFloat, {4})), HasSubstr("needs 4 values, has none"));
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {-1}, four)), HasSubstr("dimension -1"));
  for (const std::vector<int64_t>& dims : std::vector<std::vector<int64_t>>{
           {1LL << 32, 1LL << 32}, {1LL << 32, 1LL << 32, 0}, {INT64_MAX}, {1LL << 61}}) {
    EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, dims, "")), HasSubstr("63 bits can count"));
  }
  EXPECT_TRUE(ReadOnnx(OnnxOf(OnnxRaw("w", kOnnxFloat, {0, 1LL << 32, 1LL << 32}, ""))).ok());
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {4}, four).Bytes(4, four)),
              HasSubstr("raw_data and values in float_data"));
  // Nothing raw beside values: two readers would see two things.
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {4}, "").Bytes(4, four)),
              HasSubstr("raw_data and values"));
  EXPECT_THAT(RefusalOf(OnnxTensorOf("w", kOnnxFloat, {4}).Bytes(4, four).Packed(5, {1})),
              HasSubstr("several fields"));
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxString, {4}, four)), HasSubstr("strings in raw_data"));
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {0}, four)), HasSubstr("need 0"));
  EXPECT_THAT(RefusalOf(OnnxTensorOf("w", kOnnxFloat, {0}).Bytes(4, four)), HasSubstr("need 0"));
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {4}, four).Bytes(3, "")), HasSubstr("segments"));
  EXPECT_THAT(RefusalOf(OnnxRaw("w", kOnnxFloat, {4}, four).Varint(14, 2)),
              HasSubstr("data_location 2"));
  EXPECT_THAT(RefusalOf(OnnxTensorOf("w", kOnnxInt64, {4}).Bytes(7, "\xff\xff")),
              HasSubstr("no row of numbers"));
  EXPECT_THAT(
      RefusalOf(OnnxTensorOf("w", kOnnxInt64, {1}).Bytes(7, std::string(11, '\x80') + "\1")),
      HasSubstr("no row of numbers"));
}

TEST(OnnxTest, MessagesWithoutTensorsAreReadThrough) {
  const auto type = [](const Proto& shape) {
    return Proto().Add(1, Proto().Varint(1, 1).Add(2, shape));
  };
  const auto value = [](const Proto& of) { return Proto().Bytes(1, "x").Add(2, of); };
  const Proto shape = Proto().Add(1, Proto().Varint(1, 4)).Add(1, Proto().Bytes(2, "batch"));
  const Proto deep = Proto().Add(9, Proto().Add(1, Proto().Add(4, Proto().Add(1, type(shape)))));
  const auto graph = [](uint32_t field, const Proto& message) {
    return OnnxModel(OnnxGraph({OnnxFloats("w", 1)}).Add(field, message)).bytes();
  };
  for (const Proto& good : {value(type(shape)), value(deep), value(Proto()), Proto()}) {
    for (const uint32_t field : {11u, 12u, 13u}) EXPECT_TRUE(ReadOnnx(graph(field, good)).ok());
  }
  const Proto lie = Proto().Raw("\x0a\x05x");
  const Proto wrong = Proto().Raw("\x0f");
  for (const Proto& bad : {lie, wrong}) {
    for (const uint32_t field : {11u, 12u, 13u, 14u, 16u}) {
      EXPECT_NE(OnnxRefusal(ReadOnnx(graph(field, bad))), "accepted") << field;
    }
    EXPECT_NE(OnnxRefusal(ReadOnnx(graph(13, value(bad)))), "accepted");
    EXPECT_NE(OnnxRefusal(ReadOnnx(graph(13, value(type(bad))))), "accepted");
    EXPECT_NE(OnnxRefusal(ReadOnnx(graph(13, value(type(Proto().Add(1, bad)))))), "accepted");
    EXPECT_NE(OnnxRefusal(ReadOnnx(graph(14, Proto().Add(2, bad)))), "accepted");
    EXPECT_NE(OnnxRefusal(ReadOnnx(OnnxOf(OnnxFloats("w", 1).Add(16, bad)))), "accepted");
    for (const Proto& node : {OnnxNode("n", "o", Proto().Bytes(1, "a").Add(14, bad)),
                              OnnxNode("n", "o", Proto().Bytes(1, "a").Add(15, bad)),
                              Proto().Bytes(3, "n").Add(9, bad)}) {
      EXPECT_NE(OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({}, {node})).bytes())), "accepted");
    }
    for (const uint32_t field : {9u, 12u, 14u}) {
      EXPECT_NE(
          OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({})).Add(25, Proto().Add(field, bad)).bytes())),
          "accepted");
    }
  }
  Proto nested = type(shape);
  for (int i = 0; i < 60; ++i) nested = Proto().Add(4, Proto().Add(1, nested));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(graph(11, value(nested)))), HasSubstr("100 deep"));
}

TEST(OnnxTest, NamesAreUtf8WithoutNulAndStandOnceInAGraph) {
  const auto initializer = [](std::string_view name) { return OnnxFloats(name, 1); };
  EXPECT_THAT(RefusalOf(initializer(std::string_view("a\0b", 3))), HasSubstr("NUL"));
  EXPECT_THAT(RefusalOf(initializer("a\xff")), HasSubstr("UTF-8"));
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxOf(initializer("")))), ElementsAre(""));
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxOf(initializer("\xd1\x8f \n/..")))),
              ElementsAre("\xd1\x8f \n/.."));
  EXPECT_THAT(
      OnnxRefusal(ReadOnnx(
          OnnxModel(OnnxGraph({initializer("w"), initializer("v"), initializer("w")})).bytes())),
      HasSubstr("duplicate tensor name: 'w'"));
  const Proto sparse = OnnxSparse(initializer("w"), OnnxRaw("", kOnnxInt64, {1}, "12345678"));
  EXPECT_THAT(
      OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({initializer("w")}).Add(15, sparse)).bytes())),
      HasSubstr("duplicate tensor name: 'w'"));
  const Proto twice = OnnxGraph({initializer("v"), initializer("v")});
  EXPECT_THAT(
      OnnxRefusal(ReadOnnx(
          OnnxModel(OnnxGraph({}, {OnnxNode("n", "o", OnnxAttribute("g", 6, twice))})).bytes())),
      HasSubstr("duplicate tensor name: 'v'"));
  const Proto bad = OnnxNode("n", "o", OnnxAttribute("value", 5, initializer("a\xff")));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({}, {bad})).bytes())), HasSubstr("UTF-8"));
}

TEST(OnnxTest, PlaysByProtobufsRules) {
  const std::string four(16, 'x');
  // Unknown fields, also with the number of a known one but of another type.
  Proto tensor = OnnxRaw("w", kOnnxFloat, {4}, four);
  tensor.Bytes(99, "new").Varint(9, 5).Varint(8, 5).Bytes(2, "x").Tag(1, 5).Raw("1234");
  tensor.Tag(30, 3).Varint(1, 2).Tag(30, 4);
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxOf(tensor))), ElementsAre("w"));
  // The last value of a field counts; fields come in any order; dims may be packed.
  tensor = Proto().Bytes(9, "short").Bytes(8, "v").Varint(2, 7).Bytes(9, four).Bytes(8, "w");
  tensor.Varint(2, kOnnxFloat).Packed(1, {2, 2});
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxOf(tensor))), ElementsAre("w"));
  // A graph in two parts is one.
  const std::string parts =
      OnnxModel(OnnxGraph({OnnxFloats("a", 1)})).Add(7, OnnxGraph({OnnxFloats("b", 1)})).bytes();
  EXPECT_THAT(NamesOf(ReadOnnx(parts)), ElementsAre("a", "b"));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({OnnxFloats("a", 1)}))
                                       .Add(7, OnnxGraph({OnnxFloats("a", 1)}))
                                       .bytes())),
              HasSubstr("duplicate"));
  // But not what one place can hold once.
  const Proto value = OnnxFloats("", 1);
  for (const uint32_t field : {5u, 6u, 22u}) {
    const Proto content = field == 5 ? value
                          : field == 6
                              ? OnnxGraph({})
                              : OnnxSparse(value, OnnxRaw("", kOnnxInt64, {1}, "12345678"));
    const Proto once = OnnxAttribute("a", field, content);
    EXPECT_TRUE(ReadOnnx(OnnxModel(OnnxGraph({}, {OnnxNode("n", "o", once)})).bytes()).ok())
        << field;
    Proto twice = once;
    twice.Add(field, content);
    EXPECT_THAT(
        OnnxRefusal(ReadOnnx(OnnxModel(OnnxGraph({}, {OnnxNode("n", "o", twice)})).bytes())),
        HasSubstr("in one place"));
  }
}

// --- Where tensors live, and what they are called.

Proto Value(size_t count = 1) { return OnnxFloats("", count); }

Proto If(std::string_view name, const Proto& then_branch, const Proto& else_branch) {
  return OnnxNode(name, "y", OnnxAttribute("then_branch", 6, then_branch))
      .Add(5, OnnxAttribute("else_branch", 6, else_branch));
}

TEST(OnnxTest, TensorsOfNodesAreCalledByTheWayToThem) {
  const std::vector<Proto> nodes = {
      OnnxNode("named", "o1", OnnxAttribute("value", 5, Value())),
      OnnxNode("", "o2", OnnxAttribute("value", 5, Value())),
      OnnxNode("", "", OnnxAttribute("value", 5, Value())),
      OnnxNode("list", "o3", OnnxAttribute("values", 10, Value()).Add(10, Value())),
      OnnxNode(
          "sp", "o4",
          OnnxAttribute("sparse_value", 22,
                        OnnxSparse(Value(2), OnnxRaw("", kOnnxInt64, {2}, std::string(16, '\0'))))),
      OnnxNode("plain", "o5", Proto().Bytes(1, "axis").Varint(3, 1)),
  };
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxModel(OnnxGraph({OnnxFloats("w", 1)}, nodes)).bytes())),
              ElementsAre("w", "named.value", "o2.value", "Constant#2.value", "list.values[0]",
                          "list.values[1]", "sp.sparse_value.values", "sp.sparse_value.indices"));
}

TEST(OnnxTest, TensorsOfSubgraphsAndFunctionsAreListed) {
  const Proto inner = OnnxGraph({OnnxFloats("w", 1)});
  const Proto then_branch =
      OnnxGraph({OnnxFloats("w", 2)}, {If("deep", inner, OnnxGraph({}))})
          .Add(15,
               OnnxSparse(OnnxFloats("s", 1), OnnxRaw("", kOnnxInt64, {1, 2}, std::string(16, 0))));
  Proto list = OnnxAttribute("bodies", 11, OnnxGraph({OnnxFloats("b", 1)}));
  list.Add(11, OnnxGraph({OnnxFloats("b", 1)}));
  const Proto function = Proto()
                             .Bytes(1, "Foo")
                             .Bytes(10, "my.domain")
                             .Add(7, OnnxNode("c", "o", OnnxAttribute("value", 5, Value())));
  Proto with_default = Proto().Bytes(1, "Bar");
  with_default.Add(11, OnnxAttribute("alpha", 5, Value()));
  const std::string bytes =
      OnnxModel(OnnxGraph({OnnxFloats("w", 3)},
                          {If("if", then_branch, OnnxGraph({})), OnnxNode("scan", "z", list)}))
          .Add(25, function)
          .Add(25, with_default)
          .bytes();
  EXPECT_THAT(
      NamesOf(ReadOnnx(bytes)),
      ElementsAre("w", "if.then_branch/w", "if.then_branch/deep.then_branch/w",
                  "if.then_branch/s.values", "if.then_branch/s.indices", "scan.bodies[0]/b",
                  "scan.bodies[1]/b", "functions/my.domain.Foo/c.value", "functions/Bar.alpha"));
}

TEST(OnnxTest, NamesAreUniqueAndAnInitializersOwnNameIsNeverChanged) {
  const Proto constant = OnnxNode("n", "o", OnnxAttribute("value", 5, Value()));
  EXPECT_THAT(
      NamesOf(ReadOnnx(OnnxModel(OnnxGraph({OnnxFloats("n.value", 1), OnnxFloats("n.value#2", 1)},
                                           {constant, constant, constant}))
                           .bytes())),
      ElementsAre("n.value", "n.value#2", "n.value#3", "n.value#4", "n.value#5"));
}

TEST(OnnxTest, NamesOfNodesAreCutAndMadeText) {
  const std::string longer(1000, 'x');
  const Proto node = OnnxNode("a\n\xff" + longer, "o", OnnxAttribute("v", 5, Value()));
  auto index = ReadOnnx(OnnxModel(OnnxGraph({}, {node})).bytes());
  ASSERT_EQ(index->size(), 1u) << index.status();
  EXPECT_EQ(index->at(0).name, "a__" + longer.substr(0, 45) + "....v");
  // Deep inside the number of the subgraph stands for the way.
  Proto graph = OnnxGraph({OnnxFloats(longer, 1)});
  for (int i = 0; i < 20; ++i) graph = OnnxGraph({}, {If(longer, graph, OnnxGraph({}))});
  auto deep = ReadOnnx(OnnxModel(graph).bytes());
  ASSERT_TRUE(deep.ok()) << deep.status();
  EXPECT_LT(deep->at(0).name.size(), 300 + longer.size());
  EXPECT_THAT(std::string(deep->at(0).name), HasSubstr("subgraph#"));
}

TEST(OnnxTest, NestedSubgraphsEndAtProtobufsLimit) {
  const auto nested = [](int depth) {
    Proto graph = OnnxGraph({OnnxFloats("w", 1)});
    for (int i = 0; i < depth; ++i) graph = OnnxGraph({}, {If("if", graph, OnnxGraph({}))});
    return OnnxModel(graph).bytes();
  };
  // A graph in a graph is three messages deeper, the tensor one more: 1 + 3 * 32 + 1 = 98.
  EXPECT_TRUE(ReadOnnx(nested(32)).ok());
  EXPECT_THAT(OnnxRefusal(ReadOnnx(nested(33))), HasSubstr("100 deep"));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(nested(300))), HasSubstr("100 deep"));
}

TEST(OnnxTest, SparseTensorsAreTwoTensorsThatFit) {
  const auto read = [](const Proto& sparse) {
    return ReadOnnx(OnnxModel(OnnxGraph({}).Add(15, sparse)).bytes());
  };
  const Proto values = OnnxFloats("sp", 2);
  const std::string bytes(32, '\0');
  EXPECT_THAT(NamesOf(read(OnnxSparse(values, OnnxRaw("", kOnnxInt64, {2}, bytes.substr(16))))),
              ElementsAre("sp.values", "sp.indices"));
  EXPECT_THAT(NamesOf(read(OnnxSparse(values, OnnxRaw("", kOnnxInt64, {2, 2}, bytes)))),
              ElementsAre("sp.values", "sp.indices"));
  // The indices may come first in the file.
  EXPECT_THAT(NamesOf(read(Proto().Add(2, OnnxRaw("", kOnnxInt64, {2, 2}, bytes)).Add(1, values))),
              ElementsAre("sp.values", "sp.indices"));
  EXPECT_THAT(NamesOf(read(Proto().Add(1, OnnxFloats("sp", 0)))), ElementsAre("sp.values"));
  EXPECT_THAT(OnnxRefusal(read(Proto().Add(1, values))), HasSubstr("without indices"));
  EXPECT_THAT(OnnxRefusal(read(Proto().Add(2, values))), HasSubstr("no values"));
  EXPECT_THAT(OnnxRefusal(read(OnnxSparse(values, values))), HasSubstr("do not fit"));
  EXPECT_THAT(OnnxRefusal(read(OnnxSparse(values, OnnxRaw("", kOnnxInt64, {4}, bytes)))),
              HasSubstr("do not fit"));
  EXPECT_THAT(OnnxRefusal(read(OnnxSparse(OnnxRaw("sp", kOnnxFloat, {2, 1}, bytes.substr(24)),
                                          OnnxRaw("", kOnnxInt64, {2}, bytes.substr(16))))),
              HasSubstr("not a row"));
  EXPECT_THAT(OnnxRefusal(read(OnnxSparse(values, values).Add(1, values))),
              HasSubstr("in one place"));
}

// --- The model around the tensors.

TEST(OnnxTest, MetadataIsWhatTheModelSaysOfItself) {
  Proto model = OnnxModel(OnnxGraph({}));
  model.Bytes(3, "1.2")
      .Bytes(4, "a\xff")
      .Varint(5, kNegative)
      .Add(8, Proto().Bytes(1, "com.x").Varint(2, 3));
  model.Add(14, Proto().Bytes(1, "author").Bytes(2, "me\xff"));
  model.Add(14, Proto().Bytes(1, "author").Bytes(2, "you"));
  model.Add(14, Proto().Bytes(1, "bad\xff").Bytes(2, "x")).Add(20, Proto());
  auto index = ReadOnnx(model.bytes());
  ASSERT_TRUE(index.ok()) << index.status();
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>{{"onnx.ir_version", "8"},
                                                        {"onnx.producer_name", "test"},
                                                        {"onnx.producer_version", "1.2"},
                                                        {"onnx.domain", "a\xef\xbf\xbd"},
                                                        {"onnx.model_version", "-1"},
                                                        {"onnx.opset.ai.onnx", "17"},
                                                        {"onnx.opset.com.x", "3"},
                                                        {"author", "me\xef\xbf\xbd"}}) {
    EXPECT_EQ(OnnxMetadata(*index, key), value) << key;
  }
  EXPECT_THAT(index->warnings(),
              ElementsAre(HasSubstr("'author' occurs twice"), HasSubstr("'bad\\xff' is not UTF-8"),
                          HasSubstr("training_info")));
}

TEST(OnnxTest, AModelHasAGraph) {
  EXPECT_THAT(NamesOf(ReadOnnx(OnnxModel(OnnxGraph({})).bytes())), IsEmpty());
  EXPECT_THAT(OnnxRefusal(ReadOnnx(Proto().Varint(1, 8).bytes())), HasSubstr("no graph"));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(std::string(64, '\xff'))), HasSubstr("too many bytes"));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(OnnxOf(OnnxFloats("w", 1)) + "\x0f")), HasSubstr("wire type 7"));
  EXPECT_THAT(OnnxRefusal(ReadOnnx(OnnxOf(OnnxFloats("w", 1)) + std::string(1, '\0'))),
              HasSubstr("number 0"));
}

TEST(OnnxTest, NoModelHas2GiB) {
  // Refused by its size alone: there is only one byte to look at.
  const auto byte = std::byte{8};
  MemoryFiles files;
  TensorIndex index("onnx");
  const absl::Status status =
      ReadOnnx("m.onnx", std::span<const std::byte>(&byte, size_t{1} << 31), files, index);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("2147483648 bytes"), HasSubstr("external data")));
}

TEST(OnnxTest, EveryCutIsRefusedButThoseThatLeaveAWholeModel) {
  const Proto constant = OnnxNode("n", "o", OnnxAttribute("value", 5, Value()));
  const Proto graph =
      OnnxGraph({OnnxFloats("a", 3), OnnxTensorOf("b", kOnnxInt64, {2}).Packed(7, {1, kNegative})},
                {constant, If("if", OnnxGraph({OnnxFloats("c", 1)}), OnnxGraph({}))});
  const std::string with_graph = Proto().Varint(1, 8).Add(7, graph).bytes();
  const std::string whole = with_graph + Proto().Varint(5, 1).bytes();
  auto index = ReadOnnx(whole);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->size(), 4u);
  for (size_t size = 0; size < whole.size(); ++size) {
    auto cut = ReadOnnx(whole.substr(0, size));
    if (size == with_graph.size()) {
      EXPECT_EQ(NamesOf(cut), NamesOf(index));
    } else {
      EXPECT_NE(OnnxRefusal(cut), "accepted") << size;
    }
  }
}

TEST(OnnxTest, AModelUnderTheNameOfAnEngineIsRefusedByName) {
  for (const char* name : {"m.engine", "m.PLAN"}) {
    MemoryFiles files({{name, OnnxOf(OnnxFloats("w", 1))}});
    EXPECT_THAT(std::string(ReadModel(name, files).status().message()),
                AllOf(HasSubstr("ONNX"), HasSubstr("TensorRT")));
  }
}

}  // namespace
}  // namespace modelhost
