#include "daemon/format/torch_zip.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::AnyOf;
using testing::Checkpoint;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryFiles;
using testing::SmallCheckpoint;
using testing::ZipBuilder;
namespace pk = testing::pickled;

absl::StatusOr<TensorIndex> ReadTorch(std::string bytes) {
  MemoryFiles files({{"m.pt", std::move(bytes)}});
  return ReadModel("m.pt", files);
}
std::string TorchRefusal(const ZipBuilder& zip) {
  auto index = ReadTorch(zip.Build());
  if (index.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(index.status()) || absl::IsUnimplemented(index.status()));
  EXPECT_THAT(std::string(index.status().message()), HasSubstr("m.pt: "));
  return std::string(index.status().message());
}
// Of a checkpoint with `value` and storages of 16 bytes: 0, 1 and 2.
std::string Sixteen(char c) { return std::string(16, c); }
ZipBuilder With(const std::string& value) {
  return Checkpoint(pk::Whole(value),
                    {{"0", Sixteen('a')}, {"1", Sixteen('b')}, {"2", Sixteen('c')}});
}
std::string TorchRefusalOfValue(const std::string& value) { return TorchRefusal(With(value)); }

std::vector<std::string> NamesIn(const std::string& value) {
  auto index = ReadTorch(With(value).Build());
  EXPECT_TRUE(index.ok()) << index.status();
  std::vector<std::string> names;
  for (size_t i = 0; index.ok() && i < index->size(); ++i) {
    names.emplace_back(index->at(i).name);
  }
  return names;
}

TEST(TorchZipTest, IndexesAStateDict) {
  const ZipBuilder zip =
      With(pk::NoHooks() + "(" + pk::Text("a.weight") + pk::Four("0") + pk::Text("a.bias") +
           pk::Four("1") + "u" + pk::Dict({{pk::Text("_metadata"), "}"}}) + "b");
  const std::string bytes = zip.Build();
  auto index = ReadTorch(bytes);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "torch");
  EXPECT_THAT(index->files(), ElementsAre("m.pt"));
  ASSERT_EQ(index->size(), 2u);
  const TensorInfo weight = index->at(0);
  EXPECT_EQ(weight.name, "a.weight");
  EXPECT_EQ(weight.dtype, abi::DType::kF32);
  EXPECT_THAT(weight.shape, ElementsAre(4));
  EXPECT_THAT(weight.strides, IsEmpty());
  EXPECT_TRUE(weight.mappable);
  EXPECT_EQ(bytes.substr(weight.offset, weight.nbytes), Sixteen('a'));
  EXPECT_EQ(weight.offset % 64, 0u);
  EXPECT_EQ(index->at(1).name, "a.bias");
  EXPECT_EQ(bytes.substr(index->at(1).offset, index->at(1).nbytes), Sixteen('b'));
  EXPECT_THAT(index->warnings(), IsEmpty());
}

TEST(TorchZipTest, AnyAlignmentAndAnyOrderOfMembers) {
  for (const uint64_t alignment : {0, 1, 3, 4096}) {
    ZipBuilder zip = SmallCheckpoint();
    zip.alignment = alignment;
    std::swap(zip.At(0), zip.At(3));
    std::swap(zip.At(1), zip.At(2));
    const std::string bytes = zip.Build();
    auto index = ReadTorch(bytes);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(bytes.substr(index->at(0).offset, index->at(0).nbytes), Sixteen('d'));
  }
}

struct View {
  int64_t offset;
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
};
ZipBuilder WithView(const View& view) {
  return With(pk::View(pk::Storage("ShortStorage", "0", 8), view.offset, view.size, view.stride));
}

