#include "daemon/store/desired_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Refusal(absl::string_view text) {
  const auto wanted = ParseDesired(text, "desired");
  EXPECT_EQ(wanted.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(wanted.status().message());
}

TEST(DesiredFileTest, ReadsLinesCommentsBlanksAndCrlf) {
  const auto wanted = ParseDesired(
      "# fleet 12\r\n\r\n  planner.stable = 8   # since Monday\r\nplanner.canary=9\ndetector = 3",
      "desired");
  ASSERT_TRUE(wanted.ok()) << wanted.status();
  ASSERT_EQ(wanted->size(), 3u);
  EXPECT_EQ(wanted->at({"planner", "stable"}).version, 8u);
  EXPECT_EQ(wanted->at({"planner", "stable"}).line, 3u);
  EXPECT_EQ(wanted->at({"planner", "canary"}).version, 9u);
  EXPECT_EQ(wanted->at({"detector", "stable"}).version, 3u);
}

TEST(DesiredFileTest, TheLabelIsWhatFollowsTheLastDot) {
  const auto wanted = ParseDesired("gpt-4.1.stable = 2\ngpt-4.canary = 3\n", "desired");
  ASSERT_TRUE(wanted.ok()) << wanted.status();
  EXPECT_EQ(wanted->at({"gpt-4.1", "stable"}).version, 2u);
  EXPECT_EQ(wanted->at({"gpt-4", "canary"}).version, 3u);
}

TEST(DesiredFileTest, AnEmptyTextWantsNothing) {
  EXPECT_TRUE(ParseDesired("", "desired")->empty());
  EXPECT_TRUE(ParseDesired("# nothing\n\n", "desired")->empty());
}

TEST(DesiredFileTest, ABadLineRefusesTheWholeFileAndSaysWhere) {
  EXPECT_EQ(Refusal("a = 1\nplanner.stable 8\n"),
            "desired:2: 'planner.stable 8': expected MODEL.LABEL = VERSION");
  EXPECT_THAT(Refusal("planner.stable = 08"), HasSubstr("desired:1: planner.stable: '08'"));
  for (const char* number : {"", "0", "-1", "1.0", "9223372036854775808", "1 2", "\"8\"", "none"}) {
    EXPECT_THAT(Refusal(absl::StrCat("planner.stable = ", number)), HasSubstr("not a version"));
  }
  for (const char* name : {"", ".", "planner.", ".stable", "Planner.stable", "../x.stable",
                           "planner.sta ble", "[desired]", "planner\x01.stable"}) {
    EXPECT_THAT(Refusal(absl::StrCat(name, " = 1")), HasSubstr("not MODEL.LABEL"));
  }
  EXPECT_THAT(Refusal(std::string("planner.stable = 1\0", 19)), HasSubstr("not a version"));
}

TEST(DesiredFileTest, ALabelTwiceIsRefusedHoweverItIsSpelled) {
  EXPECT_EQ(Refusal("a = 1\n\na.stable = 1\n"), "desired:3: a.stable: said in line 1 already");
}

TEST(DesiredFileTest, LinesAndBytesAreBounded) {
  std::string lines;
  for (size_t i = 0; i < kMostDesiredLines; ++i) absl::StrAppend(&lines, "m", i, " = 1\n");
  EXPECT_EQ(ParseDesired(lines, "desired")->size(), kMostDesiredLines);
  EXPECT_THAT(Refusal(lines + "#"), HasSubstr("desired:4097: more than 4096 lines"));
  EXPECT_THAT(Refusal(std::string(kMostDesiredBytes + 1, '#')), HasSubstr("longer than"));
}

class DesiredReadTest : public ::testing::Test {
 protected:
  DesiredText Read() { return ReadDesiredFile(os_, scratch_ / "conf/models"); }

  ScratchDir scratch_;
  LinuxOs real_;
  FaultOs os_{real_};
};

