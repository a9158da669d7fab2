// What a version requires of its machine, compared by itself and by a load.
#include "daemon/region/requires_check.h"

#include <gmock/gmock.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/region/loader_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

MachineFacts Jetson() {
  MachineFacts facts;
  facts.platform = {{"linux-aarch64"}, "uname", ""};
  facts.tensorrt = {{"10.3.0"}, "/usr/lib/libnvinfer.so.10.3.0", ""};
  facts.compute_capability = {{"8.7"}, "libcuda.so.1", ""};
  facts.cuda_driver = {{"12.6"}, "libcuda.so.1", ""};
  return facts;
}

std::string Verdict(const Requirements& requirements, const MachineFacts& machine) {
  const RequiresSource source{"manifest.json", "", requirements};
  const absl::Status status = CheckRequires("m@1", std::span(&source, 1), machine);
  if (status.ok()) return "fits";
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(CheckRequiresTest, AMachineThatFulfilsAllFits) {
  EXPECT_EQ(Verdict({{"platform", "linux-aarch64"},
                     {"tensorrt", "10.3.0"},
                     {"compute_capability", "8.6, 8.7"},
                     {"cuda_driver", "12.4"}},
                    Jetson()),
            "fits");
  EXPECT_EQ(Verdict({}, MachineFacts()), "fits");
  EXPECT_EQ(Verdict({{"colour", "red"}}, MachineFacts()), "fits");  // A warning elsewhere.
}

TEST(CheckRequiresTest, EveryDifferenceShowsBothSides) {
  const std::string text = Verdict({{"platform", "linux-x86_64"},
                                    {"tensorrt", "10.4.0"},
                                    {"compute_capability", "8.9"},
                                    {"cuda_driver", "13.0"}},
                                   Jetson());
  EXPECT_THAT(text,
              AllOf(HasSubstr("platform must be linux-x86_64 (manifest.json) and is "
                              "linux-aarch64 (uname)"),
                    HasSubstr("tensorrt must be 10.4.0 (manifest.json) and is 10.3.0 "
                              "(/usr/lib/libnvinfer.so.10.3.0)"),
                    HasSubstr("compute_capability must be 8.9 (manifest.json) and is 8.7"),
                    HasSubstr("cuda_driver must be 13.0 or newer (manifest.json) and is 12.6"),
                    HasSubstr("build it again for this machine")));
  EXPECT_THAT(Verdict({{"platform", "linux-x86_64"}, {"tensorrt", "10.3.0"}}, Jetson()),
              AllOf(HasSubstr("machine.platform"), Not(HasSubstr("tensorrt"))));
}

TEST(CheckRequiresTest, OfSeveralOnTheMachineOneIsEnough) {
  MachineFacts two = Jetson();
  two.compute_capability.values = {"7.5", "8.9"};
  two.tensorrt.values = {"8.6.1", "10.3.0"};
  EXPECT_EQ(Verdict({{"compute_capability", "8.9"}, {"tensorrt", "8.6.1"}}, two), "fits");
  EXPECT_THAT(Verdict({{"compute_capability", "8.7"}}, two), HasSubstr("and is 7.5, 8.9"));
}

TEST(CheckRequiresTest, WhatIsNotKnownOfTheMachineIsRefusedAndSaysHowToSayIt) {
  MachineFacts blind = Jetson();
  blind.tensorrt = {{}, "", "no libnvinfer.so.X.Y.Z where the dynamic linker looks"};
  EXPECT_THAT(Verdict({{"tensorrt", "10.3.0"}}, blind),
              AllOf(HasSubstr("tensorrt must be 10.3.0"), HasSubstr("is not known: no libnvinfer"),
                    HasSubstr("set machine.tensorrt in modelhostd.toml"),
                    HasSubstr("`modelctl load m@1`")));
}

TEST(CheckRequiresTest, WhatFittedOnceIsRefusedForWhatIsKnownOnly) {
  const RequiresSource source{
      "manifest.json", "", {{"tensorrt", "10.3.0"}, {"compute_capability", "8.7"}}};
  const auto sources = std::span(&source, 1);
  EXPECT_TRUE(CheckStillFits("m@1", sources, Jetson()).ok());
  EXPECT_TRUE(CheckStillFits("m@1", sources, MachineFacts()).ok());
  MachineFacts other = Jetson();
  other.tensorrt.values = {"10.4.0"};
  other.compute_capability = {{}, "", "the driver hangs"};
  const std::string text(CheckStillFits("m@1", sources, other).message());
  EXPECT_THAT(text, AllOf(HasSubstr("10.3.0"), HasSubstr("10.4.0"), Not(HasSubstr("hangs"))));
}

TEST(CheckRequiresTest, AValueThatCannotBeComparedIsMalformed) {
  const RequiresSource source{"manifest.json", "", {{"tensorrt", "ten"}}};
  const absl::Status status = CheckRequires("m@1", std::span(&source, 1), Jetson());
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("manifest.json: tensorrt"));
}