TEST(TorchZipTest, ViewsKeepTheirStridesAndCoverTheirRange) {
  struct Case {
    View view;
    uint64_t offset;
    uint64_t bytes;
    bool row_major;
  };
  for (const Case& c : std::vector<Case>{
           {{0, {8}, {1}}, 0, 16, true},
           {{3, {2}, {1}}, 6, 4, true},
           {{1, {3}, {2}}, 2, 10, false},
           {{0, {2, 4}, {4, 1}}, 0, 16, true},
           {{0, {4, 2}, {1, 4}}, 0, 16, false},  // Transposed.
           {{2, {3, 4}, {0, 1}}, 4, 8, false},   // Expanded.
           {{7, {1'000'000, 1'000'000}, {0, 0}}, 14, 2, false},
           {{0, {2, 1, 4}, {4, 99, 1}}, 0, 16, true},  // The stride of 1 is never taken.
           {{0, {1, 2, 2, 2}, {8, 1, 4, 2}}, 0, 16, false},
           {{7, {}, {}}, 14, 2, true},
           {{0, {0, 5}, {5, 1}}, 0, 0, true},
           {{8, {0}, {1}}, 16, 0, true},
           {{INT64_MAX, {0}, {INT64_MAX}}, 16, 0, true},
           {{5, {INT64_MAX, INT64_MAX, 0}, {1, 1, 1}}, 10, 0, true}}) {
    const std::string bytes = WithView(c.view).Build();
    auto index = ReadTorch(bytes);
    ASSERT_TRUE(index.ok()) << index.status();
    ASSERT_EQ(index->size(), 1u);
    const TensorInfo tensor = index->at(0);
    EXPECT_EQ(tensor.name, "");
    const uint64_t storage = bytes.find(Sixteen('a'));
    EXPECT_TRUE(tensor.offset == storage + c.offset || tensor.nbytes == 0);
    EXPECT_LE(tensor.offset, bytes.size());
    EXPECT_EQ(tensor.nbytes, c.bytes);
    EXPECT_EQ(std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end()), c.view.size);
    EXPECT_EQ(tensor.strides.empty(), c.row_major);
    if (!c.row_major) {
      EXPECT_EQ(std::vector<int64_t>(tensor.strides.begin(), tensor.strides.end()), c.view.stride);
    }
  }
}

TEST(TorchZipTest, ViewsStayInsideTheirStorage) {
  for (const View& view : std::vector<View>{{0, {9}, {1}},
                                            {1, {8}, {1}},
                                            {8, {1}, {1}},
                                            {8, {}, {}},
                                            {0, {2}, {8}},
                                            {0, {3, 3}, {3, 1}},
                                            {INT64_MAX, {1}, {1}},
                                            {INT64_MAX, {2}, {INT64_MAX}},
                                            {0, {int64_t{1} << 62}, {1}},
                                            {0, {int64_t{1} << 62}, {4}},
                                            {0, {5}, {int64_t{1} << 62}},
                                            {0, {3, 3}, {INT64_MAX, INT64_MAX}},
                                            {0, {1, 9}, {0, 1}}}) {
    EXPECT_THAT(TorchRefusal(WithView(view)),
                HasSubstr("reaches beyond its storage '0' of 8 elements"))
        << view.offset;
  }
  // Stride 0 makes more elements than there are bytes, but not more than can be counted.
  EXPECT_THAT(TorchRefusal(WithView({0, {int64_t{1} << 40, int64_t{1} << 40}, {0, 0}})),
              HasSubstr("reaches beyond"));
  EXPECT_THAT(TorchRefusal(WithView({0, {int64_t{1} << 62}, {0}})),
              HasSubstr("more bytes than 63 bits can count"));
  EXPECT_THAT(TorchRefusal(WithView({-1, {1}, {1}})), HasSubstr("has a negative offset"));
  EXPECT_THAT(TorchRefusal(WithView({-1, {0}, {1}})), HasSubstr("has a negative offset"));
  EXPECT_THAT(TorchRefusal(WithView({0, {-1}, {1}})),
              HasSubstr("size or stride that is no number"));
  EXPECT_THAT(TorchRefusal(WithView({4, {2}, {-1}})),
              HasSubstr("size or stride that is no number"));
  EXPECT_THAT(TorchRefusal(WithView({0, {2, 2}, {1}})), HasSubstr("has 2 sizes and 1 strides"));
  EXPECT_EQ(TorchRefusal(WithView({0, std::vector<int64_t>(64, 1), std::vector<int64_t>(64, 1)})),
            "accepted");
  EXPECT_THAT(TorchRefusal(WithView({0, std::vector<int64_t>(65, 1), std::vector<int64_t>(65, 1)})),
              HasSubstr("has 65 dimensions; the limit is 64"));
  EXPECT_THAT(TorchRefusalOfValue(pk::Call(
                  "torch._utils", "_rebuild_tensor",
                  {pk::Storage("FloatStorage", "0", 4), "K\x01", pk::Tuple({"N"}), pk::Ints({1})})),
              HasSubstr("size or stride that is no number"));
}

