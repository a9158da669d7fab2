#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::MemoryFiles;
using testing::SmallSafetensors;

constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kShard1[] = "model-00001-of-00002.safetensors";
constexpr char kShard2[] = "model-00002-of-00002.safetensors";

std::string Map(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out = "{\"weight_map\":{";
  for (const auto& [tensor, file] : entries) {
    absl::StrAppend(&out, out.back() == '{' ? "" : ",", "\"", tensor, "\":\"", file, "\"");
  }
  return out + "}}";
}

// Two shards with a, b and c, d; `index` is the text of the index.
MemoryFiles Files(std::string index) {
  return MemoryFiles({{kIndex, std::move(index)},
                      {kShard1, SmallSafetensors({"a", "b"})},
                      {kShard2, SmallSafetensors({"c", "d"})}});
}

std::string GoodMap() {
  return Map({{"a", kShard1}, {"b", kShard1}, {"c", kShard2}, {"d", kShard2}});
}

std::string Refusal(MemoryFiles files) {
  auto index = ReadModel(kIndex, files);
  if (index.ok()) return "accepted";
  EXPECT_TRUE(absl::IsInvalidArgument(index.status()) || absl::IsUnimplemented(index.status()))
      << index.status();
  return std::string(index.status().message());
}

TEST(ShardedTest, IndexesTheTensorsOfAllShards) {
  MemoryFiles files = Files(GoodMap());
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "safetensors");
  EXPECT_THAT(index->files(), ElementsAre(kIndex, kShard1, kShard2));
  ASSERT_EQ(index->size(), 4u);
  EXPECT_EQ(index->at(0).name, "a");
  EXPECT_EQ(index->at(0).file, 1u);
  EXPECT_EQ(index->at(3).name, "d");
  EXPECT_EQ(index->at(3).file, 2u);
  EXPECT_THAT(index->warnings(), IsEmpty());
}

TEST(ShardedTest, ShardsMayBeCheckpoints) {
  const auto checkpoint = [](const std::string& name) {
    namespace pk = testing::pickled;
    return testing::Checkpoint(pk::Whole(pk::Dict({{pk::Text(name), pk::Four()}})),
                               {{"0", std::string(16, 'd')}})
        .Build();
  };
  const std::string one = "pytorch_model-00001-of-00002.bin";
  const std::string two = "pytorch_model-00002-of-00002.bin";
  MemoryFiles files({{"pytorch_model.bin.index.json", Map({{"a", one}, {"b", two}})},
                     {one, checkpoint("a")},
                     {two, checkpoint("b")}});
  auto index = ReadModel("pytorch_model.bin.index.json", files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->format(), "torch");
  ASSERT_EQ(index->size(), 2u);
  EXPECT_EQ(index->at(0).file, 1u);
  EXPECT_EQ(index->at(1).name, "b");
  EXPECT_EQ(index->at(1).file, 2u);

  const auto refusal = [&](const std::string& bytes) {
    files.Put(two, bytes);
    auto bad = ReadModel("pytorch_model.bin.index.json", files);
    return bad.ok() ? "accepted" : std::string(bad.status().message());
  };
  EXPECT_THAT(refusal(checkpoint("c")), HasSubstr("weight_map puts tensor 'b' into"));
  EXPECT_THAT(refusal(checkpoint("a")), HasSubstr("tensor 'a' occurs twice"));
  EXPECT_THAT(refusal(SmallSafetensors({"b"})),
              HasSubstr("a shard of the kind safetensors, where the first is torch"));
  EXPECT_THAT(refusal(checkpoint("b").substr(1)), HasSubstr(two + ": "));
  EXPECT_EQ(refusal(checkpoint("b")), "accepted");
}

TEST(ShardedTest, IsFoundByContentUnderAnyNameAndInASubfolder) {
  MemoryFiles files({{"sub/set.json", GoodMap()},
                     {std::string("sub/") + kShard1, SmallSafetensors({"a", "b"})},
                     {std::string("sub/") + kShard2, SmallSafetensors({"c", "d"})}});
  auto index = ReadModel("sub/set.json", files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->files()[2], std::string("sub/") + kShard2);
}

