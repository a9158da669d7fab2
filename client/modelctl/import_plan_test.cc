#include "client/modelctl/import_plan.h"

#include "client/modelctl/gguf_writer.h"
#include "client/modelctl/safetensors_writer.h"
#include "client/modelctl/tensor_reader.h"
#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Tensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  uint64_t offset = 0;
  std::vector<int64_t> strides = {};
  std::string reason = "";
};

TensorIndex Index(const std::vector<Tensor>& tensors, const std::string& format = "torch") {
  TensorIndex index(format);
  index.AddFile("m.bin");
  for (const Tensor& each : tensors) {
    TensorInfo info;
    info.name = each.name;
    info.dtype = each.dtype;
    info.shape = each.shape;
    info.strides = each.strides;
    info.offset = each.offset;
    info.nbytes = ByteCount(each.dtype, each.shape).value_or(0);
    info.mappable = each.reason.empty();
    info.reason = each.reason;
    index.Add(info);
  }
  return index;
}

std::vector<std::string> Names(const absl::StatusOr<ImportPlan>& plan) {
  std::vector<std::string> names;
  if (!plan.ok()) return {std::string(plan.status().message())};
  for (const PlannedTensor& tensor : plan->tensors) names.push_back(tensor.name);
  return names;
}

std::string Message(const absl::StatusOr<ImportPlan>& plan) {
  return plan.ok() ? "ok" : std::string(plan.status().message());
}

TEST(ImportPlanTest, OnlyExcludeAndPrefix) {
  const TensorIndex index = Index({{"model.a", DType::kU8, {1}, 0},
                                   {"model.b", DType::kU8, {1}, 1},
                                   {"optimizer.a", DType::kU8, {1}, 2},
                                   {"c", DType::kU8, {1}, 3}});
  ImportChoices choices;
  EXPECT_THAT(Names(PlanImport(index, choices)),
              ElementsAre("c", "model.a", "model.b", "optimizer.a"));
  choices.exclude = {"optimizer.*"};
  choices.strip_prefix = "model.";
  EXPECT_THAT(Names(PlanImport(index, choices)), ElementsAre("a", "b", "c"));
  // Patterns are about the names of the source.
  choices.only = {"model.*", "nothing*"};
  EXPECT_THAT(Names(PlanImport(index, choices)), ElementsAre("a", "b"));
  choices.exclude = {"*b"};
  const auto plan = PlanImport(index, choices);
  ASSERT_THAT(Names(plan), ElementsAre("a"));
  EXPECT_EQ(plan->tensors[0].source, 0u);
  EXPECT_THAT(plan->notes, IsEmpty());
}

TEST(ImportPlanTest, NothingSelectedSaysWhatSelects) {
  const TensorIndex index = Index({{"w", DType::kU8, {1}}});
  ImportChoices choices;
  choices.only = {"x*"};
  EXPECT_THAT(Message(PlanImport(index, choices)),
              HasSubstr("none of the 1 tensors is selected by --only (the first is 'w'"));
  choices.exclude = {"y"};
  EXPECT_THAT(Message(PlanImport(index, choices)), HasSubstr("by --only and --exclude"));
  choices = {};
  choices.exclude = {"*"};
  EXPECT_THAT(Message(PlanImport(index, choices)), HasSubstr("by --exclude"));
  EXPECT_EQ(PlanImport(index, choices).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(PlanImport(Index({}), {})), HasSubstr("no tensors"));
}

TEST(ImportPlanTest, APrefixThatMakesTwoNamesOneIsRefused) {
  const TensorIndex index =
      Index({{"m.a", DType::kU8, {1}, 0}, {"a", DType::kU8, {1}, 1}, {"m.", DType::kU8, {1}, 2}});
  ImportChoices choices;
  choices.strip_prefix = "m.";
  choices.exclude = {"m."};
  EXPECT_THAT(Message(PlanImport(index, choices)),
              HasSubstr("tensors 'm.a' and 'a' would both be called 'a' without the prefix"));
  choices.exclude = {"a"};
  EXPECT_THAT(Message(PlanImport(index, choices)), HasSubstr("nothing of its name is left"));
  choices.strip_prefix = "none.";
  const auto plan = PlanImport(index, choices);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->notes, ElementsAre(HasSubstr("--strip-prefix changed nothing")));
}

