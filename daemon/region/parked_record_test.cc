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
  sealed.index->gpu_layout = "\"all\" segments 9 by 2";
  record.versions = {sealed, mapped};
  record.devices = {
      {"GPU-1", Filled(1), Filled(7), Filled(8), {{"mh-7-4", 4096, UINT64_MAX}}},
      {"GPU-2", Filled(1), Filled(7), Filled(8), {{"mh-7-5", 1, 2}, {"mh-7-6", 3, 4}}}};
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
  EXPECT_EQ(version.index->gpu_layout, "\"all\" segments 9 by 2");
  EXPECT_FALSE(parsed->versions[1].index.has_value());
  ASSERT_EQ(parsed->devices.size(), 2U);
  EXPECT_EQ(parsed->devices[0].gpu, "GPU-1");
  EXPECT_EQ(parsed->devices[0].part, Filled(7));
  EXPECT_EQ(parsed->devices[0].planned, Filled(8));
  EXPECT_EQ(parsed->devices[0].segments.at(0).checksum, UINT64_MAX);
  EXPECT_EQ(parsed->devices[1].segments.at(1).name, "mh-7-6");
  EXPECT_EQ(parsed->devices[1].segments.at(1).bytes, 3U);
}

TEST(ParkedRecord, OneOfBeforeThereWereDevicesIsRead) {
  ParkedRecord record = Example();
  record.devices.clear();
  record.versions[0].index->gpu_layout.clear();
  const std::string text = SerializeParkedRecord(record);
  EXPECT_EQ(text.find("gpu_layout"), std::string::npos);
  EXPECT_EQ(text.find("devices"), std::string::npos);
  const auto parsed = ParseParkedRecord(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(parsed->devices.empty());
  EXPECT_EQ(parsed->versions[0].index->gpu_layout, "");
}

TEST(ParkedRecord, CopiesThatMakeNoSenseAreRefusedWithTheirPlace) {
  EXPECT_THAT(Refused(With("\"name\": \"mh-7-6\"", "\"name\": \"mh-7-5\"")),
              HasSubstr("devices[1].segments[1].name: mh-7-5 is there a second time"));
  EXPECT_THAT(Refused(With("\"name\": \"mh-7-4\"", "\"name\": \"mh-7-1\"")),
              HasSubstr("devices[0].segments[0].name: mh-7-1 is there a second time"));
  EXPECT_THAT(Refused(With("\"GPU-1\"", "\"\"")), HasSubstr("devices[0].gpu"));
  EXPECT_THAT(Refused(With(Filled(7).Hex(), "zz")), HasSubstr("devices[0].part"));
  EXPECT_THAT(Refused(With("\"bytes\": 4096", "\"bytes\": 0")),
              HasSubstr("devices[0].segments[0].bytes"));
  EXPECT_THAT(Refused(With("\"checksum\"", "\"checksums\"")), HasSubstr("checksum"));
  EXPECT_THAT(Refused(With("\"\\\"all\\\" segments 9 by 2\"", "7")),
              HasSubstr("versions[0].index.gpu_layout"));
  ParkedRecord none = Example();
  none.devices[0].segments.clear();
  EXPECT_THAT(Refused(SerializeParkedRecord(none)), HasSubstr("devices[0].segments"));
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
