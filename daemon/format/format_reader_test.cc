#include "daemon/format/format_reader.h"

#include <map>
#include <string>
#include <vector>

#include "daemon/format/model_builders.h"
#include "daemon/format/name_table.h"
#include "daemon/format/text.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using testing::GgufBuilder;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Le;
using testing::MemoryFiles;
using testing::SmallSafetensors;

constexpr char kLfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";

std::string Zip() { return std::string("PK\x03\x04") + std::string(60, 'x'); }
std::string EmptyPickle() { return "\x80\x02}q\x00."; }
// ModelProto with ir_version 8, a producer and an empty graph.
std::string Onnx() { return std::string("\x08\x08\x12\x02pt\x3a\x00", 8); }

FileFormat Sniff(const std::string& bytes, const std::string& name = "x.bin") {
  return SniffFormat(std::as_bytes(std::span<const char>(bytes)), name);
}

std::string FileRefusal(const std::string& bytes, const std::string& name = "x.bin") {
  MemoryFiles files;
  files.Put(name, bytes);
  auto index = ReadModel(name, files);
  return index.ok() ? "accepted" : std::string(index.status().message());
}

TEST(SniffTest, ContentDecidesUnderAnyName) {
  for (const char* name : {"x", "x.bin", "x.gguf", "x.safetensors", "x.onnx", "x.pt"}) {
    EXPECT_EQ(Sniff(SmallSafetensors({"a"}), name), FileFormat::kSafetensors) << name;
    EXPECT_EQ(Sniff(GgufBuilder().Build(), name), FileFormat::kGguf) << name;
    EXPECT_EQ(Sniff("{\"weight_map\":{}}", name), FileFormat::kSafetensorsIndex) << name;
    EXPECT_EQ(Sniff(kLfs, name), FileFormat::kGitLfsPointer) << name;
    EXPECT_EQ(Sniff(Zip(), name), FileFormat::kTorchZip) << name;
    EXPECT_EQ(Sniff(EmptyPickle(), name), FileFormat::kTorchLegacy) << name;
    EXPECT_EQ(Sniff("ptrt" + std::string(20, 'x'), name), FileFormat::kTensorRt) << name;
    EXPECT_EQ(Sniff("tjgg" + std::string(20, 'x'), name), FileFormat::kLegacyGgml) << name;
    EXPECT_EQ(Sniff(Onnx(), name), FileFormat::kOnnx) << name;
    EXPECT_EQ(Sniff("7z\xbc\xaf\x27\x1c" + std::string(20, 'x'), name), FileFormat::kSevenZip);
    EXPECT_EQ(Sniff(std::string(257, 'x') + "ustar", name), FileFormat::kTorchLegacy) << name;
    // An exporter's JSON text in front of a plan.
    EXPECT_EQ(Sniff(Le<uint32_t>(2) + "{}" + "ftrt", name), FileFormat::kTensorRt) << name;
  }
}

// 640, 66176 and 67324752 begin like a pickle and a ZIP archive.
TEST(SniffTest, ALengthOfAHeaderMayLookLikeAMark) {
  for (const uint64_t length : {uint64_t{0x280}, uint64_t{0x480}, uint64_t{0x10280}}) {
    const std::string tensor = testing::TensorJson("a", "U8", "[1]", 0, 1);
    const std::string header = "{" + tensor + std::string(length - tensor.size() - 2, ' ') + "}";
    const std::string file = testing::Safetensors(header, 1);
    ASSERT_EQ(file.substr(0, 8), Le(length));
    for (const char* name : {"x", "x.safetensors", "x.pt", "x.engine"}) {
      EXPECT_EQ(Sniff(file, name), FileFormat::kSafetensors) << name;
      EXPECT_EQ(Sniff(file.substr(0, 40), name), FileFormat::kSafetensors) << name;
    }
  }
  EXPECT_EQ(Sniff(Le(uint64_t{0x04034b50}) + "{\"a\":"), FileFormat::kSafetensors);
  // As an archive of version 0 without flags.
  EXPECT_EQ(Sniff(Le(uint64_t{0x04034b50}) + std::string(60, '\0'), "x.safetensors"),
            FileFormat::kTorchZip);
  EXPECT_EQ(Sniff(Le(uint64_t{0x06054b50}) + "{" + std::string(60, '\0')), FileFormat::kTorchZip);
}

