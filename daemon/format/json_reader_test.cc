#include "daemon/format/json_reader.h"

#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ByteReader JsonBytes(std::string_view text) {
  return ByteReader("f.json", "hint", std::as_bytes(std::span<const char>(text)));
}

bool IsJson(std::string_view text) {
  ByteReader in = JsonBytes(text);
  JsonReader json(in);
  return json.Skip() && json.End();
}

// The string value of `text`, or the error.
std::string StringOf(std::string_view text) {
  ByteReader in = JsonBytes(text);
  JsonReader json(in);
  std::string_view value;
  if (json.String("a string", &value) && json.End()) return std::string(value);
  return "error: " + std::string(in.status().message());
}

std::string Nested(int levels) {
  return std::string(static_cast<size_t>(levels), '[') +
         std::string(static_cast<size_t>(levels), ']');
}

TEST(JsonReaderTest, SkipsEveryKindOfValue) {
  for (const std::string_view good :
       {"{}", "[]", " [ ] ", "{\"a\":1}", "{ \"a\" : [ 1 , {} , [] ] , \"b\" : null }", "true",
        "false", "0", "-0", "10.25", "1e5", "1E+5", "-1.5e-300", "1e-400", "\"\"", "\"a\\n\"",
        "123456789012345678901234567890", "[1,[2,[3]],{\"a\":{\"b\":[]}}]", "\t\r\n1"}) {
    EXPECT_TRUE(IsJson(good)) << good;
  }
}

TEST(JsonReaderTest, RefusesWhatIsNotJson) {
  for (const std::string_view bad : {"",
                                     " ",
                                     "{",
                                     "[",
                                     "[1",
                                     "[1,",
                                     "[1,]",
                                     "[,1]",
                                     "[1 2]",
                                     "{\"a\"}",
                                     "{\"a\":}",
                                     "{\"a\":1,}",
                                     "{a:1}",
                                     "{'a':1}",
                                     "{1:1}",
                                     "{,}",
                                     "]",
                                     "}",
                                     "[}",
                                     "{]",
                                     "1 1",
                                     "{}{}",
                                     "01",
                                     "-",
                                     "+1",
                                     ".5",
                                     "1.",
                                     "1e",
                                     "1e+",
                                     "0x1",
                                     "1e400",
                                     "-1e400",
                                     "NaN",
                                     "Infinity",
                                     "tru",
                                     "nul",
                                     "True",
                                     "\"",
                                     "\"\\x\"",
                                     "\"\\u12\"",
                                     "\"\\u12g4\"",
                                     "\"\\ud800\"",
                                     "\"\\udc00\"",
                                     "\"\\ud800\\u0041\"",
                                     "\"\\ud800x\"",
                                     "\"a\nb\"",
                                     "\"\x01\"",
                                     "\"\xff\"",
                                     "\"\xc0\x80\"",
                                     "\"\xed\xa0\x80\"",
                                     "\"\xf4\x90\x80\x80\"",
                                     "\"\xe2\x82\"",
                                     "// c\n1",
                                     "/* c */1",
                                     "[1]//",
                                     "\xef\xbb\xbf{}"}) {
    EXPECT_FALSE(IsJson(bad)) << bad;
  }
  EXPECT_FALSE(IsJson(std::string_view("1\0", 2)));
  EXPECT_FALSE(IsJson(std::string_view("\"a\0b\"", 5)));
}

TEST(JsonReaderTest, NestingIsBounded) {
  EXPECT_TRUE(IsJson(Nested(JsonReader::kMaxDepth)));
  EXPECT_FALSE(IsJson(Nested(JsonReader::kMaxDepth + 1)));
  EXPECT_FALSE(IsJson(std::string(10'000'000, '[')));
}

TEST(JsonReaderTest, DepthCountsTheLevelsThatTheCallerHasOpened) {
  const auto read = [](int inner) {
    const std::string text = "{\"a\":[" + Nested(inner) + "]}";
    ByteReader in = JsonBytes(text);
    JsonReader json(in);
    return json.Object(
        "o", [&](std::string_view) { return json.Array("a", [&] { return json.Skip(); }); });
  };
  EXPECT_TRUE(read(JsonReader::kMaxDepth - 2));
  EXPECT_FALSE(read(JsonReader::kMaxDepth - 1));
}

TEST(JsonReaderTest, DecodesEscapes) {
  EXPECT_EQ(StringOf("\"plain\""), "plain");
  EXPECT_EQ(StringOf("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\""), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(StringOf("\"a\\u0041\\u00e9\\u20ac\\ud83d\\ude00z\""),
            "aA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z");
  EXPECT_EQ(StringOf("\"x\\u0000y\""), std::string("x\0y", 3));
  EXPECT_EQ(StringOf("\"\xd1\x82\xd0\xb5\""), "\xd1\x82\xd0\xb5");
}

TEST(JsonReaderTest, UnsignedTakesDigitsAlone) {
  const auto read = [](std::string_view text) -> std::string {
    ByteReader in = JsonBytes(text);
    JsonReader json(in);
    uint64_t value = 0;
    if (json.Unsigned("a number", &value) && json.End()) return std::to_string(value);
    return "error";
  };
  EXPECT_EQ(read("0"), "0");
  EXPECT_EQ(read(" 18446744073709551615 "), "18446744073709551615");
  for (const std::string_view bad :
       {"18446744073709551616", "99999999999999999999999", "-0", "-1", "1.0", "1e0", "1E2", "01",
        "+1", "\"1\"", "true", "null", ""}) {
    EXPECT_EQ(read(bad), "error") << bad;
  }
}

TEST(JsonReaderTest, ErrorsNameFileOffsetAndHint) {
  ByteReader in = JsonBytes("{\"a\": x}");
  JsonReader json(in);
  EXPECT_FALSE(json.Skip());
  EXPECT_THAT(std::string(in.status().message()),
              ::testing::AllOf(HasSubstr("f.json: at byte 6"), HasSubstr("(hint)")));
}

TEST(JsonReaderTest, ObjectGivesKeysInOrderAndStopsWhenToldTo) {
  ByteReader in = JsonBytes("{\"b\":1,\"\\u0061\":2,\"c\":3}");
  JsonReader json(in);
  std::vector<std::string> keys;
  EXPECT_FALSE(json.Object("an object", [&](std::string_view key) {
    keys.emplace_back(key);
    return key != "a" && json.Skip();
  }));
  EXPECT_THAT(keys, ElementsAre("b", "a"));
}

}  // namespace
}  // namespace modelhost