TEST(TorchZipTest, KnowsEveryStorageClass) {
  for (const auto& [name, dtype, bytes] : std::vector<std::tuple<std::string, abi::DType, int>>{
           {"DoubleStorage", abi::DType::kF64, 8},
           {"FloatStorage", abi::DType::kF32, 4},
           {"HalfStorage", abi::DType::kF16, 2},
           {"BFloat16Storage", abi::DType::kBF16, 2},
           {"LongStorage", abi::DType::kI64, 8},
           {"IntStorage", abi::DType::kI32, 4},
           {"ShortStorage", abi::DType::kI16, 2},
           {"CharStorage", abi::DType::kI8, 1},
           {"ByteStorage", abi::DType::kU8, 1},
           {"BoolStorage", abi::DType::kBool, 1},
           {"ComplexDoubleStorage", abi::DType::kC128, 16},
           {"ComplexFloatStorage", abi::DType::kC64, 8}}) {
    const int64_t count = 16 / bytes;
    auto index = ReadTorch(With(pk::View(pk::Storage(name, "1", count), 0, {count}, {1})).Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->at(0).dtype, dtype);
    EXPECT_EQ(index->at(0).nbytes, 16u);
  }
}

std::string V3(const std::string& dtype, int64_t offset, int64_t size, int64_t bytes = 16) {
  return pk::Call(
      "torch._utils", "_rebuild_tensor_v3",
      {pk::Storage("UntypedStorage", "0", bytes, "torch.storage"), pk::Int(offset),
       pk::Ints({size}), pk::Ints({1}), "\x89", pk::NoHooks(), pk::Global("torch", dtype)});
}

TEST(TorchZipTest, UntypedStoragesCountBytes) {
  for (const auto& [name, dtype, bytes] : std::vector<std::tuple<std::string, abi::DType, int>>{
           {"uint16", abi::DType::kU16, 2},
           {"uint32", abi::DType::kU32, 4},
           {"uint64", abi::DType::kU64, 8},
           {"float8_e4m3fn", abi::DType::kF8E4M3, 1},
           {"float8_e4m3fnuz", abi::DType::kF8E4M3Fnuz, 1},
           {"float8_e5m2", abi::DType::kF8E5M2, 1},
           {"float8_e5m2fnuz", abi::DType::kF8E5M2Fnuz, 1},
           {"float8_e8m0fnu", abi::DType::kF8E8M0, 1},
           {"float32", abi::DType::kF32, 4},
           {"bfloat16", abi::DType::kBF16, 2}}) {
    const int64_t count = 16 / bytes;
    auto index = ReadTorch(With(V3(name, 1, count - 1)).Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->at(0).dtype, dtype);
    EXPECT_EQ(index->at(0).nbytes, static_cast<uint64_t>(16 - bytes));
    EXPECT_THAT(TorchRefusalOfValue(V3(name, 1, count)), HasSubstr("reaches beyond its storage"));
  }
  EXPECT_THAT(TorchRefusalOfValue(V3("float32", 0, 1, 4)),
              HasSubstr("declared as 4 of UntypedStorage"));
  EXPECT_THAT(TorchRefusalOfValue(V3("float7", 0, 1)), HasSubstr("'torch.float7'"));
  EXPECT_THAT(TorchRefusalOfValue(V3("complex32", 0, 1)),
              HasSubstr("torch.complex32 has no counterpart"));
}