TEST(ShardedTest, WhitespaceAndUnknownKeysDoNotMatter) {
  MemoryFiles files =
      Files(" {\n \"x\": [1, {}], \"metadata\": {\"total_size\": 16, \"y\": \"z\"}, " +
            GoodMap().substr(1));
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->warnings(), IsEmpty());
  ASSERT_EQ(index->metadata().size(), 2u);
  EXPECT_EQ(index->metadata()[0].value, "16");
  EXPECT_EQ(index->metadata()[1].value, "z");
}

TEST(ShardedTest, WrongTotalSizeIsAWarning) {
  for (const char* total : {"17", "\"many\"", "null", "1e99"}) {
    MemoryFiles files =
        Files(absl::StrCat("{\"metadata\":{\"total_size\":", total, "},", GoodMap().substr(1)));
    auto index = ReadModel(kIndex, files);
    ASSERT_TRUE(index.ok()) << index.status();
    EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("total_size"))) << total;
  }
  for (const char* total : {"16", "16.0", "1.6e1"}) {
    MemoryFiles files =
        Files(absl::StrCat("{\"metadata\":{\"total_size\":", total, "},", GoodMap().substr(1)));
    EXPECT_THAT(ReadModel(kIndex, files)->warnings(), IsEmpty()) << total;
  }
}

TEST(ShardedTest, TensorsOutsideTheMapAreWarnings) {
  MemoryFiles files = Files(Map({{"a", kShard1}, {"c", kShard2}, {"d", kShard2}}));
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->warnings(), ElementsAre(HasSubstr("tensor 'b' is not in the weight_map")));
}

TEST(ShardedTest, WarningsAreBounded) {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back(absl::StrCat("t", i));
  MemoryFiles files({{kIndex, Map({{"t0", kShard1}})}, {kShard1, SmallSafetensors(names)}});
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->warnings().size(), 101u);
  EXPECT_THAT(index->warnings().back(), HasSubstr("899 more"));
}

TEST(ShardedTest, StrayFilesAreNoPartOfTheSet) {
  MemoryFiles files = Files(GoodMap());
  files.Put("model.safetensors", SmallSafetensors({"a", "stray"}));
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->size(), 4u);
}

TEST(ShardedTest, MissingShardsAreListed) {
  MemoryFiles files({{kIndex, Map({{"a", kShard1}, {"c", kShard2}})}});
  EXPECT_THAT(Refusal(files), ::testing::AllOf(HasSubstr(kShard1), HasSubstr(kShard2)));
  std::vector<std::pair<std::string, std::string>> many;
  for (int i = 0; i < 500; ++i) many.emplace_back(absl::StrCat("t", i), absl::StrCat("f", i));
  EXPECT_THAT(Refusal(MemoryFiles({{kIndex, Map(many)}})), HasSubstr("and 492 more"));
}

TEST(ShardedTest, AnErrorOfTheSourceKeepsItsCodeAndNamesTheIndex) {
  class Denying : public FileSource {
   public:
    absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
      if (name != kIndex) return absl::PermissionDeniedError(name + ": no");
      return std::as_bytes(std::span<const char>(map));
    }
    std::string map = Map({{"a", kShard1}});
  };
  Denying source;
  const absl::Status status = ReadModel(kIndex, source).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(::testing::StartsWith(kIndex + std::string(": weight_map names")),
                               HasSubstr(kShard1 + std::string(": no (it has to be"))));
}

TEST(ShardedTest, ShardNamesThatAreNotUtf8AreRefused) {
  EXPECT_THAT(Refusal(Files(Map({{"a", "n\xff.safetensors"}}))), HasSubstr("UTF-8"));
  EXPECT_NE(Refusal(Files(Map({{"a", "n\\ud800.safetensors"}}))), "accepted");
}

TEST(ShardedTest, TheMapMustAgreeWithTheShards) {
  EXPECT_THAT(Refusal(Files(Map({{"a", kShard1}, {"c", kShard2}, {"lm_head", kShard2}}))),
              ::testing::AllOf(HasSubstr("lm_head"), HasSubstr(kShard2)));
  EXPECT_THAT(Refusal(Files(Map({{"a", kShard1}, {"b", kShard2}}))),
              ::testing::AllOf(HasSubstr("'b'"), HasSubstr("but it is in")));
}