TEST(ImportPlanTest, FloatsAreConvertedAndNothingElseIs) {
  const TensorIndex index = Index({{"f64", DType::kF64, {2}, 0},
                                   {"f32", DType::kF32, {2}, 16},
                                   {"f16", DType::kF16, {2}, 24},
                                   {"f8", DType::kF8E4M3, {2}, 28},
                                   {"i64", DType::kI64, {2}, 30},
                                   {"bool", DType::kBool, {2}, 46},
                                   {"c64", DType::kC64, {2}, 48}});
  ImportChoices choices;
  choices.dtype = DType::kF16;
  const auto plan = PlanImport(index, choices);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const PlannedTensor& tensor : plan->tensors) {
    const bool converted = tensor.name == "f64" || tensor.name == "f32" || tensor.name == "f8";
    EXPECT_EQ(tensor.recode, converted ? Recode::kConvert : Recode::kCopy) << tensor.name;
    EXPECT_EQ(tensor.to, converted ? DType::kF16 : tensor.from) << tensor.name;
    if (converted) {
      EXPECT_EQ(tensor.nbytes, 4u) << tensor.name;
    }
  }
  EXPECT_THAT(plan->notes, ElementsAre(HasSubstr("1 tensor of C64 cannot be converted")));
}

TEST(ImportPlanTest, WideElementsComeFirstSoThatAllAreAligned) {
  const TensorIndex index = Index({{"z8", DType::kU8, {3}, 0},
                                   {"b", DType::kF16, {3}, 3},
                                   {"a", DType::kBF16, {3}, 9},
                                   {"y64", DType::kI64, {1}, 15},
                                   {"x32", DType::kF32, {3}, 23}});
  EXPECT_THAT(Names(PlanImport(index, {})), ElementsAre("y64", "x32", "a", "b", "z8"));
  ImportChoices gguf;
  gguf.target = ImportTarget::kGguf;
  gguf.exclude = {"z8"};
  EXPECT_THAT(Names(PlanImport(index, gguf)), ElementsAre("b", "a", "y64", "x32"));
}

TEST(ImportPlanTest, MatricesOfWholeBlocksAreQuantised) {
  const TensorIndex index = Index({{"rows", DType::kBF16, {2, 64}, 0},
                                   {"odd", DType::kF32, {64, 33}, 256},
                                   {"vector", DType::kF32, {64}, 10000},
                                   {"cube", DType::kF32, {2, 2, 32}, 11000},
                                   {"ints", DType::kI32, {2, 32}, 12000},
                                   {"empty", DType::kF32, {4, 0}, 13000}});
  ImportChoices choices;
  choices.target = ImportTarget::kGguf;
  choices.quantize_q8 = true;
  const auto plan = PlanImport(index, choices);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const PlannedTensor& tensor : plan->tensors) {
    EXPECT_EQ(tensor.recode, tensor.name == "rows" ? Recode::kQ8 : Recode::kCopy) << tensor.name;
  }
  EXPECT_EQ(plan->tensors[0].nbytes, 2u * 2 * 34);
}

