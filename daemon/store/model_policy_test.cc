#include "daemon/store/model_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "daemon/store/model_toml_edit.h"

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

TEST(ModelPolicyTest, ADeviceIsRefusedForWantOfADeviceTier) {
  for (const char* device : {"\"all\"", "\"GPU-1234\"", "{ gpu = \"GPU-1\", tensors = [\"a\"] }"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("device = ", device)), HasSubstr("no device tier"));
  }
  EXPECT_THAT(ErrorOf("device = \"cuda:0\""), HasSubstr("expected \"none\""));
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
