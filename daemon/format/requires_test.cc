#include "daemon/format/requires.h"

#include <ctime>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

absl::StatusOr<Requirements> Parse(std::string_view text) {
  return ParseRequires("m.engine.requires.json", std::as_bytes(std::span(text)));
}

std::string RequirementRefusal(std::string_view text) {
  const auto parsed = Parse(text);
  return parsed.ok() ? "accepted" : std::string(parsed.status().message());
}

std::string ValueRefusal(std::string_view key, std::string_view value) {
  const absl::Status status = CheckRequirement(key, value);
  return status.ok() ? "accepted" : std::string(status.message());
}

TEST(RequiresTest, ASidecarIsAnObjectOfStrings) {
  auto parsed = Parse(R"({"tensorrt":"10.3.0", "compute_capability":"8.7, 8.9","note":"as text"})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_THAT(*parsed, ElementsAre(Pair("compute_capability", "8.7, 8.9"), Pair("note", "as text"),
                                   Pair("tensorrt", "10.3.0")));
  EXPECT_TRUE(Parse("{}").ok());
  EXPECT_THAT(RequirementRefusal("[]"), HasSubstr("m.engine.requires.json: "));
  EXPECT_THAT(RequirementRefusal(""), HasSubstr("an object of strings"));
  EXPECT_THAT(RequirementRefusal(R"({"tensorrt":10.3})"), HasSubstr("at byte"));
  EXPECT_THAT(RequirementRefusal(R"({"a":"1","a":"1"})"), HasSubstr("'a' is there twice"));
  EXPECT_THAT(RequirementRefusal(R"({"a":"1"} x)"), HasSubstr("at byte"));
  EXPECT_THAT(RequirementRefusal(R"({"A":"1"})"), HasSubstr("not a name"));
  EXPECT_THAT(RequirementRefusal(R"({"a":""})"), HasSubstr("not a value"));
  EXPECT_THAT(RequirementRefusal("{\"a\":\"x\\ny\"}"), HasSubstr("not a value"));
  EXPECT_THAT(RequirementRefusal("{\"a\":\"" + std::string(257, 'x') + "\"}"),
              HasSubstr("not a value"));
  EXPECT_THAT(RequirementRefusal(std::string(kMaxRequiresBytes + 1, ' ')),
              HasSubstr("longer than"));
}

TEST(RequiresTest, KnownKeysTakeOnlyWhatCanBeCompared) {
  for (const char* good : {"10.3.0", "10.3.0.26", "8.6+", "8.6.1+", "11.0+"}) {
    EXPECT_EQ(ValueRefusal("tensorrt", good), "accepted") << good;
  }
  for (const char* bad : {"10", "10.3", "10+", "v10.3.0", "10.3.x", "10.3.0 ", "1.2.3.4.5", "10..0",
                          "10.3.0,8.6.1", "10.3.99999999999"}) {
    EXPECT_THAT(ValueRefusal("tensorrt", bad), HasSubstr("as \"10.3.0\"")) << bad;
  }
  EXPECT_THAT(ValueRefusal("tensorrt", "8.5.2+"), HasSubstr("before 8.6"));
  for (const char* good : {"8.7", "8.7,8.9", "8.7 , 8.9", "8.0+", "12.0"}) {
    EXPECT_EQ(ValueRefusal("compute_capability", good), "accepted") << good;
  }
  for (const char* bad : {"87", "sm_87", "8.7,", "8.7;8.9", "8.7.1"}) {
    EXPECT_THAT(ValueRefusal("compute_capability", bad), HasSubstr("write \"8.7\"")) << bad;
  }
  for (const char* good : {"linux-x86_64", "linux-aarch64", "windows-x86_64"}) {
    EXPECT_EQ(ValueRefusal("platform", good), "accepted") << good;
  }
  for (const char* bad : {"linux", "-x", "linux-", "Linux-x86_64", "linux x86"}) {
    EXPECT_THAT(ValueRefusal("platform", bad), HasSubstr("linux-aarch64")) << bad;
  }
  EXPECT_EQ(ValueRefusal("cuda_driver", "12.4"), "accepted");
  EXPECT_THAT(ValueRefusal("cuda_driver", "550.54.14"), HasSubstr("CUDA version"));
  EXPECT_EQ(ValueRefusal("made_by", "trtexec of a friend"), "accepted");
}