std::string PlanBytes() {
  std::string plan("ptrt\x61\0\0\0\xd5\0\0\0\x10\0\0\0\0\0\0\0\0\0\0\0", 24);
  return plan + std::string(16, '\x9c');
}

class BoundVersionTest : public LoaderTest {
 protected:
  std::string RefusalOf(uint64_t number) {
    auto loaded = Load(number, Residency::kPinned);
    if (loaded.ok()) return "loaded";
    code_ = loaded.status().code();
    EXPECT_EQ(host_->reserved(), 0U);  // Nothing was booked, so nothing was read.
    return std::string(loaded.status().message());
  }
  absl::StatusCode code_ = absl::StatusCode::kOk;
};

TEST_F(BoundVersionTest, AMismatchIsRefusedBeforeAnythingIsMapped) {
  machine_.facts = Jetson();
  MakeVersion(1, {{"m.engine", PlanBytes()}}, {{"platform", "linux-x86_64"}});
  os_.Before("Populate", [] { ADD_FAILURE() << "a byte was read"; });
  EXPECT_THAT(RefusalOf(1), AllOf(HasSubstr("m@1: not for this machine"), HasSubstr("linux-x86_64"),
                                  HasSubstr("linux-aarch64")));
  EXPECT_EQ(code_, absl::StatusCode::kFailedPrecondition);
}

TEST_F(BoundVersionTest, AMatchIsServedWithoutAWarning) {
  machine_.facts = Jetson();
  MakeVersion(1, {{"m.engine", PlanBytes()}, {"m.engine.requires.json", R"({"tensorrt":"8.6+"})"}},
              {{"platform", "linux-aarch64"}});
  auto loaded = Load(1, Residency::kPinned);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ((*loaded)->format, "tensorrt");
  EXPECT_EQ((*loaded)->tensor_count, 0U);
  EXPECT_THAT((*loaded)->requirements,
              ElementsAre(Pair("m.engine: tensorrt", "8.6+"), Pair("platform", "linux-aarch64")));
  EXPECT_THAT((*loaded)->report.warnings, IsEmpty());
}

TEST_F(BoundVersionTest, APlanWithoutABindingIsServedWithAWarningAndNobodyIsAsked) {
  MakeVersion(1, {{"m.engine", PlanBytes()}});
  MakeVersion(2, {{"m.engine", PlanBytes()}}, {{"made_by", "us"}});
  MakeVersion(3, {{"m.safetensors", Weights(1000, 1)}});
  auto loaded = Load(1, Residency::kPinned);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT((*loaded)->report.warnings, Contains(HasSubstr("nothing was compared")));
  EXPECT_EQ(machine_.looks, 0);
  auto noted = Load(2, Residency::kPinned);
  ASSERT_TRUE(noted.ok()) << noted.status();
  EXPECT_THAT((*noted)->report.warnings, Contains(HasSubstr("'made_by'")));
  EXPECT_THAT((*noted)->report.warnings, Contains(HasSubstr("nothing was compared")));
  auto weights = Load(3, Residency::kPinned);
  ASSERT_TRUE(weights.ok());
  EXPECT_THAT((*weights)->report.warnings, IsEmpty());
}

TEST_F(BoundVersionTest, ASidecarBindsAsTheManifestDoes) {
  machine_.facts = Jetson();
  MakeVersion(1, {{"m.engine", PlanBytes()}, {"requires.json", R"({"compute_capability":"9.0"})"}});
  MakeVersion(2, {{"sub/m.engine", PlanBytes()},
                  {"sub/m.engine.requires.json", R"({"compute_capability":"9.0"})"}});
  EXPECT_THAT(RefusalOf(1), HasSubstr("compute_capability must be 9.0 (requires.json) and is 8.7"));
  EXPECT_THAT(RefusalOf(2), HasSubstr("(sub/m.engine.requires.json)"));
}

