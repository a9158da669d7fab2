// 100,000 tensors: what comes out is right, and the cost is that of reading the header once.
//
// Memory is counted, not sampled: every allocation of this program goes through the operators here.
// Work is compared between two sizes on the thread's own clock: ten times the tensors may not cost
// much more than ten times the work, where a quadratic check would cost a hundred times.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx_builder.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

std::atomic<uint64_t> allocated_bytes{0};
std::atomic<uint64_t> held_bytes{0};
std::atomic<uint64_t> most_held_bytes{0};

void* Allocate(size_t bytes) {
  allocated_bytes.fetch_add(bytes, std::memory_order_relaxed);
  void* at = std::malloc(bytes == 0 ? 1 : bytes);
  if (at == nullptr) std::abort();
  const uint64_t held = held_bytes.fetch_add(::malloc_usable_size(at)) + ::malloc_usable_size(at);
  if (held > most_held_bytes.load()) most_held_bytes.store(held);  // The tests have one thread.
  return at;
}

void Free(void* at) {
  held_bytes.fetch_sub(::malloc_usable_size(at));
  std::free(at);
}

}  // namespace

void* operator new(size_t bytes) { return Allocate(bytes); }
void* operator new[](size_t bytes) { return Allocate(bytes); }
void operator delete(void* at) noexcept { Free(at); }
void operator delete[](void* at) noexcept { Free(at); }
void operator delete(void* at, size_t) noexcept { Free(at); }
void operator delete[](void* at, size_t) noexcept { Free(at); }

namespace modelhost {
namespace {

using std::string_literals::operator""s;
using testing::GgufBuilder;
using ::testing::HasSubstr;
using testing::MemoryFiles;

constexpr size_t kMany = 100'000;
constexpr size_t kFewer = kMany / 10;

std::string NameOf(size_t i) {
  return absl::StrCat("model.layers.", i / 256, ".mlp.experts.", i % 256, ".down_proj.weight");
}

// Tensor `last` gets the name of tensor `same_as`.
std::string ManySafetensors(size_t count, size_t same_as) {
  std::string header = "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) header += ',';
    header +=
        testing::TensorJson(NameOf(i + 1 == count ? same_as : i), "BF16", "[1]", 2 * i, 2 * i + 2);
  }
  return testing::Safetensors(header + "}", 2 * count);
}

std::string ManyGguf(size_t count, size_t same_as) {
  GgufBuilder file;
  for (size_t i = 0; i < count; ++i) file.Tensor(NameOf(i + 1 == count ? same_as : i), {8}, 0, 32);
  return file.Build();
}

std::string ManyOnnx(size_t count, size_t same_as) {
  testing::Proto graph;
  for (size_t i = 0; i < count; ++i) {
    graph.Add(5, testing::OnnxFloats(NameOf(i + 1 == count ? same_as : i), 8));
  }
  return testing::OnnxModel(graph).bytes();
}

// As torch.save writes a state_dict: one storage per tensor, what repeats comes from the memo.
std::string ManyTorch(size_t count, size_t same_as) {
  namespace pk = testing::pickled;
  const std::string hooks = pk::NoHooks() + "q\x04";
  uint32_t memo = 5;
  std::string pickle = "\x80\x02}q" + std::string(1, '\0') + "(";
  const auto put = [&](const std::string& value) { pickle += value + "r" + testing::Le(memo++); };
  std::vector<std::pair<std::string, std::string>> storages;
  for (size_t i = 0; i < count; ++i) {
    const std::string key = absl::StrCat(i);
    put(pk::Text(NameOf(i + 1 == count ? same_as : i)));
    pickle += i == 0 ? pk::Global("torch._utils", "_rebuild_tensor_v2") + "q\x01" : "h\x01";
    pickle += "((";
    pickle += i == 0 ? pk::Text("storage") + "q\x02" + pk::Global("torch", "HalfStorage") + "q\x03"
                     : "h\x02h\x03";
    put(pk::Text(key));
    put(pk::Text("cpu") + pk::Int(32) + "t");
    put("Q" + pk::Int(0) + pk::Int(32) + "\x85");
    put(pk::Int(1) + "\x85");
    pickle += "\x89" + (i == 0 ? hooks : "h\x04");
    put("t");
    put("R");
    storages.emplace_back(key, std::string(64, 'd'));
  }
  return testing::Checkpoint(pickle + "u.", storages).Build();
}

using Make = std::string (*)(size_t count, size_t same_as);

double ThreadSeconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Large blocks are kept by the heap, not given back after each run: the pages of new ones are most
// of the cost, and small blocks are kept anyway. Else what grows by ten would cost forty times as
// much.
void KeepPages() {
#ifdef __SANITIZE_ADDRESS__
  return;  // Its heap is another one, and keeps what is freed.
#endif
  ASSERT_EQ(::mallopt(M_MMAP_MAX, 0), 1);
  ASSERT_EQ(::mallopt(M_TRIM_THRESHOLD, 1 << 30), 1);
}

class ScaleTest : public ::testing::TestWithParam<Make> {
 protected:
  static void SetUpTestSuite() { KeepPages(); }
  // The best of a few runs.
  static double SecondsToRead(size_t count) {
    MemoryFiles files({{"m", GetParam()(count, count - 1)}});
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      const double start = ThreadSeconds();
      EXPECT_TRUE(ReadModel("m", files).ok());
      best = std::min(best, ThreadSeconds() - start);
    }
    return best;
  }
};

