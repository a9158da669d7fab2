#include "daemon/store/verified.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

class VerifiedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto dir = real_.OpenDir(scratch_.path());
    ASSERT_TRUE(dir.ok());
    dir_ = *std::move(dir);
  }
  FileInfo Info(uint64_t inode) {
    FileInfo info;
    info.device = 7;
    info.inode = inode;
    info.bytes = 100;
    info.mtime_ns = -5;
    info.ctime_ns = 1767225600000000001;
    return info;
  }

  ScratchDir scratch_;
  LinuxOs real_;
  FaultOs os_{real_};
  UniqueFd dir_;
  const Digest digest_ = Sha256(std::as_bytes(std::span("x", 1)));
};

TEST_F(VerifiedTest, SurvivesARestart) {
  auto verified = VerifiedFiles::Load(os_, dir_);
  EXPECT_EQ(verified->Find(Info(1)), std::nullopt);
  verified->Record(Info(1), digest_);
  verified->Record(Info(2), digest_);
  verified->Forget(Info(2));
  ASSERT_TRUE(verified->Save(dir_).ok());
  auto again = VerifiedFiles::Load(os_, dir_);
  EXPECT_EQ(again->Find(Info(1)), digest_);
  EXPECT_EQ(again->Find(Info(2)), std::nullopt);
}

TEST_F(VerifiedTest, AnyDifferenceIsAnotherFile) {
  auto verified = VerifiedFiles::Load(os_, dir_);
  verified->Record(Info(1), digest_);
  for (int field = 0; field < 5; ++field) {
    FileInfo changed = Info(1);
    if (field == 0) ++changed.device;
    if (field == 1) ++changed.inode;
    if (field == 2) ++changed.bytes;
    if (field == 3) ++changed.mtime_ns;
    if (field == 4) ++changed.ctime_ns;
    EXPECT_EQ(verified->Find(changed), std::nullopt) << field;
  }
}

TEST_F(VerifiedTest, ABrokenRecordIsAnEmptyOne) {
  WriteFile(scratch_ / "verified.json", "{\"schema\": 1, \"files\": [{\"device\": 1}]}");
  auto verified = VerifiedFiles::Load(os_, dir_);
  EXPECT_EQ(verified->Find(Info(1)), std::nullopt);
  verified->Record(Info(1), digest_);
  EXPECT_TRUE(verified->Save(dir_).ok());
  EXPECT_EQ(VerifiedFiles::Load(os_, dir_)->Find(Info(1)), digest_);
}

// What it holds is found out again: a newer daemon's record costs one read.
TEST_F(VerifiedTest, ARecordOfANewerDaemonIsAnEmptyOne) {
  auto verified = VerifiedFiles::Load(os_, dir_);
  verified->Record(Info(1), digest_);
  ASSERT_TRUE(verified->Save(dir_).ok());
  std::string text = ReadFile(scratch_ / "verified.json");
  const size_t at = text.find("\"schema\":1");
  ASSERT_NE(at, std::string::npos) << text;
  text.replace(at, 10, "\"schema\":2");
  WriteFile(scratch_ / "verified.json", text);
  EXPECT_EQ(VerifiedFiles::Load(os_, dir_)->Find(Info(1)), std::nullopt);
}

TEST_F(VerifiedTest, WritesOnlyWhatChangedAndTriesAgain) {
  auto verified = VerifiedFiles::Load(os_, dir_);
  ASSERT_TRUE(verified->Save(dir_).ok());
  EXPECT_EQ(os_.calls("WriteAt"), 0);
  verified->Record(Info(1), digest_);
  os_.FailCall("WriteAt", 1, ENOSPC);
  EXPECT_TRUE(absl::IsResourceExhausted(verified->Save(dir_)));
  ASSERT_TRUE(verified->Save(dir_).ok());
  EXPECT_EQ(os_.calls("WriteAt"), 2);
  verified->Record(Info(1), digest_);  // Known already.
  ASSERT_TRUE(verified->Save(dir_).ok());
  EXPECT_EQ(os_.calls("WriteAt"), 2);
}

TEST_F(VerifiedTest, KeepsABoundedNumberTheLatestUsed) {
  constexpr uint64_t kMany = 70000;
  auto verified = VerifiedFiles::Load(os_, dir_);
  for (uint64_t i = 1; i <= kMany; ++i) verified->Record(Info(i), digest_);
  EXPECT_TRUE(verified->Find(Info(1)).has_value());  // Used again: the latest.
  ASSERT_TRUE(verified->Save(dir_).ok());
  auto again = VerifiedFiles::Load(os_, dir_);
  EXPECT_TRUE(again->Find(Info(1)).has_value());
  EXPECT_FALSE(again->Find(Info(2)).has_value());
  EXPECT_TRUE(again->Find(Info(kMany)).has_value());
}

TEST_F(VerifiedTest, ManyThreads) {
  auto verified = VerifiedFiles::Load(os_, dir_);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 50; ++i) {
        verified->Record(Info(100 * t + i), digest_);
        EXPECT_TRUE(verified->Find(Info(100 * t + i)).has_value());
        const bool save = i % 25 == 0;
        EXPECT_TRUE(!save || verified->Save(dir_).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(verified->Save(dir_).ok());
  auto again = VerifiedFiles::Load(os_, dir_);
  for (uint64_t t = 0; t < 4; ++t) EXPECT_TRUE(again->Find(Info(100 * t + 49)).has_value());
}

}  // namespace
}  // namespace modelhost
