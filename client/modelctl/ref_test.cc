#include "client/modelctl/ref.h"

#include <gtest/gtest.h>

#include "client/modelctl/context.h"

namespace modelhost::modelctl {
namespace {

TEST(RefTest, HasThreeForms) {
  const auto bare = ParseRef("planner");
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->model, "planner");
  EXPECT_EQ(bare->label, "");
  EXPECT_EQ(bare->version, 0u);
  const auto label = ParseRef("llama-3.1_8b:canary");
  ASSERT_TRUE(label.ok());
  EXPECT_EQ(label->model, "llama-3.1_8b");
  EXPECT_EQ(label->label, "canary");
  const auto version = ParseRef("planner@9223372036854775807");
  ASSERT_TRUE(version.ok());
  EXPECT_EQ(version->version, 9223372036854775807u);
  for (const char* text : {"planner", "planner:canary", "planner@7"}) {
    EXPECT_EQ(ParseRef(text)->ToString(), text);
  }
}

TEST(RefTest, RefusesWhatIsNoName) {
  for (const char* text :
       {"", "@7", ":x", "Planner", "-p", ".p", "a b", "a/b", "planner@", "planner@0", "planner@08",
        "planner@+8", "planner@8x", "planner@9223372036854775808", "planner:", "planner:A",
        "planner:a:b", "planner@7@8", "planner:a@8"}) {
    const auto ref = ParseRef(text);
    ASSERT_FALSE(ref.ok()) << text;
    EXPECT_EQ(ref.exit().code, ExitCode::kUsage);
  }
  EXPECT_TRUE(ParseRef(std::string(64, 'a')).ok());
  EXPECT_FALSE(ParseRef(std::string(65, 'a')).ok());
}

TEST(RefTest, AVersionRefNeedsItsVersion) {
  EXPECT_TRUE(ParseVersionRef("planner@7").ok());
  EXPECT_FALSE(ParseVersionRef("planner").ok());
  EXPECT_FALSE(ParseVersionRef("planner:stable").ok());
}

TEST(RefTest, AnAssignmentIsModelAndVersion) {
  const auto set = ParseAssignment("detector=4");
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(set->ToString(), "detector@4");
  for (const char* text : {"detector", "detector=", "=4", "detector=x", "detector=4=5"}) {
    EXPECT_FALSE(ParseAssignment(text).ok()) << text;
  }
}

TEST(DurationFlagTest, TakesUnitsAndBareSeconds) {
  EXPECT_EQ(*ParseDurationFlag("--timeout", "500ms"), absl::Milliseconds(500));
  EXPECT_EQ(*ParseDurationFlag("--timeout", "1h30m"), absl::Minutes(90));
  EXPECT_EQ(*ParseDurationFlag("--timeout", "1.5"), absl::Milliseconds(1500));
  for (const char* text : {"", "-1s", "soon", "5x", "nan"}) {
    EXPECT_FALSE(ParseDurationFlag("--timeout", text).ok()) << text;
  }
}

TEST(FindSocketsTest, TargetIsAUnixSocketOrRefused) {
  Globals globals;
  globals.target = "unix:///run/x/control.sock";
  ASSERT_TRUE(FindSockets(globals).ok());
  EXPECT_EQ(FindSockets(globals)->control, "/run/x/control.sock");
  EXPECT_EQ(FindSockets(globals)->handles, "/run/x/handles.sock");
  for (const char* target : {"robot:9465", "https://robot", "unix:relative.sock"}) {
    globals.target = target;
    const auto sockets = FindSockets(globals);
    ASSERT_FALSE(sockets.ok()) << target;
    EXPECT_EQ(sockets.exit().code, ExitCode::kUsage);
  }
}

}  // namespace
}  // namespace modelhost::modelctl
