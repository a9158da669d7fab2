#include "client/modelctl/inspect.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "client/modelctl/glob.h"
#include "client/modelctl/offline_files.h"
#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl {
namespace {

using modelhost::testing::GgufBuilder;
using modelhost::testing::Safetensors;
using modelhost::testing::SmallSafetensors;
using modelhost::testing::TensorJson;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
namespace fs = std::filesystem;

class InspectTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  void Put(const std::string& name, const std::string& bytes) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << bytes;
  }
  void Link(const std::string& target, const std::string& name) const {
    fs::create_directories((root_ / name).parent_path());
    fs::create_symlink(target, root_ / name);
  }
  int Inspect(const std::string& path,
              const InspectOptions& options = {IndexOutput::kJson, false, ""}) {
    std::ostringstream out;
    std::ostringstream err;
    const int code = InspectPath(path, options, out, err);
    out_ = out.str();
    err_ = err.str();
    if (code == 0) {
      EXPECT_THAT(err_, IsEmpty());
    } else {
      EXPECT_THAT(out_, IsEmpty());
      EXPECT_THAT(err_, StartsWith("error: "));
      EXPECT_EQ(err_.find('\n'), err_.size() - 1) << err_;
    }
    return code;
  }
  std::string Output(const std::string& path, IndexOutput output, bool tensors = false,
                     const std::string& filter = "") {
    EXPECT_EQ(Inspect(path, {output, tensors, filter}), 0) << err_;
    return out_;
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
  std::string out_;
  std::string err_;
};

TEST_F(InspectTest, PrintsTheIndexAsJson) {
  const std::string header =
      "{\"__metadata__\":{\"k\":\"v\\n\"}," + TensorJson("a.b", "F32", "[1,2]", 0, 8) + "}";
  Put("m.safetensors", Safetensors(header, 8));
  EXPECT_EQ(
      Output(Path("m.safetensors"), IndexOutput::kJson),
      "{\"apiVersion\":\"modelhost/v1\",\"kind\":\"Index\",\"format\":\"safetensors\",\"files\":"
      "[\"m.safetensors\"],\"tensors\":[{\"name\":\"a.b\",\"dtype\":\"F32\",\"shape\":[1,2],"
      "\"file\":\"m.safetensors\",\"offset\":" +
          std::to_string(8 + header.size()) +
          ",\"nbytes\":8,\"mappable\":true}],\"metadata\":{\"k\":\"v\\u000a\"},\"warnings\":[]}\n");
}

TEST_F(InspectTest, OtherOutputsAndTheFilter) {
  Put("m.safetensors", SmallSafetensors({"blk.0.w", "blk.1.w", "out\\n.b"}));
  const std::string path = Path("m.safetensors");
  EXPECT_EQ(Output(path, IndexOutput::kName), "blk.0.w\nblk.1.w\nout\\x0a.b\n");
  EXPECT_EQ(Output(path, IndexOutput::kName, false, "blk.[1-9].*"), "blk.1.w\n");
  EXPECT_THAT(Output(path, IndexOutput::kJsonl, false, "*.b"),
              StartsWith("{\"name\":\"out\\u000a.b\""));
  const std::string table = Output(path, IndexOutput::kTable);
  EXPECT_THAT(table, HasSubstr("TENSORS  3  (U8 3)"));
  EXPECT_THAT(table, Not(HasSubstr("blk.0.w")));
  EXPECT_THAT(Output(path, IndexOutput::kTable, true), HasSubstr("blk.0.w"));
  EXPECT_THAT(Output(path, IndexOutput::kWide, true), HasSubstr("OFFSET"));
  EXPECT_THAT(Output(path, IndexOutput::kTable, false, "blk.*"), HasSubstr("TENSORS  2"));
}

