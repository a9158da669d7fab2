#include "daemon/region/parked_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_replace.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

Digest Filled(uint8_t byte) {
  Digest digest;
  digest.bytes.fill(byte);
  return digest;
}

ParkedRecord Example() {
  ParkedRecord record;
  record.regions = {{{"mh-7-1", 1, 2, 3}, Filled(1)}, {{"mh-7-3", 1, 8, 9}, Filled(2)}};
  ParkedVersion sealed{
      "planner",   8, Filled(3), Residency::kSealed, {Filled(1), Filled(2)}, {"mh-7-1", "mh-7-3"},
      std::nullopt};
  sealed.index = ParkedIndex{{"mh-7-2", 1, 4, 5}, Filled(4), "0.3.0 ab12", "gguf", 6, 7, {1, 0},
                             {"a \"warning\""}};
  ParkedVersion mapped{"detector", 1, Filled(5), Residency::kPinned, {Filled(6)}, {}, std::nullopt};
  record.versions = {sealed, mapped};
  return record;
}

std::string Refused(const std::string& text) {
  const auto parsed = ParseParkedRecord(text);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(parsed.status().message());
}

std::string With(const std::string& from, const std::string& to) {
  const std::string text = SerializeParkedRecord(Example());
  EXPECT_THAT(text, HasSubstr(from));
  return absl::StrReplaceAll(text, {{from, to}});
}

TEST(ParkedRecord, ComesBackAsItWasWritten) {
  const std::string text = SerializeParkedRecord(Example());
  const auto parsed = ParseParkedRecord(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(SerializeParkedRecord(*parsed), text);
  ASSERT_EQ(parsed->regions.size(), 2U);
  EXPECT_EQ(parsed->regions[1].memory.inode, 8U);
  EXPECT_EQ(parsed->regions[1].content, Filled(2));
  ASSERT_EQ(parsed->versions.size(), 2U);
  const ParkedVersion& version = parsed->versions[0];
  EXPECT_EQ(version.digest, Filled(3));
  EXPECT_EQ(version.residency, Residency::kSealed);
  EXPECT_EQ(version.regions[1], "mh-7-3");
  ASSERT_TRUE(version.index.has_value());
  EXPECT_EQ(version.index->memory.bytes, 5U);
  EXPECT_EQ(version.index->eager[0], 1U);
  EXPECT_EQ(version.index->warnings[0], "a \"warning\"");
  EXPECT_FALSE(parsed->versions[1].index.has_value());
}

TEST(ParkedRecord, ATornOneIsRefusedAtEveryLength) {
  const std::string text = SerializeParkedRecord(Example());
  for (size_t bytes = 0; bytes + 2 < text.size(); ++bytes) {
    EXPECT_FALSE(ParseParkedRecord(text.substr(0, bytes)).ok()) << bytes;
  }
}

TEST(ParkedRecord, WhatMakesNoSenseIsRefusedWithItsPlace) {
  EXPECT_THAT(Refused(With("\"schema\": 1", "\"schema\": 2")), HasSubstr("this build reads 1"));
  EXPECT_THAT(Refused(With("\"name\": \"mh-7-2\"", "\"name\": \"mh-7-1\"")),
              HasSubstr("versions[0].index.name: mh-7-1 is there a second time"));
  EXPECT_THAT(Refused(With("\"name\": \"mh-7-3\"", "\"name\": \"mh-7-9\"")),
              HasSubstr("versions[0].regions: mh-7-3 is not among the regions"));
  EXPECT_THAT(Refused(With("planner", "../x")), HasSubstr("versions[0].model"));
  EXPECT_THAT(Refused(With("\"version\": 8", "\"version\": 0")), HasSubstr("versions[0].version"));
  EXPECT_THAT(Refused(With("\"pinned\"", "\"floating\"")), HasSubstr("versions[1].residency"));
  EXPECT_THAT(Refused(With("\"gguf\"", "7")), HasSubstr("versions[0].index.format"));
  EXPECT_THAT(Refused(With("\"tensors\"", "\"tensor\"")), HasSubstr("tensors"));
  EXPECT_THAT(Refused(With(Filled(6).Hex(), "zz")), HasSubstr("versions[1].contents"));
}

TEST(ParkedRecord, AnIndexNamesNoRegionThatTheVersionLacks) {
  ParkedRecord record = Example();
  record.versions[0].index->eager = {2};
  EXPECT_THAT(Refused(SerializeParkedRecord(record)), HasSubstr("not the number of a region"));
}

}  // namespace
}  // namespace modelhost