TEST(RequiresTest, AFlagIsKeyAndValue) {
  EXPECT_THAT(*ParseRequirement("platform=linux-x86_64"), Pair("platform", "linux-x86_64"));
  EXPECT_THAT(*ParseRequirement("note=a=b"), Pair("note", "a=b"));
  EXPECT_THAT(std::string(ParseRequirement("tensorrt").status().message()), HasSubstr("KEY=VALUE"));
  EXPECT_FALSE(ParseRequirement("=x").ok());
  EXPECT_FALSE(ParseRequirement("note=").ok());
}

TEST(RequiresTest, SidecarsAreToldByTheirNames) {
  EXPECT_TRUE(IsRequiresFile("requires.json"));
  EXPECT_TRUE(IsRequiresFile("sub/requires.json"));
  EXPECT_TRUE(IsRequiresFile("sub/m.engine.requires.json"));
  for (const char* other :
       {".requires.json", "xrequires.json", "requires.json.bak", "config.json"}) {
    EXPECT_FALSE(IsRequiresFile(other)) << other;
  }
  EXPECT_EQ(RequiresSubject("sub/requires.json"), "");
  EXPECT_EQ(RequiresSubject("sub/m.engine.requires.json"), "sub/m.engine");
}

TEST(RequiresTest, TensorRtIsExactUnlessVersionCompatible) {
  EXPECT_TRUE(Fulfils("tensorrt", "10.3.0", "10.3.0"));
  EXPECT_FALSE(Fulfils("tensorrt", "8.0.0", "8.0.1"));  // The patch level is enough.
  EXPECT_FALSE(Fulfils("tensorrt", "10.3.0", "10.4.0"));
  EXPECT_TRUE(Fulfils("tensorrt", "10.3.0.26", "10.3.0"));
  EXPECT_FALSE(Fulfils("tensorrt", "10.3.0.26", "10.3.0.27"));
  EXPECT_TRUE(Fulfils("tensorrt", "8.6+", "8.6.0"));
  EXPECT_TRUE(Fulfils("tensorrt", "8.6+", "10.3.0"));
  EXPECT_FALSE(Fulfils("tensorrt", "8.6.1+", "8.6.0"));
  EXPECT_FALSE(Fulfils("tensorrt", "10.0+", "8.6.1"));
}

TEST(RequiresTest, OneOfTheGpusAndAtLeastTheDriver) {
  EXPECT_TRUE(Fulfils("compute_capability", "8.7,8.9", "8.9"));
  EXPECT_FALSE(Fulfils("compute_capability", "8.7", "8.9"));
  EXPECT_FALSE(Fulfils("compute_capability", "8.7", "8.70"));
  EXPECT_TRUE(Fulfils("compute_capability", "8.0+", "12.0"));
  EXPECT_FALSE(Fulfils("compute_capability", "8.0+", "7.5"));
  EXPECT_TRUE(Fulfils("cuda_driver", "12.4", "12.10"));
  EXPECT_FALSE(Fulfils("cuda_driver", "12.4", "12.3"));
  EXPECT_TRUE(Fulfils("platform", "linux-x86_64", "linux-x86_64"));
  EXPECT_FALSE(Fulfils("platform", "linux-x86_64", "linux-aarch64"));
  EXPECT_FALSE(Fulfils("tensorrt", "10.3.0", "who knows"));
}

