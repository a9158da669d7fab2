#include "daemon/format/tensorrt.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx_builder.h"
#include "daemon/format/sniff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::GgufBuilder;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Le;
using testing::MemoryFiles;
using testing::SmallSafetensors;

// A plan of the generation that is known best.
struct Plan {
  std::string magic = "ptrt";
  uint32_t safe = 0x61;
  uint32_t standard = 213;
  int64_t size_error = 0;
  std::string payload = std::string(40, '\x9c');

  std::string Build() const {
    return magic + Le(safe) + Le(standard) +
           Le(static_cast<uint64_t>(static_cast<int64_t>(payload.size()) + size_error)) +
           Le(uint32_t{0x0a1ffa0d}) + payload;
  }
};

absl::StatusOr<TensorIndex> ReadPlan(std::string bytes, const std::string& name = "m.engine") {
  MemoryFiles files;
  files.Put(name, std::move(bytes));
  return ReadModel(name, files);
}

std::string Refusal(std::string bytes, const std::string& name = "m.engine") {
  auto index = ReadPlan(std::move(bytes), name);
  if (index.ok()) return "accepted";
  EXPECT_THAT(std::string(index.status().message()), HasSubstr(name + ": "));
  return std::string(index.status().message());
}

std::string TensorRtMetadata(const TensorIndex& index, std::string_view key) {
  for (const MetadataItem& item : index.metadata()) {
    if (item.key == key) return item.value;
  }
  return "absent";
}

TEST(TensorRtTest, ReportsTheHeaderOfAKnownPlanAndNoTensors) {
  for (const char* magic : {"ptrt", "ftrt"}) {
    for (const uint32_t safe : {0x57u, 0x59u, 0x60u, 0x61u}) {
      Plan plan;
      plan.magic = magic;
      plan.safe = safe;
      auto index = ReadPlan(plan.Build());
      ASSERT_TRUE(index.ok()) << index.status();
      EXPECT_EQ(index->format(), "tensorrt");
      EXPECT_THAT(index->files(), ElementsAre("m.engine"));
      EXPECT_EQ(index->size(), 0u);
      EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.magic"), magic);
      EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.safe_serialization_version"),
                absl::StrCat(safe));
      EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.serialization_version"), "213");
      EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.payload_bytes"), "40");
      EXPECT_THAT(index->warnings(), IsEmpty());
    }
  }
}

TEST(TensorRtTest, TheOlderHeaderHasItsSizeAfterAnotherField) {
  const std::string payload(9, 'x');
  for (const uint32_t safe : {0u, 0x2bu}) {
    const std::string head = "ptrt" + Le(safe) + Le(uint32_t{205});
    auto index = ReadPlan(head + Le(uint32_t{7}) + Le(uint64_t{9}) + payload);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.payload_bytes"), "9");
    EXPECT_TRUE(ReadPlan(head + Le(uint64_t{9}) + Le(uint32_t{7}) + payload).ok());
    EXPECT_THAT(Refusal(head + Le(uint32_t{7}) + Le(uint64_t{10}) + payload), HasSubstr("cut"));
  }
}

TEST(TensorRtTest, APayloadThatDoesNotFitIsRefusedWithBothNumbers) {
  Plan plan;
  plan.size_error = 8;
  EXPECT_THAT(Refusal(plan.Build()),
              AllOf(HasSubstr("a payload of 48 bytes, the file has 40"), HasSubstr("cut")));
  plan.size_error = -8;
  EXPECT_THAT(Refusal(plan.Build()),
              AllOf(HasSubstr("a payload of 32 bytes, the file has 40"), HasSubstr("added")));
  plan.size_error = -41;  // 2^64 - 1
  EXPECT_THAT(Refusal(plan.Build()), HasSubstr("18446744073709551615"));
  EXPECT_THAT(Refusal(Plan().Build() + std::string(8, '\0')), HasSubstr("added"));
}