TEST(TorchZipTest, TiedTensorsAndViewsShareAStorage) {
  const std::string storage = pk::Storage("FloatStorage", "0", 4);
  const std::string bytes =
      With(pk::Dict({{pk::Text("a"), pk::View(storage, 0, {4}, {1}) + "q\x01"},
                     {pk::Text("tied"), "h\x01"},
                     {pk::Text("same"), pk::View(storage, 0, {4}, {1})},
                     {pk::Text("tail"), pk::View(storage, 2, {2}, {1})}}))
          .Build();
  auto index = ReadTorch(bytes);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->size(), 4u);
  EXPECT_EQ(index->at(1).offset, index->at(0).offset);
  EXPECT_EQ(index->at(2).offset, index->at(0).offset);
  EXPECT_EQ(index->at(3).offset, index->at(0).offset + 8);
  EXPECT_EQ(index->at(3).nbytes, 8u);
}

TEST(TorchZipTest, AStorageHasOneDeclaration) {
  const auto pair = [](const std::string& a, const std::string& b) {
    return TorchRefusalOfValue(pk::Dict(
        {{pk::Text("a"), pk::View(a, 0, {1}, {1})}, {pk::Text("b"), pk::View(b, 0, {1}, {1})}}));
  };
  const std::string f32 = pk::Storage("FloatStorage", "0", 4);
  EXPECT_EQ(pair(f32, f32), "accepted");
  EXPECT_EQ(pair(f32, pk::Storage("FloatStorage", "1", 4)), "accepted");
  EXPECT_THAT(pair(f32, pk::Storage("IntStorage", "0", 4)),
              HasSubstr("storage '0' is declared as 4 of FloatStorage and as 4 of IntStorage"));
  EXPECT_THAT(pair(f32, pk::Storage("FloatStorage", "0", 3)),
              HasSubstr("and as 3 of FloatStorage"));
  EXPECT_THAT(pair(f32, pk::Storage("LongStorage", "0", 2)), HasSubstr("is declared as"));
}

TEST(TorchZipTest, StoragesHaveTheSizeThatIsDeclared) {
  const auto sized = [](const std::string& type, int64_t count) {
    return TorchRefusalOfValue(pk::View(pk::Storage(type, "0", count), 0, {1}, {1}));
  };
  for (const int64_t count :
       {int64_t{0}, int64_t{3}, int64_t{5}, int64_t{1000}, INT64_MAX, int64_t{1} << 62}) {
    EXPECT_THAT(sized("FloatStorage", count), HasSubstr("but its member has 16 bytes")) << count;
  }
  EXPECT_EQ(sized("FloatStorage", 4), "accepted");
  EXPECT_EQ(TorchRefusal(Checkpoint(
                pk::Whole(pk::View(pk::Storage("FloatStorage", "0", 0), 0, {0, 5}, {5, 1})),
                {{"0", ""}})),
            "accepted");
  EXPECT_THAT(TorchRefusalOfValue(pk::View(pk::Storage("FloatStorage", "9", 4), 0, {1}, {1})),
              HasSubstr("storage '9' has no member 'data/9'"));
  for (const std::string& key : {std::string("../version"), std::string(), std::string(".."),
                                 std::string("a/b"), std::string("0\0", 2), std::string("a\\b")}) {
    EXPECT_THAT(TorchRefusalOfValue(pk::View(pk::Storage("FloatStorage", key, 4), 0, {1}, {1})),
                HasSubstr("is no plain name"));
  }
}