TEST(ImportPlanTest, WhatATargetCannotHoldIsRefusedByName) {
  const auto refused = [](const Tensor& tensor, ImportTarget target) {
    ImportChoices choices;
    choices.target = target;
    const auto plan = PlanImport(Index({tensor}, "onnx"), choices);
    if (!plan.ok()) {
      EXPECT_THAT(Message(plan), HasSubstr("tensor '"));
      EXPECT_THAT(Message(plan), HasSubstr("(--exclude '"));
    }
    return Message(plan);
  };
  const auto safetensors = ImportTarget::kSafetensors;
  const auto gguf = ImportTarget::kGguf;
  EXPECT_THAT(refused({"x", DType::kU8, {1}}, gguf), HasSubstr("GGUF has no type U8"));
  EXPECT_THAT(refused({"x", DType::kBool, {1}}, gguf), HasSubstr("GGUF has no type BOOL"));
  EXPECT_THAT(refused({"x", DType::kF32, {1, 1, 1, 1, 1}}, gguf), HasSubstr("5 dimensions"));
  EXPECT_THAT(refused({std::string(64, 'n'), DType::kF32, {1}}, gguf), HasSubstr("64 bytes"));
  EXPECT_EQ(refused({std::string(63, 'n'), DType::kF32, {1}}, gguf), "ok");
  EXPECT_EQ(refused({"x", DType::kQ4_K, {2, 256}}, gguf), "ok");
  EXPECT_THAT(refused({"x", DType::kQ4_K, {2, 256}}, safetensors), HasSubstr("no type Q4_K"));
  EXPECT_THAT(refused({"x", DType::kC128, {1}}, safetensors), HasSubstr("no type C128"));
  EXPECT_THAT(refused({"x", DType::kI4, {2}}, safetensors), HasSubstr("no type I4"));
  EXPECT_THAT(refused({"x", DType::kF4, {3}}, safetensors), HasSubstr("no whole bytes"));
  EXPECT_EQ(refused({"x", DType::kF4, {4}}, safetensors), "ok");
  EXPECT_THAT(refused({"__metadata__", DType::kU8, {1}}, safetensors), HasSubstr("this name"));
}

TEST(ImportPlanTest, WhatCannotBeReadIsRefusedWithItsReasonUnlessItIsLeftOut) {
  Tensor deflated{"w", DType::kF32, {1}};
  deflated.reason = "its storage is deflated";
  ImportChoices choices;
  const TensorIndex torch = Index({deflated, {"v", DType::kF32, {1}}});
  EXPECT_EQ(Message(PlanImport(torch, choices)),
            "tensor 'w': its storage is deflated (--exclude 'w' leaves it out)");
  choices.exclude = {"w"};
  EXPECT_TRUE(PlanImport(torch, choices).ok());
  // ONNX's typed fields are decoded, texts are not.
  EXPECT_TRUE(PlanImport(Index({deflated}, "onnx"), {}).ok());
  deflated.dtype = DType::kString;
  EXPECT_FALSE(PlanImport(Index({deflated}, "onnx"), {}).ok());
}

TEST(ImportPlanTest, TiedTensorsAreWrittenEachAndNamed) {
  const TensorIndex index = Index({{"emb", DType::kF32, {4}, 64},
                                   {"other", DType::kF32, {4}, 0},
                                   {"head", DType::kF32, {4}, 64}});
  const auto plan = PlanImport(index, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Names(plan), ElementsAre("emb", "head", "other"));
  EXPECT_THAT(plan->notes, ElementsAre(HasSubstr("1 tensor shares the storage of another ('head' "
                                                 "and 'emb') and each is written in full, 16 "
                                                 "bytes more")));
}

// --- The heads of the two targets, as the readers see them.

const std::vector<int64_t> kMatrix = {2, 64};
const std::vector<int64_t> kVector = {3};
const std::vector<int64_t> kScalar = {};

