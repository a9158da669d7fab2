// The journal of operations: read back as it was written, whatever a crash or a bad disk made of
// it.
#include "daemon/store/operation_journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

JournalRecord Begun(uint64_t id) {
  JournalRecord record;
  record.id = id;
  record.kind = "swap";
  record.state = "RUNNING";
  record.model = "planner";
  record.version = 8;
  record.label = "stable";
  record.uid = 1000;
  record.started = absl::FromUnixSeconds(1'767'225'600);
  return record;
}

JournalRecord Ended(uint64_t id) {
  JournalRecord record = Begun(id);
  record.state = "ABORTED";
  record.finished = record.started + absl::Milliseconds(1500);
  record.code = 10;
  record.message = "planner:stable: superseded by op-9 \"\n\xff\" ";
  record.successor = 9;
  record.changes = {{"planner", "stable", 7, 8, 12}};
  record.load_ns = 5;
  record.freed_bytes = uint64_t{1} << 40;
  return record;
}

class OperationJournalTest : public ::testing::Test {
 protected:
  void SetUp() override { state_ = *real_.OpenDir(dir_.path()); }
  std::string path() const { return dir_ / "operations.jsonl"; }
  JournalContents Read() {
    OperationJournal journal(os_, state_);
    return journal.Read(&problem_);
  }
  OperationJournal Started() {
    OperationJournal journal(os_, state_);
    EXPECT_TRUE(journal.Rewrite({}, 1).ok());
    return journal;
  }

  ScratchDir dir_;
  LinuxOs real_;
  FaultOs os_{real_};
  UniqueFd state_;
  absl::Status problem_;
};

TEST_F(OperationJournalTest, TheLastLineOfAnOperationHolds) {
  OperationJournal journal = Started();
  ASSERT_TRUE(journal.Append({Begun(3), Begun(4)}).ok());
  ASSERT_TRUE(journal.Append({Ended(3)}).ok());
  const JournalContents contents = Read();
  EXPECT_TRUE(problem_.ok()) << problem_;
  EXPECT_EQ(contents.next_id, 5U);
  ASSERT_THAT(contents.records, SizeIs(2));
  const JournalRecord& ended = contents.records[0];
  EXPECT_TRUE(ended.ended());
  EXPECT_EQ(ended.finished, Ended(3).finished);
  EXPECT_EQ(ended.successor, 9U);
  EXPECT_EQ(ended.changes[0].generation, 12U);
  EXPECT_EQ(ended.freed_bytes, uint64_t{1} << 40);
  EXPECT_THAT(ended.message, HasSubstr("superseded by op-9"));
  EXPECT_FALSE(contents.records[1].ended());
}

TEST_F(OperationJournalTest, NumbersGoOnAfterARewriteThatKeptNone) {
  OperationJournal journal(os_, state_);
  EXPECT_TRUE(journal.wants_rewrite());
  ASSERT_TRUE(journal.Rewrite({}, 42).ok());
  EXPECT_FALSE(journal.wants_rewrite());
  EXPECT_EQ(Read().next_id, 42U);
}

TEST_F(OperationJournalTest, ATornEndIsWhatACrashLeavesAndLosesOnlyItself) {
  OperationJournal journal = Started();
  ASSERT_TRUE(journal.Append({Begun(1), Ended(2)}).ok());
  const std::string whole = ReadFile(path());
  const size_t last = SerializeJournalRecord(Ended(2)).size();
  for (size_t cut = 1; cut <= last; ++cut) {
    WriteFile(path(), whole.substr(0, whole.size() - cut));
    EXPECT_THAT(Read().records, SizeIs(1)) << cut;
    EXPECT_TRUE(problem_.ok()) << cut << ": " << problem_;
  }
}

TEST_F(OperationJournalTest, ABrokenMiddleIsMovedAsideAndTheRestKept) {
  WriteFile(path(), SerializeJournalHeader(1) + SerializeJournalRecord(Begun(1)) + "{\"id\": \n" +
                        SerializeJournalRecord(Ended(7)));
  const JournalContents contents = Read();
  EXPECT_THAT(contents.records, SizeIs(2));
  EXPECT_EQ(contents.next_id, 8U);
  EXPECT_THAT(std::string(problem_.message()), HasSubstr("1 of its lines"));
  EXPECT_THAT(std::string(problem_.message()), HasSubstr("operations.jsonl.broken"));
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_TRUE(std::filesystem::exists(path() + ".broken"));
}

TEST_F(OperationJournalTest, WhatCannotBeReadIsMovedAside) {
  WriteFile(path(), SerializeJournalRecord(Begun(1)));
  os_.FailCall("ReadAt", 1, EIO);
  EXPECT_THAT(Read().records, SizeIs(0));
  EXPECT_THAT(std::string(problem_.message()), HasSubstr("is now operations.jsonl.broken"));
  EXPECT_TRUE(std::filesystem::exists(path() + ".broken"));
  EXPECT_THAT(Read().records, SizeIs(0));
  EXPECT_TRUE(problem_.ok());
}

TEST_F(OperationJournalTest, AFailedAppendIsFollowedByARewrite) {
  for (const char* call : {"WriteAt", "Sync"}) {
    OperationJournal journal = Started();
    ASSERT_TRUE(journal.Append({Begun(1)}).ok());
    os_.FailCall(call, 1, ENOSPC);
    const absl::Status failed = journal.Append({Ended(1)});
    EXPECT_EQ(failed.code(), absl::StatusCode::kResourceExhausted) << call;
    EXPECT_TRUE(journal.wants_rewrite());
    ASSERT_TRUE(journal.Rewrite({Ended(1), Begun(2)}, 3).ok());
    EXPECT_THAT(Read().records, SizeIs(2));
    EXPECT_TRUE(Read().records[0].ended());
  }
}

TEST_F(OperationJournalTest, AFailedRewriteLeavesTheOldFile) {
  for (const char* call : {"CreateFileAt", "WriteAt", "Sync", "Rename"}) {
    OperationJournal journal = Started();
    ASSERT_TRUE(journal.Append({Begun(1)}).ok());
    os_.FailCall(call, 1, EIO);
    EXPECT_FALSE(journal.Rewrite({Begun(1), Begun(2)}, 3).ok()) << call;
    EXPECT_TRUE(journal.wants_rewrite()) << call;
    EXPECT_THAT(Read().records, SizeIs(1)) << call;
    EXPECT_TRUE(problem_.ok()) << call;
  }
}

TEST_F(OperationJournalTest, ManyLinesAreWrittenAnew) {
  OperationJournal journal = Started();
  std::vector<JournalRecord> some;
  for (int i = 0; i < 1001; ++i) some.push_back(Begun(1));
  for (int i = 0; i < 4; ++i) {
    EXPECT_FALSE(journal.wants_rewrite());
    ASSERT_TRUE(journal.Append(some).ok());
  }
  EXPECT_TRUE(journal.wants_rewrite());
}

TEST(OperationJournal, ALongTextIsCutBetweenCharacters) {
  JournalRecord record = Ended(1);
  record.message = std::string(1023, 'a') + "\xe2\x82\xac" + "b";
  const JournalContents contents = ParseJournal(SerializeJournalRecord(record));
  EXPECT_EQ(contents.records.at(0).message, std::string(1023, 'a'));
}

TEST(OperationJournal, RefusesWhatIsNoRecordAndSaysWhere) {
  const std::string good = SerializeJournalRecord(Begun(1));
  for (const char* bad : {"[]", "{}", "{\"schema\": 2,\"next\": 1}", "{\"schema\": 1,\"next\": 0}",
                          "{\"id\": 0,\"kind\": \"load\"}"}) {
    const JournalContents contents = ParseJournal(good + bad + "\n" + good);
    EXPECT_EQ(contents.bad_lines, 1U) << bad;
    EXPECT_THAT(contents.first_bad, HasSubstr(absl::StrCat("byte ", good.size()))) << bad;
    EXPECT_THAT(contents.records, SizeIs(1)) << bad;
  }
}

}  // namespace
}  // namespace modelhost