TEST_P(ScaleTest, AllTensorsAreThere) {
  MemoryFiles files({{"m", GetParam()(kMany, kMany - 1)}});
  auto index = ReadModel("m", files);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->size(), kMany);
  const TensorInfo first = index->at(0);
  for (size_t i = 0; i < kMany; ++i) {
    const TensorInfo tensor = index->at(i);
    ASSERT_EQ(tensor.name, NameOf(i));
    ASSERT_EQ(tensor.shape.size(), 1u);
    ASSERT_EQ(tensor.nbytes, first.nbytes);
    // Of formats whose tensors lie side by side; others have a header before each.
    if (index->format() == "safetensors" || index->format() == "gguf") {
      ASSERT_EQ(tensor.offset, first.offset + i * first.nbytes);
    } else if (index->format() == "onnx" && i > 0) {
      ASSERT_GE(tensor.offset, index->at(i - 1).offset + tensor.nbytes + tensor.name.size());
    }
  }
}

TEST_P(ScaleTest, ADuplicateAmongAllIsFound) {
  MemoryFiles files({{"m", GetParam()(kMany, 7)}});
  auto index = ReadModel("m", files);
  ASSERT_FALSE(index.ok());
  EXPECT_THAT(std::string(index.status().message()), HasSubstr("'" + NameOf(7) + "'"));
}

TEST_P(ScaleTest, MemoryIsInProportionToTheHeader) {
  const std::string bytes = GetParam()(kMany, kMany - 1);
  const uint64_t header_bytes = bytes.size();
  MemoryFiles files({{"m", bytes}});
  const uint64_t before = allocated_bytes.load();
  ASSERT_TRUE(ReadModel("m", files).ok());
  // All that was ever asked for, freed or not.
  EXPECT_LT(allocated_bytes.load() - before, 8 * header_bytes);
}

TEST_P(ScaleTest, WorkGrowsWithTheTensorsNotWithTheirSquare) {
  const double fewer = SecondsToRead(kFewer);
  const double many = SecondsToRead(kMany);
  // Ten times as much leaves the caches behind; a square would be a hundred.
  EXPECT_LT(many, 40 * fewer) << many << " s against " << fewer << " s";
}

std::string FormatOf(const ::testing::TestParamInfo<Make>& info) {
  constexpr const char* kNames[] = {"Safetensors", "Gguf", "Onnx", "Torch"};
  return kNames[info.index];
}

INSTANTIATE_TEST_SUITE_P(Formats, ScaleTest,
                         ::testing::Values(&ManySafetensors, &ManyGguf, &ManyOnnx, &ManyTorch),
                         FormatOf);