TEST(RequiresTest, SourcesThatSpeakOfOneFileMustAgree) {
  const RequiresSource manifest{"manifest.json", "", {{"tensorrt", "10.3.0"}}};
  const RequiresSource all{"requires.json", "", {{"tensorrt", "8.6.1"}}};
  const RequiresSource one{"a.engine.requires.json", "a.engine", {{"tensorrt", "8.6.1"}}};
  const RequiresSource other{"b.engine.requires.json", "b.engine", {{"tensorrt", "10.3.0"}}};
  const auto text = [](std::vector<RequiresSource> sources) {
    return std::string(CheckAgreement(sources).message());
  };
  EXPECT_THAT(text({manifest, all}),
              AllOf(HasSubstr("'10.3.0' in manifest.json"), HasSubstr("'8.6.1' in requires.json")));
  EXPECT_THAT(text({manifest, one}), HasSubstr("a.engine.requires.json"));
  EXPECT_EQ(text({one, other}), "");  // Each of its own file.
  EXPECT_EQ(text({manifest, other}), "");
  EXPECT_TRUE(IsBound(std::vector{one}, "a.engine"));
  EXPECT_FALSE(IsBound(std::vector{one}, "b.engine"));
  EXPECT_TRUE(IsBound(std::vector{manifest}, "b.engine"));
  const RequiresSource note{"requires.json", "", {{"made_by", "x"}}};
  EXPECT_FALSE(IsBound(std::vector{note}, "b.engine"));
  EXPECT_THAT(UnknownRequirements(std::vector{note, manifest}),
              ElementsAre(HasSubstr("'made_by'")));
}

TEST(RequiresTest, OneValueWrittenInTwoWaysIsOneValue) {
  const auto text = [](const char* key, const char* a, const char* b) {
    const std::vector<RequiresSource> sources = {{"manifest.json", "", {{key, a}}},
                                                 {"a.requires.json", "a", {{key, b}}}};
    return std::string(CheckAgreement(sources).message());
  };
  EXPECT_EQ(text("compute_capability", "8.7,8.9", "8.9 , 8.7"), "");
  EXPECT_EQ(text("compute_capability", "8.7", "08.7"), "");
  EXPECT_NE(text("compute_capability", "8.7", "8.7+"), "");
  EXPECT_NE(text("compute_capability", "8.7,8.9", "8.7"), "");
  EXPECT_NE(text("made_by", "a,b", "b,a"), "");  // Nothing is known of it.
}

TEST(RequiresTest, ASidecarHasSoManyKeysAndNoMore) {
  const auto with = [](size_t keys) {
    std::string text = "{";
    for (size_t i = 0; i < keys; ++i) {
      text += (i == 0 ? "" : ",") + ("\"k" + std::to_string(i)) + "\":\"v\"";
    }
    return RequirementRefusal(text + "}");
  };
  EXPECT_EQ(with(kMostRequirements), "accepted");
  EXPECT_THAT(with(kMostRequirements + 1),
              AllOf(HasSubstr("m.engine.requires.json"), HasSubstr("more than 64 keys")));
}

TEST(RequiresTest, OneWarningNamesAFewOfManyUnknownKeys) {
  RequiresSource source{"requires.json", "", {{"tensorrt", "10.3.0"}}};
  for (int i = 0; i < 50; ++i) source.requirements["k" + std::to_string(i)] = "v";
  const auto texts = UnknownRequirements(std::vector{source});
  ASSERT_THAT(texts, ElementsAre(AllOf(HasSubstr("'k0' = 'v'"), HasSubstr("47 more"))));
  EXPECT_LT(texts[0].size(), 300u);
}

// Quadratic, this would compare 200 million pairs.
TEST(RequiresTest, AgreementOfManySourcesTakesTimeInProportion) {
  std::vector<RequiresSource> sources;
  for (int i = 0; i < 20'000; ++i) {
    const std::string file = "f" + std::to_string(i);
    sources.push_back({file + ".requires.json", file, {{"tensorrt", "10.3.0"}}});
  }
  const std::clock_t begin = std::clock();
  EXPECT_TRUE(CheckAgreement(sources).ok());
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 2.0);
  sources.push_back({"f7.again", "f7", {{"tensorrt", "8.6.1"}}});
  EXPECT_THAT(std::string(CheckAgreement(sources).message()),
              AllOf(HasSubstr("f7.requires.json"), HasSubstr("f7.again")));
}

}  // namespace
}  // namespace modelhost