TEST_F(BoundVersionTest, SourcesThatContradictEachOtherAreRefusedShowingBoth) {
  machine_.facts = Jetson();
  MakeVersion(1, {{"m.engine", PlanBytes()}, {"requires.json", R"({"tensorrt":"8.6.1"})"}},
              {{"tensorrt", "10.3.0"}});
  EXPECT_THAT(RefusalOf(1),
              AllOf(HasSubstr("'10.3.0' in manifest.json"), HasSubstr("'8.6.1' in requires.json")));
  EXPECT_EQ(code_, absl::StatusCode::kFailedPrecondition);
  MakeVersion(2, {{"m.engine", PlanBytes()}, {"n.engine.requires.json", "{}"}});
  EXPECT_THAT(RefusalOf(2), HasSubstr("speaks of n.engine, which the version does not have"));
}

TEST_F(BoundVersionTest, AMalformedOrChangedSidecarIsRefused) {
  MakeVersion(1, {{"m.engine", PlanBytes()}, {"requires.json", R"({"tensorrt":10})"}});
  EXPECT_THAT(RefusalOf(1), HasSubstr("requires.json: at byte"));
  EXPECT_EQ(code_, absl::StatusCode::kInvalidArgument);
  // Whatever is verified of the weights.
  loader_ = MakeLoader({.verify = VerifyPolicy::kNone});
  machine_.facts = Jetson();
  MakeVersion(2, {{"m.engine", PlanBytes()}, {"requires.json", R"({"tensorrt":"9.9.9"})"}});
  Overwrite(PathOf(2, "requires.json"), 0, R"({"tensorrt":"9.3.0"})");
  EXPECT_THAT(RefusalOf(2), HasSubstr("requires.json: has sha256"));
  EXPECT_EQ(code_, absl::StatusCode::kDataLoss);
}

TEST_F(BoundVersionTest, SoManySidecarsAndNoMoreAreRead) {
  std::map<std::string, std::string> files = {{"m.engine", PlanBytes()}};
  for (size_t i = 0; i < kMostRequiresFiles; ++i) {
    files[absl::StrCat("d", i, "/requires.json")] = R"({"platform":"linux-aarch64"})";
  }
  machine_.facts = Jetson();
  MakeVersion(1, files);
  EXPECT_EQ(RefusalOf(1), "loaded");
  files["z/requires.json"] = "{}";
  MakeVersion(2, files);
  const int reads = os_.calls("ReadAt");
  EXPECT_THAT(RefusalOf(2), AllOf(HasSubstr("z/requires.json"), HasSubstr("number 65")));
  EXPECT_EQ(code_, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(os_.calls("ReadAt"), reads + 1);  // The manifest.
}

TEST_F(BoundVersionTest, ReadingSidecarsEndsWhenTheLoadIsCancelled) {
  MakeVersion(1, {{"m.engine", PlanBytes()}, {"a/requires.json", "{}"}, {"b/requires.json", "{}"}});
  LoadRequest request = Request(1, Residency::kPinned);
  const int reads = os_.calls("ReadAt");
  int seen = 0;
  os_.Before("ReadAt", [&] {
    if (++seen == 2) request.cancel->Cancel();  // After the manifest: the first sidecar.
  });
  EXPECT_TRUE(absl::IsCancelled(loader_->Load(request).status()));
  EXPECT_EQ(os_.calls("ReadAt"), reads + 2);
}

TEST_F(BoundVersionTest, ACancelledLoadIsNotKeptByTheMachine) {
  MakeVersion(1, {{"m.engine", PlanBytes()}}, {{"tensorrt", "10.3.0"}});
  LoadRequest request = Request(1, Residency::kPinned);
  os_.Before("ReadAt", [&] { request.cancel->Cancel(); });
  const absl::Status status = loader_->Load(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
}

TEST_F(BoundVersionTest, EveryMissingFileIsNamedWithThePolicyAndWhatToDo) {
  MakeVersion(1, {{"a.safetensors", Weights(1000, 1)}, {"config.json", "{}"}});
  LoadRequest request = Request(1, Residency::kPinned);
  request.policy.requires_files = {"tokenizer.json", "config.json", "sub/vocab.txt"};
  const std::string text(loader_->Load(request).status().message());
  EXPECT_THAT(text, AllOf(HasSubstr("m@1: it has no file tokenizer.json, sub/vocab.txt"),
                          HasSubstr("requires_files"), HasSubstr("under a new number"),
                          HasSubstr("model.toml")));
}

}  // namespace
}  // namespace modelhost