using testing::OnnxAttribute;
using testing::OnnxFloats;
using testing::OnnxGraph;
using testing::OnnxModel;
using testing::OnnxNode;
using testing::Proto;

// What ReadModel asks for, for each byte of the file.
double MemoryPerByte(const std::string& bytes) {
  MemoryFiles files({{"m.onnx", bytes}});
  const uint64_t before = allocated_bytes.load();
  auto index = ReadModel("m.onnx", files);
  EXPECT_TRUE(index.ok()) << index.status();
  return static_cast<double>(allocated_bytes.load() - before) / static_cast<double>(bytes.size());
}

// Each of these names or places is made to be multiplied by the tensors behind it.
TEST(OnnxScaleTest, MemoryIsInProportionWhateverTheModelIsMadeOf) {
  const std::string longer(1 << 16, 'x');
  Proto tensors = Proto().Bytes(1, "a");
  Proto initializers;
  Proto nodes;
  Proto graphs = Proto().Bytes(1, "g");
  constexpr size_t kSome = 5'000;
  for (size_t i = 0; i < kSome; ++i) {
    tensors.Add(10, OnnxFloats("", 1));
    initializers.Add(5, OnnxFloats(absl::StrCat(i), 1));
    nodes.Add(1, OnnxNode("n", "o", OnnxAttribute("v", 5, OnnxFloats("", 1))));
    graphs.Add(11, OnnxGraph({OnnxFloats("w", 1)}));
  }
  Proto deep = initializers;
  for (int i = 0; i < 20; ++i) {
    deep = OnnxGraph({}, {OnnxNode(longer, "", OnnxAttribute(longer, 6, deep))});
  }
  for (const Proto& graph : {OnnxGraph({}, {OnnxNode(longer, "", tensors)}), nodes, deep,
                             OnnxGraph({}, {OnnxNode(longer, "", graphs)})}) {
    EXPECT_LT(MemoryPerByte(OnnxModel(graph).bytes()), 60.0);
  }
}

// A tensor of the index takes more than the few bytes that it can have in the file.
TEST(OnnxScaleTest, TheNumberOfTensorsIsLimited) {
  const std::string small = Proto().Add(5, testing::OnnxRaw("", 2, {0}, "")).bytes();
  std::string graph;
  for (size_t i = 0; i <= size_t{1} << 20; ++i) graph += small;
  MemoryFiles files({{"m.onnx", Proto().Varint(1, 8).Bytes(7, graph).bytes()}});
  EXPECT_THAT(std::string(ReadModel("m.onnx", files).status().message()),
              HasSubstr("more than 1048576 tensors"));
}

// What ReadModel asks for, and the error.
std::pair<double, std::string> RefusalAndMemoryPerByte(const Proto& graph) {
  const std::string bytes = OnnxModel(graph).bytes();
  MemoryFiles files({{"m.onnx", bytes}});
  const uint64_t before = allocated_bytes.load();
  const auto index = ReadModel("m.onnx", files);
  const double asked = static_cast<double>(allocated_bytes.load() - before);
  return {asked / static_cast<double>(bytes.size()),
          index.ok() ? "accepted" : std::string(index.status().message())};
}

