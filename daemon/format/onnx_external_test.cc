// Tensors whose data lies in other files, with the faults that models have been made with.
#include <string>
#include <vector>

#include "daemon/format/model_builders.h"
#include "daemon/format/onnx.h"
#include "daemon/format/onnx_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kOnnxFloat;
using testing::kOnnxString;
using testing::MemoryFiles;
using testing::OnnxAttribute;
using testing::OnnxEntries;
using testing::OnnxExternal;
using testing::OnnxFloats;
using testing::OnnxGraph;
using testing::OnnxModel;
using testing::OnnxNode;
using testing::OnnxOf;
using testing::Proto;

class OnnxExternalTest : public ::testing::Test {
 protected:
  OnnxExternalTest() {
    files_.Put("w.bin", std::string(64, 'w'));
    files_.Put("sub/w.bin", std::string(64, 's'));
    files_.Put("n\xff.bin", std::string(64, 'w'));
    files_.Put("a..b.bin", std::string(16, 'a'));
    files_.Put("\xd1\x8f x.bin", std::string(16, 'a'));
  }

  absl::StatusOr<TensorIndex> Read(const std::string& model) {
    files_.Put("m.onnx", model);
    return ReadModel("m.onnx", files_);
  }
  // F32 [4] with these entries.
  absl::StatusOr<TensorIndex> With(const OnnxEntries& entries) {
    return Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, entries)));
  }
  std::string Refusal(const absl::StatusOr<TensorIndex>& index) {
    if (index.ok()) return "accepted";
    EXPECT_TRUE(absl::IsInvalidArgument(index.status())) << index.status();
    EXPECT_THAT(std::string(index.status().message()), HasSubstr("m.onnx: at byte "));
    return std::string(index.status().message());
  }
  std::string RefusalWith(const OnnxEntries& entries) { return Refusal(With(entries)); }

  MemoryFiles files_;
};

TEST_F(OnnxExternalTest, DataLiesWhereTheModelSays) {
  auto index = With({{"location", "w.bin"}, {"offset", "16"}, {"length", "16"}});
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files(), ElementsAre("m.onnx", "w.bin"));
  const TensorInfo w = index->at(0);
  EXPECT_EQ(w.file, 1u);
  EXPECT_EQ(w.offset, 16u);
  EXPECT_EQ(w.nbytes, 16u);
  EXPECT_TRUE(w.mappable);
  for (const OnnxEntries& entries : std::vector<OnnxEntries>{
           {{"location", "w.bin"}},
           {{"location", "w.bin"}, {"offset", "3"}},
           {{"location", "w.bin"}, {"offset", "48"}},
           {{"location", "w.bin"}, {"offset", "0016"}, {"length", "16"}},
           {{"location", "w.bin"}, {"__class__", "x"}, {"checksum", "0"}, {"basepath", "/"}},
           {{"location", "a..b.bin"}},
           {{"location", "\xd1\x8f x.bin"}},
           {{"location", "./w.bin"}},
           {{"location", "sub//./w.bin"}}}) {
    EXPECT_TRUE(With(entries).ok()) << entries[0].second << With(entries).status();
  }
}

TEST_F(OnnxExternalTest, EveryFileIsListedOnceHoweverItIsWritten) {
  std::vector<Proto> initializers = {OnnxFloats("embedded", 1)};
  int number = 0;
  for (const char* location : {"w.bin", "sub/w.bin", "./w.bin", "sub/./w.bin", "w.bin", "m.onnx"}) {
    initializers.push_back(OnnxExternal("t" + std::to_string(number++), kOnnxFloat, {1},
                                        {{"location", location}, {"offset", "4"}}));
  }
  auto index = Read(OnnxModel(OnnxGraph(initializers)).bytes());
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files(), ElementsAre("m.onnx", "w.bin", "sub/w.bin"));
  std::vector<uint32_t> files;
  for (size_t i = 0; i < index->size(); ++i) files.push_back(index->at(i).file);
  EXPECT_THAT(files, ElementsAre(0, 1, 2, 1, 2, 1, 0));
}

TEST_F(OnnxExternalTest, LocationsAreInTheFolderOfTheModel) {
  MemoryFiles files;
  files.Put("x/m.onnx", OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, {{"location", "y/w.bin"}})));
  files.Put("x/y/w.bin", std::string(16, 'w'));
  auto index = ReadModel("x/m.onnx", files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->files(), ElementsAre("x/m.onnx", "x/y/w.bin"));
  files.Put("x/m.onnx", OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, {{"location", "../w.bin"}})));
  files.Put("w.bin", std::string(16, 'w'));
  EXPECT_FALSE(ReadModel("x/m.onnx", files).ok());
}