TEST_F(InspectTest, MalformedInputEndsWithSix) {
  Put("cut.gguf", "GGUF");
  EXPECT_EQ(Inspect(Path("cut.gguf")), 6);
  EXPECT_THAT(err_, StartsWith("error: " + Path("cut.gguf") + ": at byte 4: "));
  Put("empty.safetensors", "");
  EXPECT_EQ(Inspect(Path("empty.safetensors")), 6);
  EXPECT_THAT(err_, HasSubstr("empty"));
  Put("x.onnx", std::string("\x08\x08\x3a\x01", 4));
  EXPECT_EQ(Inspect(Path("x.onnx")), 6);
  EXPECT_THAT(err_, HasSubstr("x.onnx: at byte 4: "));
  Put("legacy.pt",
      "\x80\x02\x8a\x0al\xfc\x9c"
      "F\xf9 j\xa8P\x19.");
  EXPECT_EQ(Inspect(Path("legacy.pt")), 6);
  EXPECT_THAT(err_, HasSubstr("legacy"));
}

TEST_F(InspectTest, AnErrorIsOneLineWhateverTheFileIsCalled) {
  Put("a\nb\x1b[31m.gguf", "GGUF");
  EXPECT_EQ(Inspect(Path("a\nb\x1b[31m.gguf")), 6);
  EXPECT_THAT(err_, HasSubstr("a\\x0ab\\x1b[31m.gguf"));
}

TEST_F(InspectTest, WhatIsNotThereEndsWithThree) {
  EXPECT_EQ(Inspect(Path("gone.gguf")), 3);
  EXPECT_EQ(Inspect(""), 3);
  Put("file", "x");
  EXPECT_EQ(Inspect(Path("file/m.gguf")), 3);
  Link("nowhere", "dangling.gguf");
  EXPECT_EQ(Inspect(Path("dangling.gguf")), 3);
}

TEST_F(InspectTest, WithoutPermissionItEndsWithNine) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  Put("m.gguf", GgufBuilder().Build());
  fs::permissions(root_ / "m.gguf", fs::perms::none);
  EXPECT_EQ(Inspect(Path("m.gguf")), 9);
}

TEST_F(InspectTest, WhatIsNoFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo(Path("fifo.gguf").c_str(), 0600), 0);
  EXPECT_EQ(Inspect(Path("fifo.gguf")), 6);
  EXPECT_THAT(err_, HasSubstr("a FIFO, not a regular file"));
  EXPECT_EQ(Inspect("/dev/null"), 6);
  EXPECT_THAT(err_, HasSubstr("a device"));
  fs::create_directory(root_ / "folder.gguf");
  EXPECT_EQ(Inspect(Path("folder.gguf")), 6);
  EXPECT_THAT(err_, HasSubstr("a folder without model files"));
  // As a part of a set too.
  ASSERT_EQ(::mkfifo(Path("s.safetensors").c_str(), 0600), 0);
  Put("i.json", "{\"weight_map\":{\"a\":\"s.safetensors\"}}");
  EXPECT_EQ(Inspect(Path("i.json")), 6);
  EXPECT_THAT(err_, HasSubstr(Path("i.json") + ": weight_map names 's.safetensors', which"));
  EXPECT_THAT(err_, HasSubstr("s.safetensors: a FIFO, not a regular file (put the file"));
  fs::create_symlink("l.safetensors", root_ / "l.safetensors");
  Put("i.json", "{\"weight_map\":{\"a\":\"l.safetensors\"}}");
  EXPECT_EQ(Inspect(Path("i.json")), 6);
  EXPECT_THAT(err_, HasSubstr("(its links lead in a circle: put the file itself there)"));
}

TEST_F(InspectTest, ShardsMayBeLinksInsideTheFolderOrBesideTheRealIndex) {
  const std::string index = "{\"weight_map\":{\"a\":\"s.safetensors\"}}";
  // Inside the folder.
  Put("in/real.bin", SmallSafetensors({"a"}));
  Link("real.bin", "in/s.safetensors");
  Put("in/i.json", index);
  EXPECT_EQ(Inspect(Path("in/i.json")), 0) << err_;
  // A download cache: both are links into one folder of blobs.
  Put("hub/blobs/1", index);
  Put("hub/blobs/2", SmallSafetensors({"a"}));
  Link("../../blobs/1", "hub/snapshots/r/i.json");
  Link("../../blobs/2", "hub/snapshots/r/s.safetensors");
  EXPECT_EQ(Inspect(Path("hub/snapshots/r/i.json")), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("\"file\":\"s.safetensors\""));
  // A hard link to anywhere.
  Put("hard/i.json", index);
  fs::create_hard_link(root_ / "in/real.bin", root_ / "hard/s.safetensors");
  EXPECT_EQ(Inspect(Path("hard/i.json")), 0) << err_;
}