TEST(OnnxScaleTest, WhatOneTensorCanHoldIsLimited) {
  const auto with_dims = [](size_t rank) {
    return OnnxGraph(
        {Proto().Bytes(1, std::string(rank, '\x01')).Varint(2, 2).Bytes(8, "w").Bytes(9, "x")});
  };
  EXPECT_EQ(RefusalAndMemoryPerByte(with_dims(1024)).second, "accepted");
  auto [memory, why] = RefusalAndMemoryPerByte(with_dims(1'000'000));
  EXPECT_THAT(why, HasSubstr("tensor 'w' has 1000000 dimensions; the limit is 1024"));
  EXPECT_LT(memory, 1.0);

  std::string entries;
  for (int i = 0; i < 500'000; ++i) entries += "\x6a\x00"s;
  Proto tensor = Proto().Raw(entries).Varint(2, 2).Varint(1, 1).Bytes(8, "w").Bytes(9, "x");
  std::tie(memory, why) = RefusalAndMemoryPerByte(OnnxGraph({tensor}));
  EXPECT_EQ(why, "accepted");
  EXPECT_LT(memory, 1.0);
}

// Of little that a model is made of, the index makes much.
TEST(OnnxScaleTest, WhatTheModelCanHoldIsLimited) {
  Proto many;
  const Proto flat = Proto().Bytes(1, std::string(1024, '\x01')).Varint(2, 2).Bytes(9, "x");
  for (int i = 0; i <= 1 << 14; ++i) many.Add(5, Proto(flat).Bytes(8, absl::StrCat(i)));
  EXPECT_THAT(RefusalAndMemoryPerByte(many).second, HasSubstr("more than 16777216 dimensions"));

  const std::string longer(100, 'n');
  Proto values = Proto().Bytes(1, longer);
  for (int i = 0; i < 100'000; ++i) values.Add(10, Proto().Varint(1, 0).Varint(2, 2));
  EXPECT_THAT(RefusalAndMemoryPerByte(OnnxGraph({}, {OnnxNode(longer, "", values)})).second,
              HasSubstr("their names take more than the model itself"));

  std::string properties;
  for (int i = 0; i <= 1 << 16; ++i) {
    properties += Proto().Add(14, Proto().Bytes(1, absl::StrCat(i))).bytes();
  }
  MemoryFiles files({{"m.onnx", OnnxModel(OnnxGraph({})).bytes() + properties}});
  EXPECT_THAT(std::string(ReadModel("m.onnx", files).status().message()),
              HasSubstr("more than 65536 items of metadata"));
}

TEST(OnnxScaleTest, OneDataFileOfManyTensorsIsOpenedOnce) {
  Proto graph;
  for (size_t i = 0; i < kFewer; ++i) {
    graph.Add(5, testing::OnnxExternal(NameOf(i), testing::kOnnxFloat, {1},
                                       {{"location", "w.bin"}, {"offset", absl::StrCat(4 * i)}}));
  }
  MemoryFiles files(
      {{"m.onnx", OnnxModel(graph).bytes()}, {"w.bin", std::string(4 * kFewer, 'x')}});
  auto index = ReadModel("m.onnx", files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->files().size(), 2u);
  EXPECT_EQ(index->at(kFewer - 1).offset, 4 * (kFewer - 1));
}

// Pieces of a pickle over and over, behind a key or before a list that is large too.
namespace pk = testing::pickled;
std::string Repeat(const std::string& what, size_t times) {
  std::string out;
  out.reserve(what.size() * times);
  for (size_t i = 0; i < times; ++i) out += what;
  return out;
}
std::string ListOf(const std::string& first, const std::string& again, size_t times) {
  std::string out = "](" + first + "q\x05";
  for (; times > 100'000; times -= 100'000) out += Repeat(again, 100'000) + "e(";
  return pk::Whole(out + Repeat(again, times) + "e");
}
std::string LongKeyOfAStorage(size_t scale) {
  const std::string key(65 * scale, 'k');
  const std::string id = pk::Tuple({pk::Text("storage"), pk::Global("torch", "FloatStorage"),
                                    pk::Text(key), pk::Text("cpu"), pk::Int(4)});
  return testing::Checkpoint(ListOf(id, "h\x05Q", 100 * scale), {{key, std::string(16, 'd')}})
      .Build();
}
std::string LongKeyBesideATensor(size_t scale) {
  const std::string dict = pk::Dict({{pk::Text(std::string(100 * scale, 'k')), "N"},
                                     {pk::Text(std::string(100 * scale, 'l')), "]"},
                                     {pk::Text("a"), pk::Four()}});
  return testing::Checkpoint(ListOf(dict, "h\x05", 100 * scale), {{"0", std::string(16, 'd')}})
      .Build();
}

// Work that is the size of one part times the number of others would grow 64 times.
TEST(TorchScaleTest, WorkIsLinearInLongKeysThatAreUsedOften) {
  KeepPages();
  for (const Make make : {Make{[](size_t n, size_t) { return LongKeyOfAStorage(n); }},
                          Make{[](size_t n, size_t) { return LongKeyBesideATensor(n); }}}) {
    const auto seconds = [&](size_t scale) {
      MemoryFiles files({{"m", make(scale, 0)}});
      double best = 1e9;
      for (int i = 0; i < 5; ++i) {
        const double start = ThreadSeconds();
        const auto index = ReadModel("m", files);
        EXPECT_TRUE(index.ok()) << index.status();
        best = std::min(best, ThreadSeconds() - start);
      }
      return best;
    };
    const double small = seconds(100);
    const double large = seconds(800);
    EXPECT_LT(large, 25 * small) << large << " s against " << small << " s";
  }
}

// What a confined parser is given: 16 bytes per byte of the file and a constant.
TEST(TorchScaleTest, MemoryIsBoundedByThePickleWhateverItIsMadeOf) {
  const std::vector<int64_t> size = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2};
  const std::vector<int64_t> stride = {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 2};
  const std::string tensor = pk::View(pk::Storage("FloatStorage", "0", 4), 0, size, stride);
  const std::string made =
      pk::Global("torch._utils", "_rebuild_tensor_v2") + "q\x01" +
      pk::Tuple({pk::Storage("FloatStorage", "0", 4), "K", std::string(1, '\0'), pk::Ints({4}),
                 pk::Ints({1}), "\x89", pk::NoHooks()}) +
      "q\x02R";
  std::string keys;
  for (uint32_t i = 0; i < 1'000'000; ++i) {
    keys += "J" + testing::Le(i) + "N";
    if (i % 100'000 == 0) keys += "u(";
  }
  for (const std::string& pickle :
       {pk::Whole("](" + Repeat(Repeat("]", 900'000) + "e(", 6) + "e"),
        pk::Whole("](" + Repeat(Repeat("N\x85", 450'000) + "e(", 6) + "e"),
        pk::Whole("](]q\x01]q\x02" + Repeat("h\x01Nah\x02Na", 400'000) + "e"),
        ListOf(tensor, "h\x05", 2'000'000), ListOf(made, "h\x01h\x02R", 900'000),
        pk::Whole("}(" + keys + "u"), pk::Whole("}(" + Repeat("K\x01K\x02", 400'000) + "u")}) {
    std::string file = testing::Checkpoint(pickle, {{"0", std::string(16, 'd')}}).Build();
    const uint64_t bytes = file.size();
    MemoryFiles files({{"m", std::move(file)}});
    most_held_bytes.store(held_bytes.load());
    const uint64_t before = held_bytes.load();
    const auto index = ReadModel("m", files);
    EXPECT_LT(most_held_bytes.load() - before, 14 * bytes + (uint64_t{128} << 20)) << bytes;
  }
}

TEST(AllocationTest, HugeCountsAllocateNothing) {
  const std::string counts = testing::Le<uint64_t>(uint64_t{1} << 40);
  for (const std::string& bytes :
       {"GGUF" + testing::Le(3u) + counts + counts + std::string(100, 'x'),
        "GGUF" + testing::Le(3u) + testing::Le<uint64_t>(0) + counts + std::string(100, 'x'),
        GgufBuilder().Key("k", 9, testing::Le(4u) + counts).Build(),
        GgufBuilder().Key("k", 9, testing::Le(8u) + counts).Build(),
        GgufBuilder().Key("k", 8, counts).Build(), testing::Le<uint64_t>(99'999'999) + "{}",
        // A length, a shape and an offset.
        std::string("\x08\x08\x3a") + testing::VarintBytes(0x7fffffff),
        testing::OnnxOf(testing::OnnxRaw("w", testing::kOnnxFloat, {1LL << 40}, "")),
        testing::OnnxOf(testing::OnnxTensorOf("w", testing::kOnnxFloat, {1LL << 40}))}) {
    MemoryFiles files({{"m.gguf", bytes}});
    const uint64_t before = allocated_bytes.load();
    EXPECT_FALSE(ReadModel("m.gguf", files).ok());
    EXPECT_LT(allocated_bytes.load() - before, 64u << 10);
  }
}

}  // namespace
}  // namespace modelhost
