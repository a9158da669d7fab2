#include "daemon/store/labels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/labels_json.h"
#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LabelFile Labels(uint64_t version) {
  LabelFile labels;
  labels.epoch = 12;
  LabelRecord record;
  record.version = version;
  record.digest = Sha256(std::as_bytes(std::span("x", 1)));
  record.generation = version + 4;
  record.previous = version - 1;
  record.changed = absl::FromUnixSeconds(1767225600);
  labels.labels[{"planner", "stable"}] = record;
  LabelRecord removed;
  removed.generation = 3;
  removed.changed = absl::FromUnixSeconds(1767225601);
  labels.labels[{"detector", "canary"}] = removed;
  return labels;
}

class LabelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto dir = real_.OpenDir(scratch_.path());
    ASSERT_TRUE(dir.ok());
    dir_ = *std::move(dir);
  }
  // The version that planner:stable names on disk now.
  uint64_t Saved() {
    auto labels = LoadLabels(real_, dir_);
    EXPECT_TRUE(labels.ok()) << labels.status();
    return labels.ok() ? labels->labels[{"planner", "stable"}].version : 0;
  }

  ScratchDir scratch_;
  LinuxOs real_;
  FaultOs os_{real_};
  UniqueFd dir_;
};

TEST_F(LabelsTest, NoFileIsNoLabels) {
  auto labels = LoadLabels(os_, dir_);
  ASSERT_TRUE(labels.ok());
  EXPECT_EQ(labels->epoch, 0u);
  EXPECT_TRUE(labels->labels.empty());
}

TEST_F(LabelsTest, ComeBackAsTheyWereSaved) {
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(8)).ok());
  auto labels = LoadLabels(os_, dir_);
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_EQ(labels->epoch, 12u);
  ASSERT_EQ(labels->labels.size(), 2u);
  const LabelRecord& stable = labels->labels[{"planner", "stable"}];
  EXPECT_EQ(stable.version, 8u);
  EXPECT_EQ(stable.digest, Labels(8).labels.at({"planner", "stable"}).digest);
  EXPECT_EQ(stable.generation, 12u);
  EXPECT_EQ(stable.previous, 7u);
  EXPECT_EQ(stable.changed, absl::FromUnixSeconds(1767225600));
  EXPECT_EQ(labels->labels[std::make_pair("detector", "canary")].version, 0u);
  EXPECT_EQ(labels->labels[std::make_pair("detector", "canary")].generation, 3u);
  EXPECT_THAT(Names(scratch_.path()), ElementsAre("labels.json"));
}

TEST_F(LabelsTest, ABrokenFileIsDataLossWithTheOffset) {
  WriteFile(scratch_ / "labels.json", R"({"schema": 1, "epoch": 12, "labels": [)");
  absl::Status status = LoadLabels(os_, dir_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("labels.json"));
  EXPECT_THAT(status.message(), HasSubstr("byte 38"));

  WriteFile(scratch_ / "labels.json", R"({"schema": 1, "epoch": 12, "labels": [{"model": "a"}]})");
  status = LoadLabels(os_, dir_).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("labels[0].label: missing"));

  WriteFile(scratch_ / "labels.json", "");
  EXPECT_TRUE(absl::IsDataLoss(LoadLabels(os_, dir_).status()));
}

TEST_F(LabelsTest, OfANewerDaemonTheyAreRefusedAndNotToBeThrownAway) {
  std::string text = SerializeLabels(Labels(8));
  text.replace(text.find("\"schema\":1"), 10, "\"schema\":2");
  WriteFile(scratch_ / "labels.json", text);
  const absl::Status status = LoadLabels(os_, dir_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("schema 2, this build reads 1"));
  EXPECT_THAT(status.message(), HasSubstr("a newer modelhostd wrote it"));
  EXPECT_THAT(status.message(), ::testing::Not(HasSubstr("remove")));
  EXPECT_EQ(ReadFile(scratch_ / "labels.json"), text);
}

TEST_F(LabelsTest, ALabelTwiceIsRefused) {
  std::string text = SerializeLabels(Labels(8));
  const size_t at = text.find("detector");
  text.replace(at, 8, "planner");
  text.replace(text.find("canary"), 6, "stable");
  const absl::Status status = ParseLabels(text).status();
  EXPECT_THAT(status.message(), HasSubstr("planner:stable is there a second time"));
}