TEST_F(InspectTest, ShardsMayNotBeLinksOutOfTheFolder) {
  Put("outside.safetensors", SmallSafetensors({"a"}));
  Put("set/i.json", "{\"weight_map\":{\"a\":\"s.safetensors\"}}");
  Link("../outside.safetensors", "set/s.safetensors");
  EXPECT_EQ(Inspect(Path("set/i.json")), 6);
  EXPECT_THAT(err_, HasSubstr("a link out of the model's folder"));
  // A folder beside it whose name only begins like it.
  Put("set-2/s.safetensors", SmallSafetensors({"a"}));
  fs::remove(root_ / "set/s.safetensors");
  Link("../set-2/s.safetensors", "set/s.safetensors");
  EXPECT_EQ(Inspect(Path("set/i.json")), 6);
  // A link of a folder on the way.
  Put("other/s.safetensors", SmallSafetensors({"a"}));
  Put("by/i.json", "{\"weight_map\":{\"a\":\"sub/s.safetensors\"}}");
  Link("../other", "by/sub");
  EXPECT_EQ(Inspect(Path("by/i.json")), 6);
  // The main file itself may be a link to anywhere: the user named it.
  Link("outside.safetensors", "link.safetensors");
  EXPECT_EQ(Inspect(Path("link.safetensors")), 0) << err_;
}

TEST_F(InspectTest, RelativePathsWork) {
  Put("set/i.json", "{\"weight_map\":{\"a\":\"s.safetensors\"}}");
  Put("set/s.safetensors", SmallSafetensors({"a"}));
  const fs::path before = fs::current_path();
  fs::current_path(root_ / "set");
  EXPECT_EQ(Inspect("i.json"), 0) << err_;
  EXPECT_EQ(Inspect("../set/i.json"), 0) << err_;
  EXPECT_EQ(Inspect("."), 0) << err_;
  fs::current_path(before);
}

TEST_F(InspectTest, AFolderGivesAllItsWeightSets) {
  Put("v/model.safetensors.index.json", "{\"weight_map\":{\"a\":\"model-1.safetensors\"}}");
  Put("v/model-1.safetensors", SmallSafetensors({"a"}));
  Put("v/sub/draft.gguf", GgufBuilder().KeyU32("n", 3).Tensor("d", {4}, 0, 16).Build());
  Put("v/tokenizer.json", "{}");
  Put("v/.cache/old.safetensors", "junk");
  const std::string json = Output(Path("v"), IndexOutput::kJson);
  EXPECT_THAT(json, HasSubstr("\"format\":\"mixed\""));
  EXPECT_THAT(json,
              HasSubstr("\"components\":[{\"name\":\"model\",\"format\":\"safetensors\",\"file\":"
                        "\"model.safetensors.index.json\""));
  EXPECT_THAT(json, HasSubstr("{\"name\":\"draft\",\"format\":\"gguf\",\"file\":\"sub/draft.gguf\","
                              "\"files\":[\"sub/draft.gguf\"],\"tensorCount\":1,"
                              "\"metadata\":{\"n\":\"3\"}}"));
  EXPECT_THAT(json, HasSubstr("{\"name\":\"d\",\"component\":\"draft\""));
  EXPECT_EQ(Output(Path("v"), IndexOutput::kName), "a\nd\n");
  EXPECT_THAT(Output(Path("v/"), IndexOutput::kTable), HasSubstr("COMPONENT  draft"));
  Put("v/bad.gguf", "GGUF");
  EXPECT_EQ(Inspect(Path("v")), 6);
  EXPECT_THAT(err_, HasSubstr("bad.gguf"));
}

TEST_F(InspectTest, AFolderOfLinksIntoABlobStoreWorks) {
  Put("hub/blobs/1", SmallSafetensors({"a"}));
  Link("../../blobs/1", "hub/snapshots/r/model.safetensors");
  EXPECT_EQ(Inspect(Path("hub/snapshots/r")), 0) << err_;
}