TEST_F(OnnxExternalTest, LocationsThatAreNoPlainNamesAreRefused) {
  for (const std::string& location : {std::string(),
                                      std::string("."),
                                      std::string("./"),
                                      std::string("/"),
                                      std::string(".."),
                                      std::string("/etc/passwd"),
                                      std::string("//etc/passwd"),
                                      std::string("../w.bin"),
                                      std::string("sub/../w.bin"),
                                      std::string("sub/.."),
                                      std::string("./../w.bin"),
                                      std::string("w.bin/"),
                                      std::string("w.bin/."),
                                      std::string("sub\\w.bin"),
                                      std::string("..\\w.bin"),
                                      std::string("w.bin\0x", 7),
                                      std::string("\0w.bin", 6),
                                      std::string("#w.bin"),
                                      std::string("n\xff.bin"),
                                      std::string("\xed\xa0\x80")}) {
    EXPECT_THAT(RefusalWith({{"location", location}}), HasSubstr("no plain name")) << location;
  }
  EXPECT_THAT(RefusalWith({{"location", "*/_ORT_MEM_ADDR_/*"}, {"offset", "140000"}}),
              HasSubstr("memory of ONNX Runtime"));
  EXPECT_THAT(RefusalWith({}), HasSubstr("no location"));
  EXPECT_THAT(RefusalWith({{"offset", "0"}}), HasSubstr("no location"));
  EXPECT_THAT(RefusalWith({{"location", "gone.bin"}}),
              AllOf(HasSubstr("'gone.bin', which is missing"), HasSubstr("'w'")));
}

TEST_F(OnnxExternalTest, NothingIsOpenedThatTheFolderDoesNotHold) {
  // What the source is asked for at all, were it to give anything.
  class Recorder : public FileSource {
   public:
    absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
      asked.push_back(name);
      return std::as_bytes(std::span<const char>(name == "m.onnx" ? model : data));
    }
    std::string model;
    std::string data = std::string(64, 'x');
    std::vector<std::string> asked;
  };
  for (const char* location : {"../w.bin", "/etc/passwd", "sub/../../w.bin", "a\\..\\w.bin"}) {
    Recorder recorder;
    recorder.model = OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, {{"location", location}}));
    EXPECT_FALSE(ReadModel("m.onnx", recorder).ok());
    EXPECT_THAT(recorder.asked, ElementsAre("m.onnx")) << location;
  }
}

TEST_F(OnnxExternalTest, NumbersAreDecimalAndInsideTheFile) {
  for (const char* bad :
       {"", "-1", "-16", "+16", " 16", "16 ", "0x10", "1e1", "16.0", "1_6", "9223372036854775808",
        "18446744073709551616", "99999999999999999999999999"}) {
    EXPECT_THAT(RefusalWith({{"location", "w.bin"}, {"offset", bad}}), HasSubstr("offset")) << bad;
    EXPECT_THAT(RefusalWith({{"location", "w.bin"}, {"length", bad}}), HasSubstr("length")) << bad;
  }
  for (const char* far : {"49", "64", "65", "1125899906842624", "9223372036854775807"}) {
    EXPECT_THAT(RefusalWith({{"location", "w.bin"}, {"offset", far}}),
                AllOf(HasSubstr("has 16 bytes at offset"), HasSubstr("that file has 64 bytes")))
        << far;
  }
  EXPECT_THAT(RefusalWith({{"location", "w.bin"}, {"length", "1125899906842624"}}),
              HasSubstr("that file has 64 bytes"));
  for (const char* wrong : {"0", "8", "15", "17", "64"}) {
    EXPECT_THAT(RefusalWith({{"location", "w.bin"}, {"length", wrong}}), HasSubstr("need 16"))
        << wrong;
  }
}

TEST_F(OnnxExternalTest, KeysMayNotOccurTwice) {
  for (const char* key : {"location", "offset", "length"}) {
    OnnxEntries entries = {{"location", "w.bin"}, {"offset", "16"}, {"length", "16"}};
    entries.emplace_back(key, key == std::string("location") ? "sub/w.bin" : "16");
    EXPECT_THAT(RefusalWith(entries), HasSubstr("twice")) << key;
  }
}