TEST(SafetensorsWriterTest, TheReaderFindsWhatWasWritten) {
  const std::vector<OutputTensor> tensors = {{"b\"\n", DType::kI64, kVector, 24},
                                             {"", DType::kBF16, kMatrix, 256},
                                             {"s", DType::kU8, kScalar, 1}};
  const auto head = SafetensorsHead(tensors, {{"format", "pt"}, {"k", "\xc3\xa4\n"}, {"k", "2"}});
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->size() % 8, 0u);
  testing::MemoryFiles files;
  files.Put("m.safetensors", *head + std::string(24 + 256 + 1, 'x'));
  const auto index = ReadModel("m.safetensors", files);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->size(), 3u);
  EXPECT_EQ(index->at(0).name, "b\"\n");
  EXPECT_EQ(index->at(0).offset, head->size());
  EXPECT_EQ(index->at(1).name, "");
  EXPECT_EQ(index->at(1).dtype, DType::kBF16);
  EXPECT_THAT(index->at(1).shape, ElementsAre(2, 64));
  EXPECT_EQ(index->at(2).nbytes, 1u);
  ASSERT_EQ(index->metadata().size(), 2u);
  EXPECT_EQ(index->metadata()[1].value, "\xc3\xa4\n");
}

TEST(SafetensorsWriterTest, NoTensorIsAHeaderToo) {
  const auto head = SafetensorsHead({}, {});
  ASSERT_TRUE(head.ok());
  EXPECT_EQ(head->substr(8), "{}      ");
}

