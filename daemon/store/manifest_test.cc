#include "daemon/store/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

Digest DigestOf(const std::string& text) { return Sha256(std::as_bytes(std::span(text))); }

Manifest Example() {
  Manifest manifest;
  manifest.model = "planner";
  manifest.version = 8;
  manifest.created = absl::FromUnixSeconds(1767225600);
  manifest.requires_map = {{"cuda", "12 \"or\" later\n"}};
  ManifestFile small;
  small.path = "config.json";
  small.bytes = 2;
  small.sha256 = DigestOf("{}");
  small.role = "sidecar";
  small.chunks = {small.sha256};
  ManifestFile large;
  large.path = "weights/a.safetensors";
  large.bytes = kChunkBytes + 1;
  large.sha256 = DigestOf("whole");
  large.role = "weights";
  large.chunks = {DigestOf("first"), DigestOf("second")};
  manifest.files = {small, large};
  manifest.digest = VersionDigest(manifest.files);
  return manifest;
}

// The example with one piece of its text exchanged.
absl::Status ParseWith(const std::string& old_text, const std::string& new_text) {
  std::string json = SerializeManifest(Example());
  EXPECT_THAT(json, HasSubstr(old_text));
  const size_t at = json.find(old_text);
  json.replace(at, old_text.size(), new_text);
  return ParseManifest(json).status();
}

TEST(ManifestTest, ComesBackAsItWasWritten) {
  const Manifest before = Example();
  auto after = ParseManifest(SerializeManifest(before));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->model, "planner");
  EXPECT_EQ(after->version, 8u);
  EXPECT_EQ(after->created, before.created);
  EXPECT_EQ(after->digest, before.digest);
  EXPECT_EQ(after->requires_map, before.requires_map);
  ASSERT_EQ(after->files.size(), 2u);
  EXPECT_EQ(after->files[1].path, "weights/a.safetensors");
  EXPECT_EQ(after->files[1].bytes, kChunkBytes + 1);
  EXPECT_EQ(after->files[1].role, "weights");
  EXPECT_EQ(after->files[1].chunks, before.files[1].chunks);
  EXPECT_EQ(after->TotalBytes(), kChunkBytes + 3);
}

TEST(ManifestTest, DigestIsThatOfWhatSha256sumPrints) {
  ManifestFile b;
  b.path = "b";
  b.sha256 = DigestOf("");
  ManifestFile a;
  a.path = "a";
  a.sha256 = DigestOf("{}");
  // printf '{}' > a; : > b; sha256sum a b | sha256sum
  const std::string lines = absl::StrCat(a.sha256.Hex(), "  a\n", b.sha256.Hex(), "  b\n");
  EXPECT_EQ(VersionDigest({b, a}), DigestOf(lines));
  EXPECT_EQ(a.sha256.Hex(), "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a");
}

TEST(ManifestTest, SyntaxErrorsSayAtWhichByte) {
  const absl::Status status = ParseManifest("{\"schema\": 1,,}").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("byte 13"));
}

TEST(ManifestTest, UnknownFieldsAreRefusedByPlaceAndName) {
  EXPECT_THAT(ParseWith("\"model\"", "\"mode\": 1, \"model\"").message(),
              HasSubstr("manifest.json: mode: unknown field"));
  EXPECT_THAT(ParseWith("\"role\": \"weights\"", "\"role\": \"weights\", \"length\": 1").message(),
              HasSubstr("files[1].length: unknown field"));
}

TEST(ManifestTest, DuplicateFieldsAreRefused) {
  EXPECT_THAT(ParseWith("\"version\": 8", "\"version\": 8, \"version\": 9").message(),
              HasSubstr("version: given twice"));
}

TEST(ManifestTest, WrongValuesAreRefusedWithTheirPlace) {
  EXPECT_THAT(ParseWith("\"schema\": 1", "\"schema\": 2").message(), HasSubstr("schema: is 2"));
  EXPECT_THAT(ParseWith("\"version\": 8", "\"version\": 0").message(), HasSubstr("version: "));
  EXPECT_THAT(ParseWith("\"version\": 8", "\"version\": \"8\"").message(),
              HasSubstr("version: expected a non-negative integer, found a string"));
  EXPECT_THAT(ParseWith("planner", "Planner").message(), HasSubstr("model: "));
  EXPECT_THAT(ParseWith("\"sidecar\"", "\"other\"").message(), HasSubstr("files[0].role: "));
  EXPECT_THAT(ParseWith("config.json", "../config.json").message(), HasSubstr("files[0].path: "));
  EXPECT_THAT(ParseWith("16777216", "1000").message(), HasSubstr("files[0].chunk_bytes: "));
  EXPECT_THAT(ParseWith("\"size\": 16777217", "\"size\": 16777216").message(),
              HasSubstr("files[1].chunk_sha256: has 2 digests for 1 chunks"));
}

TEST(ManifestTest, ADigestThatIsNotThatOfTheFilesIsRefused) {
  EXPECT_THAT(ParseWith(DigestOf("whole").Hex(), DigestOf("other").Hex()).message(),
              HasSubstr("digest: says "));
}

TEST(ManifestTest, AFileTwiceOrInsideAFileIsRefused) {
  EXPECT_THAT(ParseWith("weights/a.safetensors", "config.json").message(),
              HasSubstr("given twice"));
  EXPECT_THAT(ParseWith("weights/a.safetensors", "config.json/a").message(),
              HasSubstr("is a file, and the directory of"));
}

