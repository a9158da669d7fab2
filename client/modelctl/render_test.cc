#include "client/modelctl/render.h"

#include <gtest/gtest.h>

#include "client/modelctl/json.h"
#include "client/modelctl/messages.h"

namespace modelhost::modelctl {
namespace {

TEST(FormatBytesTest, UsesIecUnitsAndNeverShows1024OfAUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes((uint64_t{1} << 20) - 1), "1.0 MiB");
  EXPECT_EQ(FormatBytes(3972844749), "3.7 GiB");
  EXPECT_EQ(FormatBytes(uint64_t{120} << 30), "120 GiB");
  EXPECT_EQ(FormatBytes(UINT64_MAX), "16.0 EiB");
}

TEST(HumanDurationTest, ShowsTheUnitThatFits) {
  EXPECT_EQ(HumanDuration(absl::Nanoseconds(850)), "850 ns");
  EXPECT_EQ(HumanDuration(absl::Nanoseconds(4100)), "4.1 us");
  EXPECT_EQ(HumanDuration(absl::Microseconds(38)), "38 us");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(12)), "12 ms");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(1840)), "1.84 s");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(9999)), "10.0 s");
  EXPECT_EQ(HumanDuration(absl::Milliseconds(59990)), "1 min");
  EXPECT_EQ(HumanDuration(absl::Seconds(125)), "2 min 5 s");
  EXPECT_EQ(HumanDuration(absl::Hours(3) + absl::Minutes(2)), "3 h 2 min");
  EXPECT_EQ(HumanDuration(absl::Hours(97)), "4 d 1 h");
  EXPECT_EQ(HumanDuration(-absl::Seconds(1)), "0 ns");
}

TEST(FormatAgeTest, IsOneNumberAndALetter) {
  EXPECT_EQ(FormatAge(absl::Seconds(59)), "59s");
  EXPECT_EQ(FormatAge(absl::Minutes(59)), "59m");
  EXPECT_EQ(FormatAge(absl::Hours(23)), "23h");
  EXPECT_EQ(FormatAge(absl::Hours(49)), "2d");
}

TEST(FormatRateTest, HasNoNumberWithoutTimeOrBytes) {
  EXPECT_EQ(FormatRate(uint64_t{2} << 30, absl::Seconds(1)), "2.0 GiB/s");
  EXPECT_EQ(FormatRate(1, absl::ZeroDuration()), "-");
  EXPECT_EQ(FormatRate(0, absl::Seconds(1)), "-");
}

TEST(Rfc3339Test, IsRfc3339InUtc) {
  EXPECT_EQ(Rfc3339(absl::FromUnixMillis(1767225600250)), "2026-01-01T00:00:00.250Z");
}

TEST(DurationTest, SurvivesTheWire) {
  const absl::Duration duration = absl::Seconds(90) + absl::Nanoseconds(7);
  EXPECT_EQ(ToAbsl(ToProto(duration)), duration);
}

TEST(BarTest, FillsInProportionAndShowsThatSomethingIsThere) {
  EXPECT_EQ(Bar(0, 100, 10), "..........");
  EXPECT_EQ(Bar(1, 1000, 10), "#.........");
  EXPECT_EQ(Bar(50, 100, 10), "#####.....");
  EXPECT_EQ(Bar(200, 100, 10), "##########");
  EXPECT_EQ(Bar(1, 0, 10), "..........");
}

TEST(TableTest, AlignsColumnsAndMarksEmptyCells) {
  Table table({{"MODEL"}, {"HOST", Align::kRight}, {"HEALTH"}});
  table.Add({"planner", "3.7 GiB", "OK"});
  table.Add({"d", "", "DEGRADED"});
  EXPECT_EQ(table.Render(false),
            "MODEL       HOST  HEALTH\n"
            "planner  3.7 GiB  OK\n"
            "d              -  DEGRADED\n");
}

TEST(TableTest, LetsNoCellDriveTheTerminal) {
  Table table({{"COMM"}, {"X"}});
  table.Add({"\x1b[2Jevil\n", "x"});
  EXPECT_EQ(table.Render(false, false), "?[2Jevil  x\n");
}

TEST(TableTest, ColoursDoNotChangeTheAlignment) {
  Table table({{"STATE"}, {"X"}});
  table.Add({Cell("READY", Tint::kGood), "1"});
  table.Add({"LOADING", "2"});
  EXPECT_EQ(table.Render(true, false), "\x1b[32mREADY\x1b[0m    1\nLOADING  2\n");
}