TEST_F(DesiredReadTest, FollowsTheLinksOfAMountedConfigMap) {
  WriteFile(scratch_ / "conf/..2026_1/models", "planner.stable = 1\n");
  std::filesystem::create_symlink("..2026_1", scratch_ / "conf/..data");
  std::filesystem::create_symlink("..data/models", scratch_ / "conf/models");
  DesiredText read = Read();
  ASSERT_TRUE(read.status.ok()) << read.status;
  EXPECT_EQ(read.text, "planner.stable = 1\n");
  EXPECT_THAT(read.watch, ElementsAre(scratch_ / "conf", scratch_ / "conf/..2026_1"));

  WriteFile(scratch_ / "conf/..2026_2/models", "planner.stable = 2\n");
  std::filesystem::create_symlink("..2026_2", scratch_ / "conf/..data_tmp");
  std::filesystem::rename(scratch_ / "conf/..data_tmp", scratch_ / "conf/..data");
  std::filesystem::remove_all(scratch_ / "conf/..2026_1");
  EXPECT_EQ(Read().text, "planner.stable = 2\n");
}

TEST_F(DesiredReadTest, AFlipBetweenLookingAndOpeningIsFollowed) {
  WriteFile(scratch_ / "conf/..1/models", "planner.stable = 1\n");
  WriteFile(scratch_ / "conf/..2/models", "planner.stable = 2\n");
  std::filesystem::create_symlink("..1", scratch_ / "conf/..data");
  std::filesystem::create_symlink("..data/models", scratch_ / "conf/models");
  os_.Before("OpenDir", [&] {
    std::filesystem::remove(scratch_ / "conf/..data");
    std::filesystem::create_symlink("..2", scratch_ / "conf/..data");
    std::filesystem::remove_all(scratch_ / "conf/..1");
  });
  const DesiredText read = Read();
  EXPECT_TRUE(read.status.ok()) << read.status;
  EXPECT_EQ(read.text, "planner.stable = 2\n");
}

TEST_F(DesiredReadTest, AMissingFileIsToldFromOneThatCannotBeRead) {
  DesiredText read = Read();
  EXPECT_TRUE(absl::IsNotFound(read.status)) << read.status;
  EXPECT_THAT(read.watch, ElementsAre(scratch_ / "conf"));

  WriteFile(scratch_ / "conf/models", "planner.stable = 1\n");
  os_.FailCall("ReadAt", 1, EIO);
  EXPECT_TRUE(absl::IsDataLoss(Read().status));
  os_.FailCall("OpenFileAt", 1, EACCES);
  EXPECT_TRUE(absl::IsPermissionDenied(Read().status));
  EXPECT_TRUE(Read().status.ok());
}

TEST_F(DesiredReadTest, WhatChangesWhileItIsReadIsReadAgain) {
  WriteFile(scratch_ / "conf/models", "planner.stable = 1\n");
  os_.Before("ReadAt", [&] { WriteFile(scratch_ / "conf/models", "planner.stable = 12\n"); });
  const DesiredText read = Read();
  EXPECT_TRUE(absl::IsUnavailable(read.status)) << read.status;
  os_.Heal();
  EXPECT_EQ(Read().text, "planner.stable = 12\n");
}

TEST_F(DesiredReadTest, WhatEverybodyMayWriteIsRefused) {
  WriteFile(scratch_ / "conf/models", "planner.stable = 1\n", 0646);
  EXPECT_TRUE(absl::IsFailedPrecondition(Read().status)) << Read().status;
}

TEST_F(DesiredReadTest, APipeADirectoryAndALoopAreNoFile) {
  std::filesystem::create_directories(scratch_ / "conf/models");
  EXPECT_FALSE(Read().status.ok());
  std::filesystem::remove(scratch_ / "conf/models");
  ASSERT_EQ(::mkfifo((scratch_ / "conf/models").c_str(), 0600), 0);
  EXPECT_FALSE(Read().status.ok());  // And nothing hangs.
  std::filesystem::remove(scratch_ / "conf/models");
  std::filesystem::create_symlink("models", scratch_ / "conf/models");
  EXPECT_FALSE(Read().status.ok());
  EXPECT_FALSE(absl::IsNotFound(Read().status)) << Read().status;
}

TEST_F(DesiredReadTest, ALargeFileIsRefusedUnread) {
  WriteFile(scratch_ / "conf/models", std::string(kMostDesiredBytes + 1, '#'));
  EXPECT_TRUE(absl::IsResourceExhausted(Read().status)) << Read().status;
}

}  // namespace
}  // namespace modelhost