TEST(SniffTest, TheNameDecidesWhatContentCannot) {
  EXPECT_EQ(Sniff("garbage", "x.safetensors"), FileFormat::kSafetensors);
  EXPECT_EQ(Sniff("garbage", "x.gguf"), FileFormat::kGguf);
  EXPECT_EQ(Sniff("garbage", "m.safetensors.index.json"), FileFormat::kSafetensorsIndex);
  EXPECT_EQ(Sniff("garbage", "x.txt"), FileFormat::kUnknown);
  EXPECT_EQ(Sniff("", "x.txt"), FileFormat::kUnknown);
  // A model cut in its graph, and raw data that starts with the byte of one.
  EXPECT_EQ(Sniff("\x08\x08\x3a\x7f..."), FileFormat::kOnnx);
  EXPECT_EQ(Sniff("\x3a\x7f..."), FileFormat::kUnknown);
  EXPECT_EQ(Sniff("{\"a\":{\"weight_map\":{}}}", "config.json"), FileFormat::kUnknown);
  EXPECT_EQ(Sniff("{\"a\":\"\\\"weight_map\\\"\"}", "config.json"), FileFormat::kUnknown);
}

TEST(ReadModelTest, RefusesOtherFormatsByNameAndSaysWhatToDo) {
  EXPECT_THAT(FileRefusal(kLfs), HasSubstr("x.bin: a Git LFS pointer"));
  EXPECT_THAT(FileRefusal(Zip()), HasSubstr("no end record of a ZIP archive"));
  EXPECT_THAT(FileRefusal(EmptyPickle()), HasSubstr("a bare pickle, legacy of PyTorch"));
  EXPECT_THAT(FileRefusal("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."),
              HasSubstr("a legacy pickle checkpoint of PyTorch"));
  EXPECT_THAT(FileRefusal(std::string(257, 'x') + "ustar"), HasSubstr("a tar archive: a legacy"));
  EXPECT_THAT(FileRefusal("PYTORCH1" + std::string(20, 'x')), HasSubstr("a preview format"));
  EXPECT_THAT(FileRefusal("7z\xbc\xaf\x27\x1c" + std::string(20, 'x')), HasSubstr("a 7z archive"));
  EXPECT_THAT(FileRefusal("garbage", "x.pt"), HasSubstr("not a ZIP archive of torch.save"));
  EXPECT_THAT(FileRefusal("lmgg" + std::string(20, 'x')), HasSubstr("a GGML file"));
  EXPECT_THAT(FileRefusal("fmgg" + std::string(20, 'x')), HasSubstr("a GGMF file"));
  EXPECT_THAT(FileRefusal("tjgg" + std::string(20, 'x')), HasSubstr("a GGJT file"));
  EXPECT_THAT(FileRefusal("<!DOCTYPE html><html>"), HasSubstr("web page"));
  EXPECT_THAT(FileRefusal("hello"), HasSubstr("not a model file"));
  EXPECT_THAT(FileRefusal(""), HasSubstr("empty"));
  MemoryFiles files({{"x.onnx", EmptyPickle()}});
  EXPECT_TRUE(absl::IsUnimplemented(ReadModel("x.onnx", files).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadModel("y.onnx", files).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadModel("../x.onnx", files).status()));
}

TEST(ReadModelTest, OldPicklesAndArchivesBehindOtherBytesAreNamedAsWhatTheyAre) {
  const std::string archive = testing::SmallCheckpoint().Build();
  for (const char* name : {"pytorch_model.bin", "m.ckpt", "m.pt", "m.pth", "M.BIN"}) {
    for (const char* pickle : {"(dp0\nVw\np1\nI1\ns.", "(lp0\nI1\na.",
                               "]q\x01(K\x01K\x02"
                               "e.",
                               "}q\x01(X\x01.", "ccollections\nOrderedDict\np0\n(tRp1\n.",
                               "(ccopy_reg\n_reconstructor\n."}) {
      EXPECT_THAT(FileRefusal(pickle, name), HasSubstr("a bare pickle")) << name << pickle;
    }
    for (const std::string& front :
         {std::string(7, '\0'), std::string("MZ\x90"), archive.substr(1, 9)}) {
      EXPECT_THAT(FileRefusal(front + archive, name), HasSubstr("other bytes in front")) << name;
    }
  }
  for (const char* other : {"code\nmore", "hello", "cat\n"}) {
    EXPECT_THAT(FileRefusal(other, "x.bin"), HasSubstr("not a model file")) << other;
  }
  EXPECT_THAT(FileRefusal("(dp0\n.", "x.txt"), HasSubstr("not a model file"));
}