TEST(ManifestTest, SizesThatAddUpBeyondReasonAreRefused) {
  const absl::Status status = ParseWith("\"size\": 16777217", "\"size\": 18446744073709551615");
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("files[1].size"));
}

TEST(NamesTest, OnlyCanonicalVersionNumbers) {
  EXPECT_EQ(ParseVersionNumber("8").value(), 8u);
  EXPECT_EQ(ParseVersionNumber("9223372036854775807").value(), 9223372036854775807u);
  for (const char* bad : {"", "0", "08", "+8", "-8", " 8", "8 ", "0x8", "1e3",
                          "9223372036854775808", "99999999999999999999999"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseVersionNumber(bad).status())) << bad;
  }
}

TEST(NamesTest, OnlyPlainRelativePaths) {
  for (const char* good : {"a", "a/b.bin", "a..b", "..a", ".hidden", "a b", "\xC3\xA4"}) {
    EXPECT_TRUE(CheckVersionPath(good).ok()) << good;
  }
  for (const char* bad : {"", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "./a", "a\nb", "a\\b",
                          "\xFF", "manifest.json"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckVersionPath(bad))) << bad;
  }
  EXPECT_FALSE(CheckVersionPath(std::string("a\0b", 3)).ok());
  EXPECT_FALSE(CheckVersionPath(std::string(256, 'a')).ok());
}

TEST(NamesTest, AFileIsNoDirectoryOfAnotherWhateverIsSortedBetween) {
  // '-' and '.' sort before '/'.
  EXPECT_FALSE(CheckVersionPaths({"a", "a-b", "a.c", "a/b"}).ok());
  EXPECT_TRUE(CheckVersionPaths({"a", "a-b", "a.c", "ab/c"}).ok());
}

TEST(NamesTest, ModelNamesAreOfTheSmallAlphabet) {
  for (const char* good : {"planner", "0", "qwen2.5-7b_q4"}) {
    EXPECT_TRUE(CheckModelName(good).ok()) << good;
  }
  for (const std::string& bad : {std::string(), std::string("-a"), std::string("A"),
                                 std::string("a/b"), std::string(".."), std::string(65, 'a')}) {
    EXPECT_FALSE(CheckModelName(bad).ok()) << bad;
  }
}

class ChecksumsTest : public ::testing::Test {
 protected:
  const std::string hex_ = DigestOf("{}").Hex();
};

TEST_F(ChecksumsTest, ReadsTextAndBinaryLines) {
  auto sums = ParseChecksums(
      absl::StrCat(hex_, "  a b.json\n", hex_, " *./sub/c\n\n# a comment\n", hex_, "  d\r\n"));
  ASSERT_TRUE(sums.ok()) << sums.status();
  EXPECT_EQ(sums->size(), 3u);
  EXPECT_TRUE(sums->contains("a b.json"));
  EXPECT_TRUE(sums->contains("sub/c"));
  EXPECT_TRUE(sums->contains("d"));
}

TEST_F(ChecksumsTest, BadLinesAreNamedByNumber) {
  EXPECT_THAT(ParseChecksums(absl::StrCat(hex_, "  a\nnonsense\n")).status().message(),
              HasSubstr("checksums.sha256:2: "));
  EXPECT_THAT(ParseChecksums(absl::StrCat("SHA256 (a) = ", hex_)).status().message(),
              HasSubstr("--tag"));
  EXPECT_FALSE(ParseChecksums(absl::StrCat(hex_, "  ../a\n")).ok());
  EXPECT_FALSE(ParseChecksums(absl::StrCat(hex_, "  a\n", DigestOf("x").Hex(), "  a\n")).ok());
}

TEST_F(ChecksumsTest, ALineAboutItselfIsSkipped) {
  auto sums = ParseChecksums(absl::StrCat(hex_, "  checksums.sha256\n"));
  ASSERT_TRUE(sums.ok());
  EXPECT_TRUE(sums->empty());
}

TEST_F(ChecksumsTest, DisagreementNamesTheFileAndBothDigests) {
  const Manifest manifest = Example();
  EXPECT_TRUE(CheckAgainst({{"config.json", DigestOf("{}")}}, manifest.files).ok());
  absl::Status status = CheckAgainst({{"config.json", DigestOf("x")}}, manifest.files);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(status.message(), HasSubstr("config.json"));
  EXPECT_THAT(status.message(), HasSubstr(DigestOf("x").Hex()));
  EXPECT_THAT(status.message(), HasSubstr(DigestOf("{}").Hex()));
  status = CheckAgainst({{"gone", DigestOf("x")}}, manifest.files);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(status.message(), HasSubstr("gone"));
}

TEST(DigestTest, HexGoesThereAndBack) {
  const Digest digest = DigestOf("abc");
  EXPECT_EQ(digest.Hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest.Short(), "ba7816bf8f01");
  EXPECT_EQ(ParseDigest(digest.Hex()).value(), digest);
  EXPECT_EQ(ParseDigest("BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD").value(),
            digest);
  EXPECT_FALSE(ParseDigest("ba").ok());
  EXPECT_FALSE(ParseDigest(std::string(63, 'a') + "g").ok());
}

}  // namespace
}  // namespace modelhost
