#include "daemon/config_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const ConfigEntry& EntryOf(const std::vector<ConfigEntry>& entries, const std::string& key) {
  const auto it = std::find_if(entries.begin(), entries.end(),
                               [&](const ConfigEntry& entry) { return entry.key == key; });
  EXPECT_NE(it, entries.end()) << key;
  static const ConfigEntry kNone;
  return it == entries.end() ? kNone : *it;
}

constexpr char kText[] =
    "[load]\n"
    "threads = 3\n"
    "[access]\n"
    "read_groups = [\"a\", \"4\"]\n"
    "[desired]\n"
    "file = \"/etc/models\"\n"
    "[[models]]\n"
    "name = \"gpt-4.1\"\n"
    "required = true\n";

TEST(ConfigViewTest, SaysWhereEachValueComesFrom) {
  const auto config = ParseConfig(kText, "c.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto entries = DescribeConfig(*config, "c.toml");
  EXPECT_EQ(EntryOf(entries, "load.threads").value, "3");
  EXPECT_EQ(EntryOf(entries, "load.threads").source, "c.toml:2");
  EXPECT_FALSE(EntryOf(entries, "load.threads").reloadable);
  EXPECT_EQ(EntryOf(entries, "access.read_groups").value, "[\"a\", \"4\"]");
  EXPECT_EQ(EntryOf(entries, "desired.file").value, "\"/etc/models\"");
  EXPECT_TRUE(EntryOf(entries, "desired.file").reloadable);
  EXPECT_EQ(EntryOf(entries, "models.gpt-4.1.required").source, "c.toml:9");
  EXPECT_EQ(EntryOf(entries, "load.verify").source, "default");
  EXPECT_EQ(EntryOf(entries, "load.verify").value, "\"full\"");
}

// A key that is new needs its default in config_view.cc.
TEST(ConfigViewTest, EveryKeyHasADefaultThatHolds) {
  for (const ConfigEntry& entry : DescribeConfig(DefaultConfig(), "")) {
    EXPECT_NE(entry.value, "default") << entry.key;
    if (entry.value.find(' ') != std::string::npos) continue;  // In words.
    const size_t dot = entry.key.find('.');
    const std::string text = absl::StrCat("[", entry.key.substr(0, dot), "]\n",
                                          entry.key.substr(dot + 1), " = ", entry.value, "\n");
    EXPECT_TRUE(ParseConfig(text, "c.toml").ok()) << text << ParseConfig(text, "c.toml").status();
  }
}

TEST(ConfigViewTest, ComparesByValuesNotByWhereTheyStand) {
  const auto from = ParseConfig(kText, "c.toml");
  const auto same = ParseConfig(absl::StrCat("# moved\n\n", kText), "c.toml");
  EXPECT_THAT(CompareConfigs(*from, *same), IsEmpty());
  // Said, and the same as unsaid.
  const auto said = ParseConfig("[load]\nverify = \"full\"\n", "c.toml");
  EXPECT_THAT(CompareConfigs(DefaultConfig(), *said), IsEmpty());
}

TEST(ConfigViewTest, NamesWhatNeedsARestart) {
  const auto from = ParseConfig(kText, "c.toml");
  const auto to = ParseConfig("[load]\nthreads = 4\n", "c.toml");
  const auto changes = CompareConfigs(*from, *to);
  std::string text;
  for (const ConfigChange& change : changes) {
    absl::StrAppend(&text, change.key, " ", change.from, " -> ", change.to,
                    change.needs_restart ? " restart" : "", "\n");
  }
  EXPECT_THAT(text, HasSubstr("load.threads 3 -> 4 restart\n"));
  EXPECT_THAT(text, HasSubstr("desired.file \"/etc/models\" -> \"\"\n"));
  EXPECT_THAT(text,
              HasSubstr("models.gpt-4.1.required true -> as the model's own model.toml says\n"));
  EXPECT_THAT(text, HasSubstr("access.read_groups [\"a\", \"4\"] -> [\"modelhost\"] restart\n"));
}

TEST(ConfigViewTest, OnlyWhatMayChangeIsTaken) {
  Config running = *ParseConfig(kText, "c.toml");
  TakeReloadable(*ParseConfig("[load]\nthreads = 4\n[desired]\nfile = \"/b\"\n", "c.toml"),
                 running);
  EXPECT_EQ(running.load.threads, 3);
  EXPECT_EQ(running.desired.file, "/b");
  EXPECT_TRUE(running.models.empty());
  EXPECT_EQ(running.given.at("load.threads").text, "3");
  EXPECT_EQ(running.given.at("desired.file").line, 4u);
  EXPECT_EQ(running.given.count("models.gpt-4.1.required"), 0u);
}

TEST(ConfigViewTest, TheDesiredFileIsNamedInFull) {
  EXPECT_THAT(ParseConfig("[desired]\nfile = \"models\"\n", "c.toml").status().message(),
              HasSubstr("c.toml:2: key 'desired.file': expected an absolute path"));
  EXPECT_TRUE(ParseConfig("[desired]\nfile = \"\"\n", "c.toml").ok());
  EXPECT_FALSE(ParseConfig("[desired]\npoll = 1\n", "c.toml").ok());
}

}  // namespace
}  // namespace modelhost