TEST(TorchZipTest, NamesArePathsThroughDictsAndLists) {
  EXPECT_THAT(NamesIn(pk::Four()), ElementsAre(""));
  EXPECT_THAT(NamesIn(pk::Dict({{pk::Text(""), pk::Four()}})), ElementsAre(""));
  EXPECT_THAT(
      NamesIn(pk::Dict({{pk::Text("epoch"), "K\x03"},
                        {pk::Text("model"), pk::Dict({{pk::Text("l.w"), pk::Four()},
                                                      {pk::Text("l.b"), pk::Four("1")}})},
                        {pk::Text("lr"), "G12345678"},
                        {pk::Text("state"),
                         pk::Dict({{pk::Int(0), pk::Dict({{pk::Text("exp_avg"), pk::Four()}})},
                                   {pk::Int(-7), pk::Four()}})},
                        {pk::Text("list"), pk::List({pk::Four(), "N", pk::Tuple({pk::Four()})})},
                        {pk::Text("dtype"), pk::Global("torch", "float32")},
                        {pk::Text("size"), pk::Call("torch", "Size", {pk::Ints({1, 2})})},
                        {pk::Text("storage"), pk::Storage("FloatStorage", "2", 4)},
                        {pk::Text("\xd1\x8f"), pk::Four()}})),
      ElementsAre("model.l.w", "model.l.b", "state.0.exp_avg", "state.-7", "list.0", "list.2.0",
                  "\xd1\x8f"));
  EXPECT_THAT(NamesIn(pk::Dict({{"U\x01w", pk::Four()}})), ElementsAre("w"));
  // Integers have no upper end.
  const std::string wide = "\x8a\x09" + std::string(8, '\0') + '\x40';
  EXPECT_THAT(NamesIn(pk::Dict({{wide, pk::Four()}, {"K\x01", pk::Four()}})),
              ElementsAre("1180591620717411303424", "1"));
  EXPECT_THAT(TorchRefusalOfValue(pk::Dict({{wide, pk::Four()}, {wide, "N"}})),
              HasSubstr("duplicate key 1180591620717411303424 in one dict"));
  // Nor does it matter how long they are written.
  EXPECT_THAT(NamesIn(pk::Dict({{"\x8a\x0a\x05" + std::string(9, '\0'), pk::Four()}})),
              ElementsAre("5"));
  EXPECT_THAT(NamesIn("]"), IsEmpty());
  EXPECT_THAT(NamesIn("K\x01"), IsEmpty());
  EXPECT_THAT(
      NamesIn(pk::Call("torch._utils", "_rebuild_parameter", {pk::Four(), "\x88", pk::NoHooks()})),
      ElementsAre(""));
  // A part that is shared is listed at both places.
  EXPECT_THAT(NamesIn(pk::Dict({{pk::Text("a"), pk::Dict({{pk::Text("w"), pk::Four()}}) + "q\x01"},
                                {pk::Text("b"), "h\x01"}})),
              ElementsAre("a.w", "b.w"));
  // A key of another kind is nothing to worry about where no tensor is.
  EXPECT_THAT(NamesIn(pk::Dict(
                  {{pk::Ints({1, 2}), pk::Dict({{"N", "K\x01"}})}, {pk::Text("w"), pk::Four()}})),
              ElementsAre("w"));
}

TEST(TorchZipTest, NamesThatNobodyCouldUseAreRefused) {
  const std::string four = pk::Four();
  const auto dict = [](const std::vector<std::pair<std::string, std::string>>& items) {
    return TorchRefusalOfValue(pk::Dict(items));
  };
  EXPECT_THAT(dict({{"K\x01", four}, {pk::Text("1"), four}}),
              HasSubstr("two tensors have the name '1'"));
  EXPECT_THAT(dict({{pk::Text("a.b"), four}, {pk::Text("a"), pk::Dict({{pk::Text("b"), four}})}}),
              HasSubstr("two tensors have the name 'a.b'"));
  EXPECT_THAT(dict({{pk::Text("w"), four}, {pk::Text("w"), "K\x01"}}),
              HasSubstr("duplicate key 'w' in one dict"));
  EXPECT_THAT(dict({{"K\x01", four}, {"\x88", "K\x01"}}), HasSubstr("duplicate key 1 in one dict"));
  EXPECT_THAT(dict({{pk::Text(std::string_view("a\0b", 3)), four}}),
              HasSubstr("a NUL in its name"));
  EXPECT_THAT(dict({{"U\x01\xff", four}}), HasSubstr("a name that is not UTF-8"));
  EXPECT_THAT(dict({{pk::Text("\xed\xa0\x80"), four}}), HasSubstr("a name that is not UTF-8"));
  for (const std::string& key :
       {std::string("N"), std::string("\x88"), std::string("G12345678"), pk::Ints({1, 2})}) {
    EXPECT_THAT(dict({{pk::Text("x"), pk::Dict({{key, four}})}}),
                HasSubstr("at 'x.?' is below a key that is neither text nor integer"));
    EXPECT_THAT(dict({{key, pk::Dict({{pk::Text("y"), four}})}}),
                HasSubstr("'?.y' is below a key"));
  }
}