TEST(TensorRtTest, EveryCutIsRefused) {
  const std::string whole = Plan().Build();
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(Refusal(whole.substr(0, size)), "accepted") << size;
  }
  const std::string json = "{\"task\":\"detect\"}";
  const std::string prefixed = Le(static_cast<uint32_t>(json.size())) + json + whole;
  for (size_t size = 0; size < prefixed.size(); ++size) {
    EXPECT_NE(Refusal(prefixed.substr(0, size)), "accepted") << size;
  }
}

TEST(TensorRtTest, TheExportersJsonIsReportedAndThePlanBehindItChecked) {
  const std::string json = R"({"description":"a \"b\"", "batch": 1,"names":{"0":"person"}})";
  const std::string head = Le(static_cast<uint32_t>(json.size())) + json;
  auto index = ReadPlan(head + Plan().Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.json_prefix_bytes"), absl::StrCat(json.size()));
  EXPECT_EQ(TensorRtMetadata(*index, "prefix.description"), "a \"b\"");
  EXPECT_EQ(TensorRtMetadata(*index, "prefix.batch"), "1");
  EXPECT_EQ(TensorRtMetadata(*index, "prefix.names"), "{\"0\":\"person\"}");
  EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.serialization_version"), "213");
  EXPECT_THAT(index->warnings(), IsEmpty());
  // Told by content, too.
  EXPECT_TRUE(ReadPlan(head + Plan().Build(), "weights.bin").ok());
  EXPECT_THAT(Refusal(head + Plan().Build() + "x"), HasSubstr("added"));
  EXPECT_THAT(Refusal(head), HasSubstr("no plan follows"));
  EXPECT_THAT(Refusal(Le(uint32_t{9999}) + json),
              HasSubstr("JSON text before the plan needs 9999"));
}

TEST(TensorRtTest, ADamagedOrHugeJsonTextIsNoReasonToRefuseThePlan) {
  const std::string bad = "{\"a\":NaN}";
  auto index = ReadPlan(Le(static_cast<uint32_t>(bad.size())) + bad + Plan().Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("damaged")));
  const std::string twice = "{\"a\":1,\"a\":2}";
  index = ReadPlan(Le(static_cast<uint32_t>(twice.size())) + twice + Plan().Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(TensorRtMetadata(*index, "prefix.a"), "1");
  EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("twice")));
  const std::string big = absl::StrCat("{\"a\":\"", std::string(5000, 'x'), "\"}");
  index = ReadPlan(Le(static_cast<uint32_t>(big.size())) + big + Plan().Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(TensorRtMetadata(*index, "prefix.a"), "{\"bytes\":5000}");
}

TEST(TensorRtTest, AnUnknownHeaderIsOpaqueWithAWarning) {
  std::string blob = "\x10\x20\x30\x40";
  for (int i = 0; i < 200; ++i) blob += static_cast<char>(0x80 + i * 37 % 128);
  for (const char* name : {"m.engine", "m.PLAN", "m.trt"}) {
    auto index = ReadPlan(blob, name);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_EQ(index->format(), "tensorrt");
    EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("no generation known")));
  }
  EXPECT_THAT(Refusal(blob, "m.bin"), HasSubstr("not a model file"));
  Plan newer;
  newer.safe = 0x7001;
  newer.size_error = 5;  // Nobody knows where its size would be.
  auto index = ReadPlan(newer.Build());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.safe_serialization_version"), "28673");
  EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.serialization_version"), "213");
  EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("28673 is not known")));

  std::string container = Le(uint64_t{64}) + std::string(56, '\xc1');
  index = ReadPlan(container);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.container"), "flatbuffers");
}