TEST(PlainNameTest, KeepsNamesInsideTheFolder) {
  for (const char* good : {"a", "a.bin", "a/b.bin", "a..b", "...", ".hidden", "a b", "\xd1\x8f"}) {
    EXPECT_TRUE(IsPlainRelativeName(good)) << good;
  }
  for (const char* bad : {"", "/", "/a", "..", ".", "../a", "a/..", "a/../b", "a//b", "a/", "./a",
                          "a/./b", "a\\b", "\\a"}) {
    EXPECT_FALSE(IsPlainRelativeName(bad)) << bad;
  }
  EXPECT_FALSE(IsPlainRelativeName(absl::string_view("a\0b", 3)));
}

std::vector<std::string> Found(MemoryFiles files) {
  std::vector<std::string> lines;
  auto components = FindComponents(files.Names(), files);
  EXPECT_TRUE(components.ok()) << components.status();
  for (const Component& component : *components) {
    lines.push_back(component.name + "=" + component.main_file);
  }
  return lines;
}

TEST(FindComponentsTest, SingleFilesAreComponentsAndSidecarsAreNot) {
  EXPECT_THAT(
      Found(MemoryFiles({{"planner.safetensors", SmallSafetensors({"a"})},
                         {"draft.gguf", GgufBuilder().Build()},
                         {"weights.bin", SmallSafetensors({"b"})},
                         {"config.json", "{\"a\":1}"},
                         {"tokenizer.json", kLfs},
                         {"README.md", "hello"}})),
      ElementsAre("draft=draft.gguf", "planner=planner.safetensors", "weights=weights.bin"));
  EXPECT_THAT(Found(MemoryFiles(std::map<std::string, std::string>{{"config.json", "{}"}})),
              IsEmpty());
}

TEST(FindComponentsTest, AShardIndexOwnsTheSafetensorsOfItsFolder) {
  MemoryFiles files({{"model.safetensors.index.json",
                      "{\"weight_map\":{\"a\":\"model-00001-of-00001.safetensors\"}}"},
                     {"model-00001-of-00001.safetensors", SmallSafetensors({"a"})},
                     {"model.safetensors", SmallSafetensors({"stray"})},
                     {"vae/vae.safetensors", SmallSafetensors({"v"})}});
  EXPECT_THAT(Found(files),
              ElementsAre("model=model.safetensors.index.json", "vae=vae/vae.safetensors"));
}

TEST(FindComponentsTest, ADamagedIndexIsAComponentSoThatLoadingReportsIt) {
  EXPECT_THAT(Found(MemoryFiles({{"model.safetensors.index.json", "{\"weight_map\":"},
                                 {"model-00001-of-00002.safetensors", SmallSafetensors({"a"})}})),
              ElementsAre("model=model.safetensors.index.json"));
}

TEST(FindComponentsTest, AGgufSetIsOneComponent) {
  MemoryFiles files(
      {{"m-00001-of-00002.gguf", GgufBuilder().Split(0, 2, 0).Build()},
       {"m-00002-of-00002.gguf", GgufBuilder().Key("split.no", 2, Le<uint16_t>(1)).Build()},
       {"n-00002-of-00002.gguf", GgufBuilder().Split(1, 2, 0).Build()},
       {"o-00002-of-00002.gguf", GgufBuilder().Build()}});
  EXPECT_THAT(Found(files), ElementsAre("m=m-00001-of-00002.gguf", "n=n-00002-of-00002.gguf",
                                        "o=o-00002-of-00002.gguf"));
}

TEST(FindComponentsTest, EqualNamesBecomeFileNames) {
  EXPECT_THAT(Found(MemoryFiles({{"model.safetensors", SmallSafetensors({"a"})},
                                 {"model.gguf", GgufBuilder().Build()},
                                 {"x/other.gguf", GgufBuilder().Build()}})),
              ElementsAre("model.gguf=model.gguf", "model.safetensors=model.safetensors",
                          "other=x/other.gguf"));
}