TEST_F(InspectTest, AFolderCalledSnapshotsIsNoCacheWithoutBlobs) {
  Put("train/snapshots/step1/model.safetensors", SmallSafetensors({"a"}));
  Link("step1", "train/snapshots/latest");
  EXPECT_EQ(Inspect(Path("train/snapshots/latest")), 0) << err_;
}

TEST_F(InspectTest, ADownloadCacheShowsTheSnapshotThatMainNames) {
  Put("hub/blobs/1", SmallSafetensors({"old"}));
  Put("hub/blobs/2", SmallSafetensors({"new"}));
  Link("../../blobs/1", "hub/snapshots/aaaa/model.safetensors");
  Link("../../../blobs/2", "hub/snapshots/bbbb/unet/model.safetensors");
  Put("hub/refs/main", "bbbb");
  EXPECT_EQ(Output(Path("hub"), IndexOutput::kName), "new\n");
  EXPECT_EQ(Output(Path("hub/"), IndexOutput::kName), "new\n");
  EXPECT_EQ(Output(Path("hub/snapshots/aaaa"), IndexOutput::kName), "old\n");
  EXPECT_THAT(Output(Path("hub"), IndexOutput::kTable), HasSubstr("hub/snapshots/bbbb/unet/model"));
  // A part of a snapshot reaches the blobs too.
  EXPECT_EQ(Output(Path("hub/snapshots/bbbb/unet"), IndexOutput::kName), "new\n");
  // Without a main that is there: the only one, or a choice.
  for (const char* main : {"cccc", "../snapshots/aaaa", "", ".."}) {
    Put("hub/refs/main", main);
    EXPECT_EQ(Inspect(Path("hub")), 6) << main;
    EXPECT_THAT(err_, HasSubstr("a download cache of 2 snapshots, and refs/main names none of "
                                "them (name one: snapshots/aaaa, snapshots/bbbb)"));
  }
  fs::remove_all(root_ / "hub/refs");
  fs::remove_all(root_ / "hub/snapshots/bbbb");
  EXPECT_EQ(Output(Path("hub"), IndexOutput::kName), "old\n");
  fs::remove_all(root_ / "hub/snapshots/aaaa");
  EXPECT_EQ(Inspect(Path("hub")), 6);
  EXPECT_THAT(err_, HasSubstr("without a snapshot"));
}

TEST_F(InspectTest, LinksOfAFolderLeadNowhereButIntoTheBlobsOfItsCache) {
  Put("hub/blobs/1", SmallSafetensors({"a"}));
  Put("other/blobs/1", SmallSafetensors({"a"}));
  Link("../../../other/blobs/1", "hub/snapshots/r/model.safetensors");
  EXPECT_EQ(Inspect(Path("hub/snapshots/r")), 6);
  EXPECT_THAT(err_, HasSubstr("a link out of the model's folder"));
  // A folder of blobs beside anything that is not a snapshot is no cache.
  Link("../../blobs/1", "hub/revisions/r/model.safetensors");
  EXPECT_EQ(Inspect(Path("hub/revisions/r")), 6);
  EXPECT_THAT(err_, HasSubstr("a link out of the model's folder"));
  // What is no weights is not looked at, wherever it leads.
  Put("v/a.safetensors", SmallSafetensors({"a"}));
  Link("/etc/hostname", "v/README.md");
  EXPECT_EQ(Inspect(Path("v")), 0) << err_;
}