TEST(SafetensorsWriterTest, AHeaderThatReadersWouldRefuseIsNotWritten) {
  const std::string name(50'000'000, 'n');
  const std::string other(50'000'000, 'm');
  const std::vector<OutputTensor> tensors = {{name, DType::kU8, kScalar, 1},
                                             {other, DType::kU8, kScalar, 1}};
  EXPECT_EQ(SafetensorsHead(tensors, {}).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(GgufWriterTest, TheReaderFindsWhatWasWritten) {
  GgufKeys keys;
  keys.SetText("general.architecture", "llama");
  EXPECT_TRUE(keys.SetValue("a.int", GgufValueType::kByLook, "7"));
  EXPECT_TRUE(keys.SetValue("a.big", GgufValueType::kByLook, "-3"));
  EXPECT_TRUE(keys.SetValue("a.float", GgufValueType::kByLook, "0.5"));
  EXPECT_TRUE(keys.SetValue("a.bool", GgufValueType::kByLook, "true"));
  EXPECT_TRUE(keys.SetValue("a.text", GgufValueType::kByLook, "infinite"));
  EXPECT_TRUE(keys.SetValue("a.int", GgufValueType::kByLook, "8"));
  const std::vector<OutputTensor> tensors = {{"w", DType::kQ8_0, kMatrix, 136},
                                             {"v", DType::kF64, kVector, 24},
                                             {"s", DType::kI8, kScalar, 1}};
  const std::string head = GgufHead(keys, tensors);
  EXPECT_EQ(head.size() % 32, 0u);
  testing::MemoryFiles files;
  files.Put("m.gguf", head + std::string(160 + 32 + 32, 'x'));
  const auto index = ReadModel("m.gguf", files);
  ASSERT_TRUE(index.ok()) << index.status();
  ASSERT_EQ(index->size(), 3u);
  EXPECT_THAT(index->at(0).shape, ElementsAre(2, 64));
  EXPECT_EQ(index->at(0).dtype, DType::kQ8_0);
  EXPECT_EQ(index->at(1).offset, head.size() + 160);
  EXPECT_EQ(index->at(2).offset, head.size() + 192);
  std::vector<std::string> metadata;
  for (const MetadataItem& item : index->metadata())
    metadata.push_back(item.key + "=" + item.value);
  EXPECT_THAT(metadata, ElementsAre("general.architecture=llama", "a.int=8", "a.big=-3",
                                    "a.float=0.5", "a.bool=true", "a.text=infinite"));
}

TEST(GgufWriterTest, ATypeThatIsGivenIsTheTypeThatIsWritten) {
  using testing::Le;
  const auto written = [](const std::string& key, GgufValueType type, const std::string& value) {
    GgufKeys keys;
    if (!keys.SetValue(key, type, value)) return std::string("refused");
    // Past magic, version, both counts, the key's length and the key; before the padding.
    const std::string head = GgufHead(keys, {});
    return head.substr(4 + 4 + 8 + 8 + 8 + key.size());
  };
  const auto begins = [](const std::string& text) { return ::testing::StartsWith(text); };
  EXPECT_THAT(written("llama.rope.freq_base", GgufValueType::kF32, "10000"),
              begins(Le(6u) + Le(0x461c4000u)));
  EXPECT_THAT(written("k", GgufValueType::kU32, "7"), begins(Le(4u) + Le(7u)));
  EXPECT_THAT(written("k", GgufValueType::kI32, "-7"), begins(Le(5u) + Le(~6u)));
  EXPECT_THAT(written("k", GgufValueType::kU64, "7"), begins(Le(10u) + Le<uint64_t>(7)));
  EXPECT_THAT(written("k", GgufValueType::kBool, "true"), begins(Le(7u) + "\x01"));
  const std::string year = Le(8u) + Le<uint64_t>(4) + "2024";
  EXPECT_THAT(written("k", GgufValueType::kText, "2024"), begins(year));
  // Text keys stay text, numbers are what they look like.
  EXPECT_THAT(written("general.name", GgufValueType::kByLook, "2024"), begins(year));
  EXPECT_THAT(written("general.file_type", GgufValueType::kByLook, "7"), begins(Le(4u) + Le(7u)));
  EXPECT_THAT(written("general.base_model.count", GgufValueType::kByLook, "1"), begins(Le(4u)));
  EXPECT_THAT(written("llama.rope.freq_base", GgufValueType::kByLook, "10000"), begins(Le(4u)));
  for (const auto type : {GgufValueType::kU32, GgufValueType::kI32, GgufValueType::kU64,
                          GgufValueType::kF32, GgufValueType::kBool}) {
    EXPECT_EQ(written("k", type, "text"), "refused");
  }
  EXPECT_EQ(written("k", GgufValueType::kU32, "4294967296"), "refused");
  EXPECT_EQ(written("k", GgufValueType::kU64, "-1"), "refused");
}

TEST(GgufWriterTest, KeysOfAFileAreTakenOverWithTheirTypes) {
  using testing::GgufBuilder;
  using testing::Le;
  GgufBuilder source;
  source.KeyText("general.architecture", "bert").KeyU32("general.alignment", 32);
  source.Key("words", 9,
             Le<uint32_t>(8) + Le<uint64_t>(2) + GgufBuilder::Text("a") + GgufBuilder::Text("bc"));
  source.Key("scores", 9, Le<uint32_t>(6) + Le<uint64_t>(3) + std::string(12, '\0'));
  source.Key("flag", 7, "\1").Key("wide", 12, std::string(8, '\0')).Split(0, 1, 1);
  source.Tensor("d", {4}, 0, 16);
  const std::string bytes = source.Build();
  GgufKeys keys;
  const auto span = std::as_bytes(std::span<const char>(bytes));
  ASSERT_TRUE(keys.CopyFrom("s.gguf", span).ok());
  EXPECT_TRUE(keys.Has("words"));
  EXPECT_FALSE(keys.Has("general.alignment"));
  EXPECT_FALSE(keys.Has("split.no"));
  testing::MemoryFiles files;
  files.Put("m.gguf", GgufHead(keys, {}));
  files.Put("s.gguf", bytes);
  const auto index = ReadModel("m.gguf", files);
  ASSERT_TRUE(index.ok()) << index.status();
  const auto before = ReadModel("s.gguf", files);
  ASSERT_TRUE(before.ok()) << before.status();
  size_t same = 0;
  for (const MetadataItem& item : index->metadata()) {
    for (const MetadataItem& old : before->metadata()) {
      if (item.key == old.key && item.value == old.value) ++same;
    }
  }
  EXPECT_EQ(same, 5u);
  EXPECT_EQ(index->metadata().size(), 5u);
  for (size_t cut = 0; cut < bytes.size(); cut += 3) {
    GgufKeys ignored;
    (void)ignored.CopyFrom("s.gguf", span.first(cut));  // An error or not, but no harm.
  }
}

}  // namespace
}  // namespace modelhost::modelctl