TEST(FindComponentsTest, OtherFormatsCountOnlyWhenNothingServedIsThere) {
  const std::string torch_index = "{\"weight_map\":{\"a\":\"pytorch_model.bin\"}}";
  EXPECT_THAT(
      Found(MemoryFiles({{"model.pt", EmptyPickle()}, {"model.plan", "ptrt12345678901234567890"}})),
      ElementsAre("model.plan=model.plan"));
  EXPECT_THAT(Found(MemoryFiles({{"model.pt", EmptyPickle()},
                                 {"pytorch_model.bin", Zip()},
                                 {"pytorch_model.bin.index.json", torch_index},
                                 {"model.safetensors", SmallSafetensors({"a"})}})),
              ElementsAre("model=model.safetensors"));
}

TEST(FindComponentsTest, AnIndexOverFilesOfAnotherKindIsNoneThatIsServed) {
  const std::string torch_index = "{\"weight_map\":{\"a\":\"pytorch_model-00001-of-00001.bin\"}}";
  // As hubs hand folders out: the other kind's shards are left out, or pointers only.
  EXPECT_THAT(Found(MemoryFiles({{"pytorch_model.bin.index.json", torch_index},
                                 {"model.safetensors", SmallSafetensors({"a"})}})),
              ElementsAre("model=model.safetensors"));
  EXPECT_THAT(Found(MemoryFiles({{"pytorch_model.bin.index.json", torch_index},
                                 {"pytorch_model-00001-of-00001.bin", kLfs},
                                 {"model.safetensors", SmallSafetensors({"a"})}})),
              ElementsAre("model=model.safetensors"));
  // Whatever the index is called, shards that are safetensors are served.
  EXPECT_THAT(Found(MemoryFiles({{"pytorch_model.bin.index.json", torch_index},
                                 {"pytorch_model-00001-of-00001.bin", SmallSafetensors({"a"})}})),
              ElementsAre("pytorch_model=pytorch_model.bin.index.json"));
}

TEST(FindComponentsTest, CheckpointsAreComponentsWhereNothingBetterIsThere) {
  const std::string checkpoint = testing::SmallCheckpoint().Build();
  const std::string legacy = EmptyPickle();
  EXPECT_THAT(
      Found(MemoryFiles({{"pytorch_model.bin", checkpoint},
                         {"optimizer.pt", checkpoint},
                         {"scheduler.pt", legacy},
                         {"code.zip", Zip()},
                         {"archive", checkpoint},
                         {"config.json", "{}"}})),
      ElementsAre("archive=archive", "optimizer=optimizer.pt", "pytorch_model=pytorch_model.bin"));
  // As training leaves a folder.
  for (const auto& [name, bytes] : std::map<std::string, std::string>{
           {"model.safetensors", SmallSafetensors({"a"})}, {"model.gguf", GgufBuilder().Build()}}) {
    EXPECT_THAT(Found(MemoryFiles({{name, bytes},
                                   {"pytorch_model.bin", checkpoint},
                                   {"optimizer.pt", checkpoint},
                                   {"rng_state.pth", kLfs},
                                   {"training_args.bin", Zip()}})),
                ElementsAre("model=" + name));
  }
  EXPECT_THAT(Found(MemoryFiles({{"rng_state.pth", kLfs}, {"pytorch_model.bin", Zip()}})),
              ElementsAre("pytorch_model=pytorch_model.bin", "rng_state=rng_state.pth"));
}

// A name that ends with .bin says nothing: it is what raw data is called.
TEST(FindComponentsTest, DataThatLooksLikeAnOldPickleIsNoComponent) {
  EXPECT_THAT(Found(MemoryFiles({{"m.safetensors", SmallSafetensors({"a"})},
                                 {"x/weights.bin", "(dp0\n."},
                                 {"y.bin", "front" + testing::SmallCheckpoint().Build()}})),
              ElementsAre("m=m.safetensors"));
  EXPECT_THAT(Found(MemoryFiles({{"a.bin", "(dp0\n."}, {"b.ckpt", "}q\x01."}})), IsEmpty());
}

