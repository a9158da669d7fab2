// Versions that leave the store: whole or gone, whatever fails, and without harm to the others.
#include "daemon/store/removal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class RemovalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    state_ = *real_.OpenDir(store_.state());
    verified_ = VerifiedFiles::Load(store_.os(), state_);
    ASSERT_TRUE(store_.Publish("planner", 1, {{"a.gguf", "aaaa"}, {"sub/b.txt", "bb"}}).ok());
    // Shares a.gguf with 1.
    ASSERT_TRUE(store_.Publish("planner", 2, {{"a.gguf", "aaaa"}, {"c.txt", "ccc"}}).ok());
  }
  absl::StatusOr<RemovedVersion> MoveAside(const std::string& version = "1") {
    return RemovedVersion::MoveAside(store_.store(), *verified_, state_, "planner", version,
                                     &gone_);
  }
  std::vector<std::string> Versions() { return Names(store_.root() + "/models/planner/versions"); }
  std::vector<std::string> Incoming() { return Names(store_.root() + "/incoming"); }
  void ExpectWhole(uint64_t version) {
    const std::string path = store_.version_path("planner", version);
    EXPECT_EQ(ReadFile(path + "/a.gguf"), "aaaa");
    EXPECT_EQ(ModeOf(path), kVersionDirMode);
    EXPECT_TRUE(store_.store().OpenVersion("planner", version, nullptr).ok());
  }

  ScratchDir dir_;
  LinuxOs real_;
  TestStore store_{dir_.path()};
  UniqueFd state_;
  std::unique_ptr<VerifiedFiles> verified_;
  bool gone_ = false;
};

TEST_F(RemovalTest, GoesByOneRenameAndThenItsBytes) {
  auto removed = MoveAside();
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_TRUE(gone_);
  EXPECT_THAT(Versions(), ElementsAre("2"));
  EXPECT_THAT(Incoming(), SizeIs(2));  // The lock and the tree.
  EXPECT_TRUE(removed->Remove().ok());
  EXPECT_THAT(Incoming(), IsEmpty());
  ExpectWhole(2);
}

TEST_F(RemovalTest, APlainUserMayDoIt) {
  ScratchDir dir;
  AsPlainUser(dir.path(), [&] {
    TestStore store(dir.path());
    ASSERT_TRUE(store.Publish("planner", 1, {{"sub/a.gguf", "aaaa"}}).ok());
    LinuxOs os;
    const UniqueFd state = *os.OpenDir(store.state());
    auto verified = VerifiedFiles::Load(store.os(), state);
    bool gone = false;
    auto removed =
        RemovedVersion::MoveAside(store.store(), *verified, state, "planner", "1", &gone);
    ASSERT_TRUE(removed.ok()) << removed.status();
    EXPECT_TRUE(removed->Remove().ok());
    EXPECT_THAT(Names(store.root() + "/models/planner/versions"), IsEmpty());
  });
}

TEST_F(RemovalTest, AFailureBeforeItIsGoneLeavesItWhole) {
  const std::pair<const char*, int> faults[] = {{"ListDir", EIO},
                                                {"CreateFileAt", ENOSPC},
                                                {"TryLock", EIO},
                                                {"RenameNoReplace", EIO},
                                                {"Sync", EIO}};
  for (const auto& [call, error] : faults) {
    for (int nth : {1, 2}) {
      if (nth == 2 && std::string(call) != "Sync" && std::string(call) != "ListDir") continue;
      store_.os().FailCall(call, nth, error);
      EXPECT_FALSE(MoveAside().ok()) << call << nth;
      store_.os().Heal();
      EXPECT_FALSE(gone_) << call << nth;
      EXPECT_THAT(Versions(), ElementsAre("1", "2")) << call << nth;
      EXPECT_THAT(Incoming(), IsEmpty()) << call << nth;
      ExpectWhole(1);
    }
  }
  EXPECT_TRUE(MoveAside().ok());
}