TEST_F(LabelsTest, AnUnreadableFileIsNotAnEmptyOne) {
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(8)).ok());
  os_.FailCall("ReadAt", 1, EIO);
  EXPECT_TRUE(absl::IsDataLoss(LoadLabels(os_, dir_).status()));
  os_.FailCall("OpenFileAt", 1, EMFILE);
  EXPECT_TRUE(absl::IsResourceExhausted(LoadLabels(os_, dir_).status()));
}

TEST_F(LabelsTest, WhicheverCallFailsTheOldFileStaysGood) {
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(1)).ok());
  int failed = 0;
  for (const char* call :
       {"RemoveFileAt", "CreateFileAt", "WriteAt", "Sync", "Link", "Rename", "StatAt", "SetMode"}) {
    for (int nth = 1;; ++nth) {
      const int before = os_.calls(call);
      os_.FailCall(call, nth, ENOSPC);
      const absl::Status saved = SaveLabels(os_, dir_, Labels(2));
      os_.Heal();
      const bool reached = os_.calls(call) - before >= nth;
      if (!saved.ok()) {
        ++failed;
        EXPECT_EQ(ErrnoOf(saved), ENOSPC) << saved;
        EXPECT_EQ(Saved(), 1u) << call << " " << nth;
      } else {
        EXPECT_EQ(Saved(), 2u) << call << " " << nth;
        ASSERT_TRUE(SaveLabels(os_, dir_, Labels(1)).ok());
      }
      EXPECT_THAT(Names(scratch_.path()), ::testing::Not(::testing::Contains("labels.json.tmp")));
      if (!reached) break;
    }
  }
  EXPECT_GE(failed, 7);  // Two removals, create, write, two syncs, link, rename.
}

TEST_F(LabelsTest, TheFirstFileIsAllOrNothingToo) {
  os_.FailCall("Sync", 2, EIO);  // Of the directory, after the rename.
  EXPECT_FALSE(SaveLabels(os_, dir_, Labels(2)).ok());
  EXPECT_TRUE(Names(scratch_.path()).empty());
}

TEST_F(LabelsTest, TheNewTextIsSyncedBeforeItIsNamed) {
  std::vector<std::string> order;
  for (const char* call : {"WriteAt", "Sync", "Rename"}) {
    os_.Before(call, [&order, call] { order.emplace_back(call); });
  }
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(1)).ok());
  EXPECT_THAT(order, ElementsAre("WriteAt", "Sync", "Rename", "Sync"));
}

TEST_F(LabelsTest, WhatACrashLeftIsNoObstacle) {
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(1)).ok());
  WriteFile(scratch_ / "labels.json.tmp", "half");
  WriteFile(scratch_ / "labels.json.old", "older");
  EXPECT_EQ(Saved(), 1u);
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(2)).ok());
  EXPECT_EQ(Saved(), 2u);
  EXPECT_THAT(Names(scratch_.path()), ElementsAre("labels.json"));
}

TEST_F(LabelsTest, WorkWithoutHardLinks) {
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(1)).ok());
  os_.FailFrom("Link", 1, EPERM);
  ASSERT_TRUE(SaveLabels(os_, dir_, Labels(2)).ok());
  EXPECT_EQ(Saved(), 2u);
  // The last sync fails and there is nothing to put back: one of the two is there, whole.
  os_.FailCall("Sync", 2, EIO);
  EXPECT_FALSE(SaveLabels(os_, dir_, Labels(3)).ok());
  EXPECT_EQ(Saved(), 3u);
}

TEST(JsonWriterTest, IsValidWhateverTheStrings) {
  JsonWriter json;
  json.BeginObject().Key("a\"b").String(std::string("\x01\x7f\xff\\ \xC3\xA4\0", 8));
  json.Key("empty").BeginArray().EndArray().Key("n").Int(-1).EndObject();
  EXPECT_EQ(std::move(json).Take(),
            "{\n  \"a\\\"b\": \"\\u0001\\u007f\\ufffd\\\\ \xC3\xA4\\u0000\",\n"
            "  \"empty\": [],\n  \"n\": -1\n}\n");
}

}  // namespace
}  // namespace modelhost