TEST(TorchZipTest, TheWalkEnds) {
  EXPECT_THAT(TorchRefusalOfValue("}q\x01" + pk::Text("a") + "h\x01s"),
              HasSubstr("the value at 'a' contains itself"));
  EXPECT_THAT(TorchRefusalOfValue("]q\x01]h\x01"
                                  "aa"),
              HasSubstr("the value at '0.0' contains itself"));
  std::string deep = pk::Four();
  for (int i = 0; i < 1001; ++i) deep += "\x85";
  EXPECT_THAT(TorchRefusalOfValue(deep), HasSubstr("more than 1000 containers in each other"));
  EXPECT_THAT(NamesIn(deep.substr(0, deep.size() - 900)).size(), 1u);

  // 2^60 names in a few hundred bytes.
  std::string doubling = "]" + pk::Four() + "a";
  for (int i = 0; i < 60; ++i) {
    const std::string slot(1, static_cast<char>(i));
    doubling += "q" + slot + "h" + slot + "\x86";
  }
  EXPECT_THAT(TorchRefusalOfValue(doubling),
              AnyOf(HasSubstr("in so many places"), HasSubstr("far longer than the pickle")));
  // The same without a tensor costs nothing.
  std::string barren = "]";
  for (int i = 0; i < 60; ++i) {
    const std::string slot(1, static_cast<char>(i));
    barren += "q" + slot + "h" + slot + "\x86";
  }
  EXPECT_THAT(NamesIn(barren), IsEmpty());
  // A long key above many tensors.
  std::string wide = "](" + pk::Four() + "q\x01";
  for (int i = 0; i < 20'000; ++i) wide += "h\x01";
  EXPECT_THAT(TorchRefusalOfValue(pk::Dict({{pk::Text(std::string(20'000, 'k')), wide + "e"}})),
              HasSubstr("far longer than the pickle"));
  // Many dimensions of one tensor; shared dicts of which each has another name.
  const std::vector<int64_t> ones(62, 1);
  std::vector<int64_t> size = ones, stride(62, 4);
  size.insert(size.end(), {2, 2}), stride.insert(stride.end(), {1, 2});
  std::string deep_shape =
      "](" + pk::View(pk::Storage("FloatStorage", "0", 4), 0, size, stride) + "q\x01";
  for (int i = 0; i < 50'000; ++i) deep_shape += "h\x01";
  EXPECT_THAT(TorchRefusalOfValue(deep_shape + "e"), HasSubstr("far longer than the pickle"));
  std::string shared =
      "](" + pk::Dict({{pk::Text(std::string(10'000, 'k')), pk::List({pk::Four()})}}) + "q\x01";
  for (int i = 0; i < 20'000; ++i) shared += "h\x01";
  EXPECT_THAT(TorchRefusalOfValue(shared + "e"),
              AnyOf(HasSubstr("in so many places"), HasSubstr("far longer than the pickle")));
}

TEST(TorchZipTest, LazyBitsAreNotMappable) {
  const auto with = [](const std::string& metadata) {
    return pk::Call("torch._utils", "_rebuild_tensor_v2",
                    {pk::Storage("ComplexFloatStorage", "0", 2), pk::Int(0), pk::Ints({2}),
                     pk::Ints({1}), "\x89", pk::NoHooks(), metadata});
  };
  const std::vector<std::pair<std::string, const char*>> kBits = {
      {pk::Dict({{pk::Text("conj"), "\x88"}}), "conj is set"},
      {pk::Dict({{pk::Text("neg"), "\x88"}}), "neg is set"},
      {pk::Dict({{pk::Text("neg"), "\x88"}, {pk::Text("conj"), "\x88"}}), "conj and neg are set"},
      {pk::Dict({{pk::Text("conj"), "\x89"}, {pk::Text("neg"), "\x88"}}), "neg is set"},
      {pk::Dict({{pk::Text(std::string(1000, 'x')), "\x88"}}), "an unknown key"},
      {pk::Dict({{"K\x01", "\x88"}}), "an unknown key"}};
  for (const auto& [metadata, why] : kBits) {
    auto index = ReadTorch(With(with(metadata)).Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_FALSE(index->at(0).mappable);
    EXPECT_EQ(
        std::string(index->at(0).reason),
        absl::StrCat("the values are not as stored: ",
                     std::string_view(why) == "an unknown key" ? "the metadata has " : "", why));
  }
  for (const std::string& none :
       {std::string("}"), std::string("N"), pk::Dict({{pk::Text("conj"), "\x89"}})}) {
    auto index = ReadTorch(With(with(none)).Build());
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_TRUE(index->at(0).mappable);
  }
  EXPECT_THAT(TorchRefusalOfValue(with("K\x01")), HasSubstr("metadata that is no dict"));
  std::vector<std::pair<std::string, std::string>> many;
  for (int i = 0; i < 9; ++i) many.push_back({pk::Int(i), "\x88"});
  EXPECT_THAT(TorchRefusalOfValue(with(pk::Dict(many))), HasSubstr("too much metadata"));
}

TEST(TorchZipTest, ACompressedTensorIsListedAndACompressedPickleRefused) {
  ZipBuilder zip = SmallCheckpoint();
  testing::ZipEntry& data = zip.Named("data/0");
  data.method = data.local_method = 8;
  data.bytes = 16;
  data.descriptor.replace(12, 4, testing::Le(16u));
  auto index = ReadTorch(zip.Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_FALSE(index->at(0).mappable);
  EXPECT_THAT(std::string(index->at(0).reason),
              HasSubstr("its member of the archive is compressed"));
  ZipBuilder other = SmallCheckpoint();
  other.Named("data.pkl").method = other.Named("data.pkl").local_method = 8;
  EXPECT_THAT(TorchRefusal(other), HasSubstr("member 'm/data.pkl' is compressed"));
}

TEST(TorchZipTest, TheArchiveIsOneOfTorchSave) {
  const auto without = [](const std::string& name) {
    ZipBuilder zip = SmallCheckpoint();
    std::erase_if(zip.entries(), [&](const auto& entry) { return entry.name == name; });
    return TorchRefusal(zip);
  };
  EXPECT_EQ(without("nothing"), "accepted");
  EXPECT_EQ(without("m/byteorder"), "accepted");
  EXPECT_THAT(without("m/data.pkl"), HasSubstr("no data.pkl"));
  EXPECT_THAT(without("m/version"), HasSubstr("no version record"));
  EXPECT_THAT(without("m/data/0"), HasSubstr("storage '0' has no member"));
  const auto with = [](const std::string& name, const std::string& data = "x") {
    ZipBuilder zip = SmallCheckpoint();
    zip.Add(name, data);
    return TorchRefusal(zip);
  };
  EXPECT_EQ(with("m/.data/serialization_id"), "accepted");
  EXPECT_EQ(with("m/.format_version", "1"), "accepted");
  EXPECT_THAT(with("m/.data/version", "3\n"), HasSubstr("two version records"));
  EXPECT_THAT(with("n/data.pkl"), HasSubstr("'n/data.pkl' is not in the folder 'm/'"));
  EXPECT_THAT(with("other"), HasSubstr("is not in the folder"));
  EXPECT_THAT(with("m/constants.pkl"), HasSubstr("a TorchScript archive"));
  EXPECT_THAT(with("m/code/__torch__.py"), HasSubstr("a TorchScript archive"));
  ZipBuilder flat;
  flat.Add("data.pkl", "N.");
  EXPECT_THAT(TorchRefusal(flat), HasSubstr("'data.pkl' is not in a folder"));
  ZipBuilder npz;
  npz.Add("arr_0.npy", "x");
  EXPECT_THAT(TorchRefusal(npz), HasSubstr("NumPy's .npz"));
  ZipBuilder empty;
  empty.zip64_end = false;
  EXPECT_THAT(TorchRefusal(empty), HasSubstr("without members"));

  const auto version = [](const std::string& text) {
    ZipBuilder zip = Checkpoint(pk::Whole("N"), {});
    std::erase_if(zip.entries(), [](const auto& entry) { return entry.name == "m/version"; });
    zip.Add("m/.data/version", text);
    return TorchRefusal(zip);
  };
  for (const char* good : {"1", "3\n", "10", "10\n", "2"}) EXPECT_EQ(version(good), "accepted");
  for (const char* far : {"0", "11", "99\n"})
    EXPECT_THAT(version(far), HasSubstr("1 to 10 are read"));
  for (const char* bad : {"", "\n", "abc", "3x", "-3", " 3", "3\n\n", "99999999999999999999"}) {
    EXPECT_THAT(version(bad), HasSubstr("the version record is")) << bad;
  }
  EXPECT_THAT(version(std::string(100, '3')), HasSubstr("no short text"));

  const auto order = [](const std::string& text) {
    ZipBuilder zip = Checkpoint(pk::Whole("N"), {});
    std::erase_if(zip.entries(), [](const auto& entry) { return entry.name == "m/byteorder"; });
    zip.Add("m/byteorder", text);
    return TorchRefusal(zip);
  };
  EXPECT_THAT(order("big"), HasSubstr("big-endian"));
  for (const char* bad : {"", "LITTLE", "little\n", "middle"}) {
    EXPECT_THAT(order(bad), HasSubstr("the byteorder record is"));
  }

  ZipBuilder crc = SmallCheckpoint();
  crc.Named("data.pkl").data[20] ^= 1;
  EXPECT_THAT(TorchRefusal(crc), HasSubstr("does not have the CRC-32"));
}

// torch does not look at the case of letters in the names of members.
TEST(TorchZipTest, TheCaseOfLettersDoesNotMatter) {
  const auto renamed = [](const std::string& from, const std::string& to, const std::string& data) {
    ZipBuilder zip = SmallCheckpoint();
    for (testing::ZipEntry& entry : zip.entries()) {
      if (entry.name != from) continue;
      ZipBuilder one;
      entry = one.Add(to, data.empty() ? entry.data : data);
    }
    return zip;
  };
  EXPECT_THAT(TorchRefusal(renamed("m/byteorder", "m/ByteOrder", "big")), HasSubstr("big-endian"));
  EXPECT_THAT(TorchRefusal(renamed("m/byteorder", "m/Constants.PKL", "x")),
              HasSubstr("TorchScript"));
  EXPECT_THAT(TorchRefusal(renamed("m/byteorder", "m/CODE/x.py", "x")), HasSubstr("TorchScript"));
  EXPECT_THAT(TorchRefusal(renamed("m/byteorder", "m/.DATA/Version", "3\n")),
              HasSubstr("two version records"));
  EXPECT_EQ(TorchRefusal(renamed("m/version", "m/VERSION", "")), "accepted");
  EXPECT_EQ(TorchRefusal(renamed("m/data.pkl", "m/Data.PKL", "")), "accepted");
  EXPECT_EQ(TorchRefusal(renamed("m/data/0", "m/DATA/0", "")), "accepted");
  EXPECT_EQ(TorchRefusal(Checkpoint(pk::Whole(pk::Four("aB")), {{"Ab", Sixteen('x')}})),
            "accepted");
}

TEST(TorchZipTest, ErrorsOfThePickleSayWhereItIs) {
  EXPECT_THAT(TorchRefusalOfValue(pk::Call("posix", "system", {pk::Text("x")})),
              HasSubstr("m.pt: m/data.pkl: at byte 2: GLOBAL: the global 'posix.system'"));
  EXPECT_THAT(TorchRefusal(Checkpoint("", {})), HasSubstr("m/data.pkl: the pickle is empty"));
}

TEST(TorchZipTest, EveryCutIsRefused) {
  const std::string good = With(pk::Four()).Build();
  ASSERT_TRUE(ReadTorch(good).ok());
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(ReadTorch(good.substr(0, size)).ok()) << size;
  }
}

}  // namespace
}  // namespace modelhost