TEST(FindComponentsTest, AnIndexOverCheckpointsClaimsThem) {
  const std::string checkpoint = testing::SmallCheckpoint().Build();
  EXPECT_THAT(Found(MemoryFiles({{"pytorch_model.bin.index.json",
                                  "{\"weight_map\":{\"w\":\"pytorch_model-00001-of-00001.bin\"}}"},
                                 {"pytorch_model-00001-of-00001.bin", checkpoint},
                                 {"extra.pt", checkpoint}})),
              ElementsAre("extra=extra.pt", "pytorch_model=pytorch_model.bin.index.json"));
}

TEST(FindComponentsTest, WeightsThatAreOnlyPointersAreComponentsSoThatLoadingReportsThem) {
  EXPECT_THAT(Found(MemoryFiles({{"a.safetensors", kLfs}, {"b.gguf", "tjgg----"}})),
              ElementsAre("a=a.safetensors", "b=b.gguf"));
}

TEST(FindComponentsTest, UnreadableWeightsAreComponentsAndUnreadableSidecarsAreNot) {
  MemoryFiles none;
  auto components = FindComponents({"gone.safetensors", "gone.txt", "../gone.gguf"}, none);
  ASSERT_TRUE(components.ok());
  ASSERT_EQ(components->size(), 1u);
  EXPECT_EQ((*components)[0].main_file, "gone.safetensors");
}

TEST(NameTableTest, FindsNamesAndDuplicates) {
  const NameTable table({"b", "a", "", "c"});
  EXPECT_FALSE(table.Duplicate().has_value());
  EXPECT_EQ(table.Find("a"), 1u);
  EXPECT_EQ(table.Find(""), 2u);
  EXPECT_FALSE(table.Find("d").has_value());
  EXPECT_EQ(NameTable({"x", "y", "x"}).Duplicate(), std::pair(size_t{0}, size_t{2}));
  EXPECT_FALSE(NameTable({}).Find("a").has_value());
}

TEST(TextTest, AnyBytesBecomeValidJsonAndPrintableText) {
  std::string out;
  AppendJsonString(std::string_view("a\"\\\n\0\x7f\xff\xc3\xa9\xe2\x82z", 12), &out);
  EXPECT_EQ(out, "\"a\\\"\\\\\\u000a\\u0000\\u007f\\ufffd\xc3\xa9\\ufffd\\ufffdz\"");
  EXPECT_EQ(Quoted("a\x1b[0m\xff"), "'a\\x1b[0m\\xff'");
  EXPECT_THAT(Quoted(std::string(500, 'x')), HasSubstr("... (500 bytes)"));
  EXPECT_EQ(ToUtf8("a\xff\xc3\xa9"), "a\xef\xbf\xbd\xc3\xa9");
  EXPECT_EQ(Printable("dir/a\n\x1b[2J"), "dir/a\\x0a\\x1b[2J");
  EXPECT_EQ(ModelError("a\nb", "why", "").message(), "a\\x0ab: why");
}

TEST(TensorIndexTest, KeepsStridesAndReasons) {
  TensorIndex index("torch");
  index.AddFile("f");
  const std::vector<int64_t> shape = {2, 3};
  const std::vector<int64_t> strides = {1, 2};
  TensorInfo strided;
  strided.name = "s";
  strided.dtype = abi::DType::kF32;
  strided.shape = shape;
  strided.strides = strides;
  strided.offset = 1;
  index.Add(strided);
  TensorInfo not_mappable;
  not_mappable.name = "n";
  not_mappable.dtype = abi::DType::kI64;
  not_mappable.shape = shape;
  not_mappable.mappable = false;
  not_mappable.reason = "varints";
  index.Add(not_mappable);
  index.Add(not_mappable);
  EXPECT_THAT(index.at(0).strides, ElementsAre(1, 2));
  EXPECT_THAT(index.at(0).shape, ElementsAre(2, 3));
  EXPECT_EQ(index.at(0).reason, "");
  EXPECT_TRUE(index.at(1).strides.empty());
  EXPECT_EQ(index.at(2).reason, "varints");
  EXPECT_FALSE(index.at(2).mappable);
  index.ShiftOffsets(1, 7);
  EXPECT_EQ(index.at(0).offset, 1u);
  EXPECT_EQ(index.at(1).offset, 7u);
}

}  // namespace
}  // namespace modelhost