TEST_F(InspectTest, ATableShowsStridesAndWhyTensorsCannotBeMapped) {
  TensorIndex index("torch");
  index.AddFile("m.pt");
  TensorInfo tensor;
  const std::vector<int64_t> shape = {2, 3};
  const std::vector<int64_t> strides = {1, 2};
  tensor.dtype = abi::DType::kF32;
  tensor.shape = shape;
  tensor.nbytes = 24;
  tensor.name = "plain";
  index.Add(tensor);
  std::vector<NamedIndex> indexes(1, {"m", "m.pt", index});
  const auto table = [&indexes](IndexOutput output) {
    std::ostringstream out;
    WriteIndex("m.pt", indexes, {output, true, "", false}, out);
    return out.str();
  };
  EXPECT_THAT(table(IndexOutput::kTable), HasSubstr("NAME   DTYPE  SHAPE  SIZE\n"));
  tensor.name = "view";
  tensor.strides = strides;
  index.Add(tensor);
  tensor.name = "packed";
  tensor.strides = {};
  tensor.mappable = false;
  tensor.reason = "its storage is deflated";
  index.Add(tensor);
  indexes[0].index = index;
  EXPECT_THAT(table(IndexOutput::kTable),
              HasSubstr("NAME    DTYPE  SHAPE  SIZE  STRIDES  NOTE\n"
                        "plain   F32    [2,3]  24 B  -\n"
                        "view    F32    [2,3]  24 B  [1,2]\n"
                        "packed  F32    [2,3]  24 B  -        not mappable: its storage is "
                        "deflated\n"));
  EXPECT_THAT(table(IndexOutput::kTable), HasSubstr("STRIDED     1\n"));
  EXPECT_THAT(table(IndexOutput::kWide), HasSubstr("UNMAPPABLE  1  (its storage is deflated 1)\n"));
  EXPECT_THAT(table(IndexOutput::kWide), HasSubstr("OFFSET  ALIGN  STRIDES  FILE  NOTE"));
}

TEST_F(InspectTest, ALinkToAFolderIsNotEntered) {
  Put("v/a.gguf", GgufBuilder().Build());
  Link("..", "v/loop");
  EXPECT_EQ(Output(Path("v"), IndexOutput::kName), "");
}

TEST_F(InspectTest, AnUnwritableStreamIsAnError) {
  Put("m.gguf", GgufBuilder().Build());
  std::ostringstream out;
  std::ostringstream err;
  out.setstate(std::ios::badbit);
  EXPECT_EQ(InspectPath(Path("m.gguf"), {}, out, err), 1);
}

TEST_F(InspectTest, ManyTensorsComeOutWhole) {
  std::vector<std::string> names;
  for (int i = 0; i < 5000; ++i) names.push_back("tensor." + std::to_string(i));
  Put("m.safetensors", SmallSafetensors(names));
  const std::string lines = Output(Path("m.safetensors"), IndexOutput::kName);
  std::string expected;
  for (const std::string& name : names) expected += name + "\n";
  EXPECT_EQ(lines, expected);
}

TEST(GlobTest, MatchesLikeAShell) {
  for (const auto& [pattern, text] :
       std::vector<std::pair<std::string, std::string>>{{"", ""},
                                                        {"*", ""},
                                                        {"*", "a.b/c"},
                                                        {"a*c", "abc"},
                                                        {"a*c", "ac"},
                                                        {"a?c", "abc"},
                                                        {"[a-c]x", "bx"},
                                                        {"[!a-c]x", "dx"},
                                                        {"[]]", "]"},
                                                        {"[^a]", "b"},
                                                        {"a[", "a["},
                                                        {"*.w", "blk.0.w"},
                                                        {"*a*b*", "xaxbx"},
                                                        {"blk.[0-9].*", "blk.7.ffn"},
                                                        {"[a-]", "-"},
                                                        {"**", "x"}}) {
    EXPECT_TRUE(GlobMatches(pattern, text)) << pattern << " " << text;
  }
  for (const auto& [pattern, text] :
       std::vector<std::pair<std::string, std::string>>{{"", "a"},
                                                        {"a", ""},
                                                        {"a", "ab"},
                                                        {"a?", "a"},
                                                        {"[a-c]", "d"},
                                                        {"[!a]", "a"},
                                                        {"*b", "a"},
                                                        {"blk.[0-9].*", "blk.10.x"},
                                                        {"A", "a"},
                                                        {"a*c", "ab"}}) {
    EXPECT_FALSE(GlobMatches(pattern, text)) << pattern << " " << text;
  }
  std::string stars;
  for (int i = 0; i < 1000; ++i) stars += "*a";
  EXPECT_FALSE(GlobMatches(stars + "b", std::string(5000, 'a')));
}

}  // namespace
}  // namespace modelhost::modelctl