TEST(TensorRtTest, AnotherFormatUnderAPlansNameIsRefusedByItsOwn) {
  const std::string onnx("\x08\x08\x3a\x02\x0a\x00", 6);
  EXPECT_THAT(Refusal(onnx), HasSubstr("ONNX under the name of a TensorRT plan"));
  EXPECT_THAT(Refusal(SmallSafetensors({"a"}), "m.plan"), HasSubstr("safetensors under the name"));
  EXPECT_THAT(Refusal(GgufBuilder().Build(), "m.trt"), HasSubstr("GGUF under the name"));
  EXPECT_THAT(Refusal("PK\x03\x04" + std::string(60, '\x01')), HasSubstr("PyTorch"));
  EXPECT_THAT(Refusal("7z\xbc\xaf\x27\x1c" + std::string(60, '\x01')), HasSubstr("a 7z archive"));
  EXPECT_THAT(Refusal("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
              HasSubstr("Git LFS pointer"));
  EXPECT_THAT(Refusal("lmgg" + std::string(60, '\x01')), HasSubstr("GGML"));
  EXPECT_THAT(Refusal("\x1f\x8b\x08" + std::string(60, '\x91')), HasSubstr("gzip"));
  EXPECT_THAT(Refusal("\x28\xb5\x2f\xfd" + std::string(60, '\x91')), HasSubstr("Zstandard"));
  EXPECT_THAT(Refusal("\x7f"
                      "ELF" +
                      std::string(60, '\x91')),
              HasSubstr("program"));
  EXPECT_THAT(Refusal("\x18\x01\x02\x03TFL3" + std::string(60, '\x91')), HasSubstr("Lite"));
  EXPECT_THAT(Refusal("<!DOCTYPE html><html><body>404 Not Found"), HasSubstr("web page"));
  EXPECT_THAT(Refusal("{\"format_version\": \"1.2\", \"terraform_version\": 1}"),
              HasSubstr("but text"));
  EXPECT_THAT(Refusal("Entry not found. Try another path.\n"), HasSubstr("but text"));
  EXPECT_THAT(Refusal(std::string(4096, '\0')), HasSubstr("zeros"));
  EXPECT_THAT(Refusal(""), HasSubstr("empty"));
  EXPECT_THAT(Refusal("\x80\x81\x82"), HasSubstr("only 3 bytes"));
}

// Whatever stands in front of the graph, and wherever the file is cut.
TEST(TensorRtTest, AnOnnxModelIsFoundUnderAPlansNameHoweverItIsMade) {
  const testing::Proto graph = testing::OnnxGraph({testing::OnnxFloats("w", 4)});
  const std::string model = testing::OnnxModel(graph).bytes();
  std::string properties;
  for (int i = 0; i < 100; ++i) {
    properties += testing::Proto()
                      .Add(14, testing::Proto().Bytes(1, absl::StrCat("k", i)).Bytes(2, "v"))
                      .bytes();
  }
  const std::string bare = testing::Proto().Add(7, graph).bytes();
  for (const std::string& disguised : {
           testing::Proto().Bytes(99, "x").bytes() + model,
           testing::Proto().Varint(70000, 1).bytes() + model,
           testing::Proto().Tag(99, 5).Raw("1234").bytes() + model,
           testing::Proto().Tag(99, 1).Raw("12345678").bytes() + model,
           testing::Proto().Tag(99, 3).Varint(1, 1).Tag(99, 4).bytes() + model,
           properties + model,
           bare,
           bare.substr(0, bare.size() - 8),
           properties + bare.substr(0, bare.size() - 8),
           testing::Proto().Bytes(99, "x").bytes() + bare.substr(0, 12),
           // What follows the graph is damaged.
           bare + "\x0f",
       }) {
    for (const char* name : {"m.engine", "m.plan", "m.trt"}) {
      EXPECT_THAT(Refusal(disguised, name), HasSubstr("ONNX under the name")) << disguised;
    }
  }
}

TEST(TensorRtTest, RandomBytesUnderAPlansNameAreNoOtherFormat) {
  std::mt19937_64 random(20260101);
  for (int run = 0; run < 2'000; ++run) {
    std::string plan;
    for (int i = 0; i < 50; ++i) plan += Le(random());
    plan[0] = static_cast<char>(0x90 | (plan[0] & 0x0f));  // Of no format that has a mark.
    auto index = ReadPlan(plan);
    ASSERT_TRUE(index.ok()) << run << index.status();
  }
}

TEST(TensorRtTest, APlansVersionsAreNoHeaderOfSafetensors) {
  for (const char* magic : {"ptrt", "ftrt"}) {
    Plan plan;
    plan.magic = magic;
    plan.safe = 0;
    plan.standard = '{';
    for (const char* name : {"m.engine", "weights.bin"}) {
      auto index = ReadPlan(plan.Build(), name);
      ASSERT_TRUE(index.ok()) << index.status();
      EXPECT_EQ(TensorRtMetadata(*index, "tensorrt.serialization_version"), "123");
    }
  }
  const std::string unknown =
      Le(uint32_t{0x9080}) + Le(uint32_t{0}) + "{" + std::string(60, '\xc1');
  EXPECT_TRUE(ReadPlan(unknown).ok()) << ReadPlan(unknown).status();
  // But a header is one, cut or not.
  const std::string good = SmallSafetensors({"a"});
  for (const size_t size : {good.size(), good.size() / 2, size_t{20}, size_t{9}}) {
    EXPECT_THAT(Refusal(good.substr(0, size)), HasSubstr("safetensors under the name"));
  }
}

TEST(TensorRtTest, NothingButAPlanStandsBehindAJsonText) {
  const std::string json = "{\"a\": 1}";
  const std::string prefix = Le(static_cast<uint32_t>(json.size())) + json;
  EXPECT_THAT(Refusal(prefix + SmallSafetensors({"a"})), HasSubstr("safetensors under the name"));
  EXPECT_THAT(Refusal(prefix + GgufBuilder().Build()), HasSubstr("GGUF under the name"));
  EXPECT_THAT(Refusal(prefix + testing::OnnxOf(testing::OnnxFloats("w", 1))),
              HasSubstr("ONNX under the name"));
  EXPECT_THAT(Refusal(prefix + "PK\x03\x04" + std::string(60, '\x01')), HasSubstr("PyTorch"));
  EXPECT_THAT(Refusal(prefix + "\x80\x02}q." + std::string(60, '\x01')),
              HasSubstr("a bare pickle"));
  EXPECT_THAT(Refusal(prefix + "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
              HasSubstr("Git LFS"));
  EXPECT_THAT(Refusal(prefix + prefix + Plan().Build()), HasSubstr("second JSON text"));
  EXPECT_THAT(Refusal(prefix + prefix + std::string(60, '\xc1')), HasSubstr("second JSON text"));
  EXPECT_TRUE(ReadPlan(prefix + std::string(60, '\xc1')).ok());
}

TEST(TensorRtTest, ContentThatIsAPlanNeedsNoName) {
  auto index = ReadPlan(Plan().Build(), "weights.bin");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "tensorrt");
}

TEST(TensorRtTest, APlanIsAComponentOfItsOwnNameBesideWeights) {
  MemoryFiles files({{"sub/model.engine", Plan().Build()},
                     {"model.engine", Plan().Build()},
                     {"model.engine.requires.json", "{\"tensorrt\":\"10.3.0\"}"},
                     {"model.safetensors", SmallSafetensors({"a"})}});
  auto components = FindComponents(files.Names(), files);
  ASSERT_TRUE(components.ok());
  std::vector<std::string> lines;
  for (const Component& each : *components) lines.push_back(each.name + "=" + each.main_file);
  EXPECT_THAT(lines, ElementsAre("model.engine=model.engine", "model=model.safetensors",
                                 "sub/model.engine=sub/model.engine"));
}

}  // namespace
}  // namespace modelhost
