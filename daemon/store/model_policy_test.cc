#include "daemon/store/model_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "daemon/store/model_toml_edit.h"
#include "daemon/store/name_patterns.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const absl::Status status = ParseModelToml(text, "model.toml").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(ModelPolicyTest, ReadsEveryKey) {
  auto policy = ParseModelToml(R"(
residency = "sealed"
huge_pages = "off"
device = "none"
required = true
keep_previous = "1h30m"
keep_on_disk = 3
requires_files = ["tokenizer.json", "sub/config.json"]
read_groups = ["robots", "1001"]
on_drain_deadline = "release"
drain_timeout = "90s"
)",
                               "model.toml");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->residency, Residency::kSealed);
  EXPECT_EQ(policy->huge_pages_auto, false);
  EXPECT_EQ(policy->device, DevicePolicy{});
  EXPECT_EQ(policy->required, true);
  EXPECT_EQ(policy->keep_previous, absl::Minutes(90));
  EXPECT_EQ(policy->keep_on_disk, 3);
  EXPECT_THAT(*policy->requires_files, ElementsAre("tokenizer.json", "sub/config.json"));
  EXPECT_THAT(*policy->read_groups, ElementsAre("robots", "1001"));
  EXPECT_EQ(policy->on_drain_deadline, "release");
  EXPECT_EQ(policy->drain_timeout, absl::Seconds(90));
}

TEST(ModelPolicyTest, AnEmptyTextSetsNothing) {
  auto policy = ParseModelToml("", "model.toml");
  ASSERT_TRUE(policy.ok());
  EXPECT_FALSE(policy->residency.has_value());
  EXPECT_FALSE(policy->read_groups.has_value());
}

TEST(ModelPolicyTest, UnknownKeysAreNamedWithFileAndLine) {
  EXPECT_THAT(ErrorOf("required = true\nresidence = \"warm\"\n"),
              HasSubstr("model.toml:2: key 'residence': unknown"));
}

TEST(ModelPolicyTest, WrongTypesSayWhatIsExpected) {
  EXPECT_THAT(ErrorOf("required = \"yes\""), HasSubstr("expected true or false, found a string"));
  EXPECT_THAT(ErrorOf("residency = 1"), HasSubstr("expected a string, found an integer"));
  EXPECT_THAT(ErrorOf("read_groups = \"a\""), HasSubstr("expected an array of strings"));
  EXPECT_THAT(ErrorOf("read_groups = [1]"), HasSubstr("found an integer in it"));
}

TEST(ModelPolicyTest, WrongValuesAreRefused) {
  EXPECT_THAT(ErrorOf("residency = \"hot\""), HasSubstr("'hot'"));
  EXPECT_THAT(ErrorOf("keep_previous = \"10\""), HasSubstr("expected a duration"));
  EXPECT_THAT(ErrorOf("keep_on_disk = -1"), HasSubstr("key 'keep_on_disk'"));
  EXPECT_THAT(ErrorOf("requires_files = [\"../x\"]"), HasSubstr("'../x'"));
  EXPECT_THAT(ErrorOf("on_drain_deadline = \"kill\""), HasSubstr("\"release\""));
}

DevicePolicy DeviceOf(const std::string& value) {
  const auto policy = ParseModelToml(absl::StrCat("device = ", value), "model.toml");
  EXPECT_TRUE(policy.ok()) << policy.status();
  return policy.ok() ? policy->device.value_or(DevicePolicy{}) : DevicePolicy{};
}

TEST(ModelPolicyTest, ADeviceIsNoneAllOneGpuOrSomeTensors) {
  EXPECT_EQ(DeviceOf("\"none\""), DevicePolicy{});
  EXPECT_EQ(DeviceOf("\"all\""), (DevicePolicy{true, "", {}}));
  EXPECT_EQ(DeviceOf("\"GPU-12ab-34\""), (DevicePolicy{true, "GPU-12ab-34", {}}));
  EXPECT_EQ(DeviceOf("{ gpu = \"GPU-1\", tensors = [\"blk.[0-9].*\", 'out\\..*'] }"),
            (DevicePolicy{true, "GPU-1", {"blk.[0-9].*", "out\\..*"}}));
  EXPECT_EQ(DeviceOf("{ tensors = [\"a\"] }"), (DevicePolicy{true, "", {"a"}}));
  EXPECT_EQ(DeviceOf("{ gpu = \"all\" }"), (DevicePolicy{true, "", {}}));
}