TEST_F(RemovalTest, WhatACrashOrAFailureLeavesIsSweptAtTheNextStart) {
  auto removed = MoveAside();
  ASSERT_TRUE(removed.ok());
  store_.os().FailCall("RemoveTreeAt", 1, EIO);
  EXPECT_FALSE(removed->Remove().ok());
  EXPECT_THAT(Incoming(), SizeIs(1));
  auto stale = FindStaleStaging(store_.store());
  ASSERT_TRUE(stale.ok());
  ASSERT_THAT(*stale, SizeIs(1));
  EXPECT_GE((*stale)[0].use.bytes(), 6U);
  EXPECT_TRUE(store_.publisher().SweepIncoming().ok());
  EXPECT_THAT(Incoming(), IsEmpty());
  EXPECT_THAT(Versions(), ElementsAre("2"));
}

TEST_F(RemovalTest, WhatSomebodyWorksOnIsNotStale) {
  auto staged = store_.publisher().Stage("planner", 9, {{"x.gguf", 4}});
  ASSERT_TRUE(staged.ok());
  auto removed = MoveAside();
  ASSERT_TRUE(removed.ok());
  EXPECT_THAT(*FindStaleStaging(store_.store()), IsEmpty());
}

TEST_F(RemovalTest, ASharedFileStaysVerifiedUnderItsOtherName) {
  const auto before = store_.store().OpenVersion("planner", 2, nullptr)->infos[0];
  ASSERT_EQ(before.links, 2U);
  const Digest digest =
      store_.store().OpenVersion("planner", 2, nullptr)->manifest->files[0].sha256;
  verified_->Record(before, digest);
  auto removed = MoveAside();
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(removed->use().files.size(), 3U);
  ASSERT_TRUE(removed->Remove().ok());
  const auto after = store_.store().OpenVersion("planner", 2, nullptr)->infos[0];
  EXPECT_EQ(after.links, 1U);
  EXPECT_EQ(verified_->Find(after), digest);
}

TEST_F(RemovalTest, RecordsOfWhatIsGoneAreFound) {
  WriteFile(store_.state() + "/manifests/planner/2.json", "{}");
  WriteFile(store_.state() + "/manifests/planner/7.json", "{}");
  EXPECT_THAT(*FindOrphanManifests(store_.store(), state_), ElementsAre("planner/7.json"));
  EXPECT_TRUE(RemoveOrphanManifest(store_.store(), state_, "planner/7.json").ok());
  EXPECT_THAT(*FindOrphanManifests(store_.store(), state_), IsEmpty());
  // A store that cannot be read has lost nothing.
  store_.os().FailCall("StatAt", 1, EIO);
  EXPECT_FALSE(FindOrphanManifests(store_.store(), state_).ok());
  store_.os().Heal();

  const auto infos = std::move(store_.store().OpenVersion("planner", 2, nullptr)->infos);
  verified_->Record(infos[0], Digest{});
  FileInfo elsewhere = infos[0];
  elsewhere.inode += 1'000'000;
  verified_->Record(elsewhere, Digest{});
  const auto files = AllVersionFiles(store_.store());
  ASSERT_TRUE(files.ok());
  EXPECT_EQ(verified_->ForgetOthers(*files, true), 1U);
  EXPECT_EQ(verified_->ForgetOthers(*files, false), 1U);
  EXPECT_EQ(verified_->Find(elsewhere), std::nullopt);
  EXPECT_NE(verified_->Find(infos[0]), std::nullopt);
}

TEST_F(RemovalTest, AnUnusableVersionGoesToo) {
  std::filesystem::create_symlink("/etc", store_.version_path("planner", 3));
  WriteFile(store_.version_path("planner", 4), "a file in the place of a directory");
  for (const char* version : {"3", "4"}) {
    auto removed = MoveAside(version);
    ASSERT_TRUE(removed.ok()) << removed.status();
    EXPECT_TRUE(removed->Remove().ok());
  }
  EXPECT_THAT(Versions(), ElementsAre("1", "2"));
  EXPECT_TRUE(std::filesystem::exists("/etc"));
}

}  // namespace
}  // namespace modelhost