TEST_F(OnnxExternalTest, ValuesMayNotBeHereAndThere) {
  const OnnxEntries entries = {{"location", "w.bin"}};
  const std::string four(16, 'x');
  EXPECT_THAT(Refusal(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, entries).Bytes(9, four)))),
              HasSubstr("values here too"));
  // Nothing raw is a field that is there, as beside typed values.
  EXPECT_THAT(Refusal(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, entries).Bytes(9, "")))),
              HasSubstr("values here too"));
  EXPECT_THAT(Refusal(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {0}, entries).Bytes(9, "")))),
              HasSubstr("values here too"));
  EXPECT_THAT(Refusal(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, entries).Bytes(4, four)))),
              HasSubstr("values here too"));
  EXPECT_THAT(Refusal(Read(OnnxOf(OnnxExternal("w", kOnnxString, {4}, entries)))),
              HasSubstr("strings in another file"));
  // What is left of the entries of data that was taken in says nothing.
  EXPECT_TRUE(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, {{"location", "../x"}})
                              .Varint(14, 0)
                              .Bytes(9, four)))
                  .ok());
}

TEST_F(OnnxExternalTest, EmptyTensorsMayBeAnywhereInTheirFile) {
  EXPECT_TRUE(Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {0},
                                       {{"location", "w.bin"}, {"offset", "64"}, {"length", "0"}})))
                  .ok());
  EXPECT_FALSE(
      Read(OnnxOf(OnnxExternal("w", kOnnxFloat, {0}, {{"location", "w.bin"}, {"offset", "65"}})))
          .ok());
}

TEST_F(OnnxExternalTest, TheSameRulesHoldInsideNodesAndSubgraphs) {
  const Proto escape = OnnxExternal("w", kOnnxFloat, {4}, {{"location", "../w.bin"}});
  const Proto good = OnnxExternal("w", kOnnxFloat, {4}, {{"location", "w.bin"}});
  for (const Proto& attribute :
       {OnnxAttribute("v", 5, escape), OnnxAttribute("v", 10, good).Add(10, escape),
        OnnxAttribute("v", 6, OnnxGraph({escape})), OnnxAttribute("v", 11, OnnxGraph({escape}))}) {
    EXPECT_THAT(Refusal(Read(OnnxModel(OnnxGraph({}, {OnnxNode("n", "o", attribute)})).bytes())),
                HasSubstr("no plain name"));
  }
  EXPECT_TRUE(
      Read(OnnxModel(OnnxGraph({}, {OnnxNode("n", "o", OnnxAttribute("v", 5, good))})).bytes())
          .ok());
}

TEST_F(OnnxExternalTest, AnErrorOfTheSourceKeepsItsCodeAndNamesModelAndTensor) {
  class Denying : public FileSource {
   public:
    absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
      if (name != "m.onnx") return absl::PermissionDeniedError(text);
      return std::as_bytes(std::span<const char>(model));
    }
    std::string model = OnnxOf(OnnxExternal("w", kOnnxFloat, {4}, {{"location", "w.bin"}}));
    std::string text = "w.bin: no";
  };
  Denying source;
  absl::Status status = ReadModel("m.onnx", source).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("m.onnx: at byte "), HasSubstr("tensor 'w' has its data in 'w.bin'"),
                    HasSubstr(": w.bin: no (it has to be a file")));
  // What the source says to do is enough.
  source.text = "w.bin: a link (copy it)";
  status = ReadModel("m.onnx", source).status();
  EXPECT_THAT(std::string(status.message()), ::testing::EndsWith(": w.bin: a link (copy it)"));
}

TEST_F(OnnxExternalTest, DataFilesAreNoComponentsWhateverTheyLookLike) {
  const std::string model =
      OnnxModel(OnnxGraph({OnnxExternal("a", kOnnxFloat, {1}, {{"location", "raw.safetensors"}}),
                           OnnxExternal("b", kOnnxFloat, {1}, {{"location", "x/w.gguf"}}),
                           OnnxExternal("c", kOnnxFloat, {1}, {{"location", "other.onnx"}})}))
          .bytes();
  MemoryFiles files({{"m.onnx", model},
                     {"raw.safetensors", std::string(64, 'x')},
                     {"x/w.gguf", testing::GgufBuilder().Build()},
                     {"other.onnx", OnnxOf(OnnxFloats("w", 1))},
                     {"own.safetensors", testing::SmallSafetensors({"a"})}});
  auto components = FindComponents(files.Names(), files);
  ASSERT_TRUE(components.ok());
  std::vector<std::string> found;
  for (const Component& component : *components) found.push_back(component.main_file);
  // A model is a component even when another one claims it: two could claim each other.
  EXPECT_THAT(found, ElementsAre("m.onnx", "other.onnx", "own.safetensors"));
}

}  // namespace
}  // namespace modelhost