TEST(TableTest, CountsCodePointsAndNotBytes) {
  Table table({{"A"}, {"B"}});
  table.Add({"\xc3\xa4", "1"});
  table.Add({"xy", "2"});
  EXPECT_EQ(table.Render(false, false), "\xc3\xa4   1\nxy  2\n");
}

TEST(JsonTest, WritesADocumentWithItsKind) {
  JsonWriter json(JsonStyle::kOneLine);
  json.BeginDocument("Thing");
  json.Field("bytes", uint64_t{18446744073709551615u});
  json.FieldSeconds("tookSeconds", 2);
  json.Key("list");
  json.BeginArray();
  json.String("a\"b\\c\n\x01");
  json.Null();
  json.EndArray();
  json.Key("empty");
  json.BeginObject();
  json.EndObject();
  json.EndObject();
  EXPECT_EQ(std::move(json).Take(),
            "{\"apiVersion\":\"modelhost/v1\",\"kind\":\"Thing\",\"bytes\":18446744073709551615,"
            "\"tookSeconds\":2.0,\"list\":[\"a\\\"b\\\\c\\n\\u0001\",null],\"empty\":{}}\n");
}

TEST(JsonTest, PrettyIndentsByTwo) {
  JsonWriter json(JsonStyle::kPretty);
  json.BeginObject();
  json.Field("a", true);
  json.Field("b", "x");
  json.EndObject();
  EXPECT_EQ(std::move(json).Take(), "{\n  \"a\": true,\n  \"b\": \"x\"\n}\n");
}

TEST(JsonTest, SecondsAreAlwaysFloats) {
  for (const auto& [seconds, text] : {std::pair<double, const char*>{0, "0.0\n"},
                                      {1.84, "1.84\n"},
                                      {4.1e-6, "4.1e-06\n"},
                                      {1e20, "1e+20\n"}}) {
    JsonWriter json(JsonStyle::kOneLine);
    json.Seconds(seconds);
    EXPECT_EQ(std::move(json).Take(), text);
  }
}

TEST(JsonTest, BytesThatAreNoUtf8BecomeReplacementCharacters) {
  for (const char* bad : {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80"}) {
    EXPECT_FALSE(IsValidUtf8(bad));
  }
  EXPECT_TRUE(IsValidUtf8("\xf0\x9f\x98\x80 \xc3\xa4"));
  JsonWriter json(JsonStyle::kOneLine);
  json.String("a\xff\x62");
  EXPECT_EQ(std::move(json).Take(), "\"a\xef\xbf\xbd\x62\"\n");
}

v1::Model ModelWith(v1::VersionPhase phase, v1::Health health) {
  v1::Model model;
  model.set_name("planner");
  v1::Label* label = model.add_labels();
  label->set_label("stable");
  label->set_version(8);
  v1::Version* version = model.add_versions();
  version->set_model("planner");
  version->set_version(8);
  version->set_phase(phase);
  version->set_health(health);
  version->set_host_bytes(100);
  version->set_leases(2);
  return model;
}

TEST(SummariseTest, TheWorstReadyVersionIsTheModelsHealth) {
  v1::Model model = ModelWith(v1::READY, v1::OK);
  v1::Version* second = model.add_versions();
  second->set_model("planner");
  second->set_version(7);
  second->set_phase(v1::READY);
  second->set_health(v1::SUSPECT);
  second->set_health_reason("source changed");
  const ModelSummary summary = Summarise(model);
  EXPECT_EQ(summary.health, "SUSPECT");
  EXPECT_EQ(summary.why, "planner@7 source changed");
  EXPECT_EQ(summary.versions_ready, "8,7");
  EXPECT_EQ(summary.labels, "stable=8");
  EXPECT_EQ(summary.host_bytes, 100u);
  EXPECT_EQ(summary.leases, 2u);
}

TEST(SummariseTest, ALabelOnAVersionThatIsNotReadySaysSo) {
  const ModelSummary loading = Summarise(ModelWith(v1::LOADING, v1::HEALTH_UNSPECIFIED));
  EXPECT_EQ(loading.health, "NOT_READY");
  EXPECT_FALSE(loading.broken);
  const ModelSummary bad = Summarise(ModelWith(v1::QUARANTINED, v1::HEALTH_UNSPECIFIED));
  EXPECT_TRUE(bad.broken);
  EXPECT_EQ(bad.why, "stable names 8, which is QUARANTINED");
  v1::Model gone = ModelWith(v1::READY, v1::OK);
  gone.mutable_labels(0)->set_version(9);
  EXPECT_EQ(Summarise(gone).why, "stable names 9, which is gone");
}

}  // namespace
}  // namespace modelhost::modelctl