TEST(ModelPolicyTest, ABadDeviceIsRefusedWithFileLineAndKey) {
  const auto refused = [](const std::string& value) {
    return ErrorOf(absl::StrCat("required = true\ndevice = ", value));
  };
  EXPECT_THAT(refused("\"cuda:0\""), HasSubstr("model.toml:2: key 'device': expected \"none\""));
  EXPECT_THAT(refused("\"GPU-\""), HasSubstr("expected \"none\""));
  EXPECT_THAT(refused(absl::StrCat("\"GPU-", std::string(44, 'a'), "\"")), HasSubstr("expected"));
  EXPECT_THAT(refused("\"GPU-a b\""), HasSubstr("expected \"none\""));
  EXPECT_THAT(refused("1"), HasSubstr("key 'device': expected a string, found an integer"));
  EXPECT_THAT(refused("{}"), HasSubstr("key 'device': says neither gpu nor tensors"));
  EXPECT_THAT(refused("{ gpus = \"all\" }"),
              HasSubstr("model.toml:2: key 'device.gpus': unknown (known here are gpu, tensors)"));
  EXPECT_THAT(refused("{ gpu = \"none\" }"), HasSubstr("key 'device.gpu': 'none': expected"));
  EXPECT_THAT(refused("{ gpu = 0 }"), HasSubstr("key 'device.gpu': expected a string"));
  EXPECT_THAT(refused("{ tensors = [] }"), HasSubstr("key 'device.tensors': no pattern"));
  EXPECT_THAT(refused("{ tensors = \"a\" }"), HasSubstr("expected an array of strings"));
  EXPECT_THAT(refused("{ tensors = [\"a\", \"b[\"] }"),
              HasSubstr("key 'device.tensors': 'b[': not a regular expression: missing ]"));
  EXPECT_THAT(refused("{ tensors = [\"(((((a{1000}){1000})))){1000}\"] }"),
              HasSubstr("not a regular expression"));
}

TEST(ModelPolicyTest, ADeviceIsWrittenAsTomlReadsIt) {
  EXPECT_EQ(DevicePolicyText({}), "\"none\"");
  EXPECT_EQ(DevicePolicyText({true, "", {}}), "\"all\"");
  EXPECT_EQ(DevicePolicyText({true, "GPU-1", {}}), "\"GPU-1\"");
  const DevicePolicy odd{true, "", {"a\\.b", "\"\t\x7f", "\xC3\xA4"}};
  EXPECT_EQ(DevicePolicyText(odd),
            "{ gpu = \"all\", tensors = [\"a\\\\.b\", \"\\\"\\u0009\\u007f\", \"\xC3\xA4\"] }");
  EXPECT_EQ(DeviceOf(DevicePolicyText(odd)), odd);
}

TEST(ModelPolicyTest, TheOverridingSideHasTheWholeDevice) {
  ModelPolicy base;
  base.device = DevicePolicy{true, "GPU-1", {"a"}};
  EXPECT_EQ(Resolve(base, {}).device, *base.device);
  ModelPolicy over;
  over.device = DevicePolicy{true, "GPU-2", {}};
  EXPECT_EQ(Resolve(base, over).device, *over.device);
  over.device = DevicePolicy{};
  EXPECT_FALSE(Resolve(base, over).device.wanted);
}

TEST(NamePatternsTest, APatternMatchesTheWholeName) {
  const auto patterns = NamePatterns::Compile({"blk.[0-9].*", "out"});
  ASSERT_TRUE(patterns.ok()) << patterns.status();
  EXPECT_TRUE(patterns->Matches(0, "blk.7.weight"));
  EXPECT_FALSE(patterns->Matches(0, "a.blk.7.weight"));
  EXPECT_TRUE(patterns->Matches(1, "out"));
  EXPECT_FALSE(patterns->Matches(1, "output"));
  EXPECT_FALSE(patterns->Matches(0, std::string_view("blk.7.\xff", 7)));  // No UTF-8, no match.
}