TEST(ShardedTest, NoTensorMayBeInTwoShards) {
  MemoryFiles files = Files(GoodMap());
  files.Put(kShard2, SmallSafetensors({"c", "d", "a"}));
  EXPECT_THAT(Refusal(files), ::testing::AllOf(HasSubstr("'a' occurs twice"), HasSubstr(kShard1),
                                               HasSubstr(kShard2)));
}

TEST(ShardedTest, ShardNamesMayNotLeaveTheFolder) {
  for (const std::string name :
       {"../x.safetensors", "/etc/passwd", "..", ".", "", "a/../../x", "a//b", "./a", "a/",
        "..\\\\x.safetensors", "c:\\\\x", "x\\u0000y", "a/./b"}) {
    EXPECT_THAT(Refusal(Files(Map({{"a", name}}))), HasSubstr("no plain name")) << name;
  }
}

TEST(ShardedTest, RefusesAMalformedIndex) {
  for (const std::string& text :
       {std::string("{}"), std::string("{\"weight_map\":null}"), std::string("{\"weight_map\":[]}"),
        std::string("{\"weight_map\":\"x\"}"), std::string("{\"weight_map\":{\"a\":1}}"),
        std::string("{\"weight_map\":{\"a\":null}}"),
        std::string("{\"weight_map\":{\"a\":[\"x\"]}}"), std::string("[]"), std::string("null"),
        std::string("not json"), GoodMap() + "x", GoodMap().substr(0, GoodMap().size() - 1),
        GoodMap().substr(0, 20), "{\"weight_map\":{}," + GoodMap().substr(1),
        "\xef\xbb\xbf" + GoodMap(), "{\"metadata\":{\"a\":1,\"a\":2}," + GoodMap().substr(1)}) {
    EXPECT_NE(Refusal(Files(text)), "accepted") << text;
  }
  EXPECT_THAT(Refusal(Files(Map({{"a", kShard1}, {"a", kShard1}}))), HasSubstr("duplicate key"));
  EXPECT_THAT(Refusal(Files(Map({{"a", kShard1}, {"\\u0061", kShard2}}))),
              HasSubstr("duplicate key"));
}

TEST(ShardedTest, ABadShardIsNamed) {
  MemoryFiles files = Files(GoodMap());
  files.Put(kShard2, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
  EXPECT_THAT(Refusal(files), ::testing::AllOf(HasSubstr(kShard2), HasSubstr("Git LFS")));
  files.Put(kShard2, SmallSafetensors({"c", "d"}).substr(0, 100));
  EXPECT_THAT(Refusal(files), HasSubstr(kShard2));
  files.Put(kShard2, "");
  EXPECT_THAT(Refusal(files), HasSubstr(kShard2));
  files.Put(kShard2, GoodMap());
  EXPECT_THAT(Refusal(files), HasSubstr(kShard2));
}

TEST(ShardedTest, AnIndexThatNamesItselfIsRefused) {
  EXPECT_THAT(Refusal(Files(Map({{"a", kIndex}}))), HasSubstr(kIndex));
}

TEST(ShardedTest, ShardsThatDisagreeAboutMetadataAreReported) {
  const auto shard = [](const std::string& name, const std::string& format) {
    return testing::Safetensors("{\"__metadata__\":{\"format\":\"" + format + "\"}," +
                                    testing::TensorJson(name, "U8", "[1]", 0, 1) + "}",
                                1);
  };
  MemoryFiles files({{kIndex, Map({{"a", kShard1}, {"c", kShard2}})},
                     {kShard1, shard("a", "pt")},
                     {kShard2, shard("c", "pt")}});
  EXPECT_THAT(ReadModel(kIndex, files)->warnings(), IsEmpty());
  files.Put(kShard2, shard("c", "np"));
  auto index = ReadModel(kIndex, files);
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_THAT(index->warnings(), Contains(HasSubstr("disagree")));
  ASSERT_EQ(index->metadata().size(), 1u);
  EXPECT_EQ(index->metadata()[0].value, "pt");
}

}  // namespace
}  // namespace modelhost