TEST(ModelPolicyTest, SyntaxErrorsNameTheLine) {
  EXPECT_THAT(ErrorOf("required = true\n=\n"), HasSubstr("model.toml:2: "));
}

TEST(ModelPolicyTest, KeysNestedWithoutEndAreRefused) {
  std::string key = "a";
  for (int i = 0; i < 100000; ++i) key += ".a";
  EXPECT_THAT(ErrorOf(absl::StrCat(key, " = 1")), HasSubstr("dots"));
  EXPECT_FALSE(ParseModelToml(absl::StrCat("a = ", std::string(10000, '[')), "f").ok());
}

TEST(ModelPolicyTest, TheOverridingSideWinsKeyByKey) {
  ModelPolicy base;
  base.residency = Residency::kWarm;
  base.required = true;
  ModelPolicy over;
  over.residency = Residency::kMapped;
  over.keep_on_disk = 2;
  const EffectivePolicy policy = Resolve(base, over);
  EXPECT_EQ(policy.residency, Residency::kMapped);
  EXPECT_TRUE(policy.required);
  EXPECT_EQ(policy.keep_on_disk, 2);
  EXPECT_EQ(policy.keep_previous, absl::Minutes(10));
  EXPECT_FALSE(policy.read_groups.has_value());
}

TEST(UnitsTest, SizesHaveBinaryUnits) {
  EXPECT_EQ(ParseBytes("4096").value(), 4096u);
  EXPECT_EQ(ParseBytes("12GiB").value(), uint64_t{12} << 30);
  EXPECT_EQ(ParseBytes("1.5 GiB").value(), uint64_t{3} << 29);
  EXPECT_EQ(ParseBytes("128MiB").value(), uint64_t{128} << 20);
  EXPECT_EQ(ParseBytes("18446744073709551615").value(), UINT64_MAX);
  for (const char* bad : {"", "GiB", "12GB", "-1", "1.5", "1..5GiB", "0x10", "18446744073709551616",
                          "99999999999TiB", "1 2", "999999999999999999999"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
}

TEST(UnitsTest, DurationsNeedAUnit) {
  EXPECT_EQ(ParseDuration("90s").value(), absl::Seconds(90));
  EXPECT_EQ(ParseDuration("1h30m").value(), absl::Minutes(90));
  EXPECT_EQ(ParseDuration("500ms").value(), absl::Milliseconds(500));
  for (const char* bad : {"", "10", "-5s", "inf", "10 minutes"}) {
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
  }
}

std::string Edited(const std::string& text) {
  auto edited = WithResidency(text, "model.toml", Residency::kSealed);
  EXPECT_TRUE(edited.ok()) << edited.status();
  return edited.ok() ? *edited : "";
}

TEST(ModelTomlEditTest, AddsTheKeyAtTheTop) {
  EXPECT_EQ(Edited(""), "residency = \"sealed\"\n");
  EXPECT_EQ(Edited("# mine\nrequired = true\n"),
            "residency = \"sealed\"\n# mine\nrequired = true\n");
}

TEST(ModelTomlEditTest, ChangesTheValueAndNothingElse) {
  EXPECT_EQ(Edited("required = true # \xC3\xA4\n  residency   = 'warm'  # why\nkeep_on_disk = 2"),
            "required = true # \xC3\xA4\n  residency   = \"sealed\"  # why\nkeep_on_disk = 2");
  EXPECT_EQ(Edited("\"residency\" = \"\"\"warm\"\"\"\n"), "\"residency\" = \"sealed\"\n");
}

TEST(ModelTomlEditTest, ABrokenFileIsLeftAlone) {
  EXPECT_FALSE(WithResidency("residency = \"hot\"", "f", Residency::kWarm).ok());
  EXPECT_FALSE(WithResidency("what = 1", "f", Residency::kWarm).ok());
}

}  // namespace
}  // namespace modelhost
