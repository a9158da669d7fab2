// What a crash or rotten bytes leave, and how it is put right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>

#include "daemon/store/publish.h"
#include "daemon/store/publish_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using PublishRepairTest = PublishTest;

TEST_F(PublishRepairTest, ACrashedPublishIsSweptAndALiveOneIsNot) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto staged = store_.publisher().Stage("planner", 1, {{"sub/a", 3}});
    const bool good =
        staged.ok() && (*staged)->AppendBytes({"sub/a", 3}, std::as_bytes(std::span("ab", 2))).ok();
    ::_exit(good ? 0 : 1);  // Without destructors, as a crash is.
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_EQ(Names(Incoming()).size(), 2u);

  const PublishFile file{"a", 3};
  auto live = store_.publisher().Stage("planner", 2, {file});
  ASSERT_TRUE(live.ok());
  WriteFile(Incoming() + "/rsync.tmp/own", "somebody else's");
  ASSERT_TRUE(store_.publisher().SweepIncoming().ok());
  EXPECT_EQ(Names(Incoming()).size(), 3u);  // The live one's two, and what is not ours.
  EXPECT_EQ(ReadFile(Incoming() + "/rsync.tmp/own"), "somebody else's");
  ASSERT_TRUE((*live)->AppendBytes(file, std::as_bytes(std::span("abc", 3))).ok());
  EXPECT_TRUE((*live)->Commit(nullptr, false).ok());
  live->reset();
  EXPECT_FALSE(Exists(1));
  EXPECT_TRUE(Exists(2));
  EXPECT_THAT(Names(Incoming()), ElementsAre("rsync.tmp"));
}

TEST_F(PublishRepairTest, ARepairReplacesBadBytesUnderLiveReaders) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  const std::string path = store_.version_path("planner", 8);
  // Its bytes rot; a second version shares them.
  ASSERT_TRUE(store_.Publish("planner", 9, {{"model.gguf", "weights"}}).ok());
  Rot(path + "/model.gguf");
  auto reader = store_.store().OpenVersion("planner", 8, nullptr);
  ASSERT_TRUE(reader.ok());
  void* mapped = ::mmap(nullptr, 7, PROT_READ, MAP_SHARED, reader->files[0].get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);

  // Nobody has said that it is bad, and its sizes fit.
  EXPECT_TRUE(store_.Publish("planner", 8, files_)->already_there);
  auto repaired = store_.Publish("planner", 8, files_, /*replace_bad=*/true);
  ASSERT_TRUE(repaired.ok()) << repaired.status();
  EXPECT_TRUE(repaired->repaired);
  EXPECT_EQ(ReadFile(path + "/model.gguf"), "weights");
  EXPECT_EQ(ModeOf(path), 0555u);
  EXPECT_EQ(std::string(static_cast<char*>(mapped), 7), "#eights");
  ::munmap(mapped, 7);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishRepairTest, AVersionThatDoesNotFitItsManifestIsRepairedUnasked) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  const std::string path = store_.version_path("planner", 8);
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  std::filesystem::remove(path + "/model.gguf");
  auto repaired = store_.Publish("planner", 8, files_);
  ASSERT_TRUE(repaired.ok()) << repaired.status();
  EXPECT_TRUE(repaired->repaired);
  EXPECT_TRUE(store_.store().OpenVersion("planner", 8, nullptr).ok());

  WriteFile(store_.version_path("planner", 9) + "/manifest.json", "{}");
  const absl::Status status = store_.Publish("planner", 9, files_, true).status();
  EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("nobody can tell"));
}

TEST_F(PublishRepairTest, ARepairThatFailsPutsTheOldVersionBack) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  const std::string path = store_.version_path("planner", 8);
  Rot(path + "/model.gguf");
  store_.os().FailCall("RenameNoReplace", 1, EIO);
  EXPECT_FALSE(store_.Publish("planner", 8, files_, true).ok());
  EXPECT_EQ(ReadFile(path + "/model.gguf"), "#eights");
  EXPECT_EQ(ModeOf(path), 0555u);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishRepairTest, TheOldVersionIsKeptUntilTheNewOneIsDurable) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  Rot(store_.version_path("planner", 8) + "/model.gguf");
  // The next Sync is that of the directory that the new version has just come into.
  store_.os().Before("RenameNoReplace", [&] { store_.os().FailCall("Sync", 1, EIO); });
  EXPECT_FALSE(store_.Publish("planner", 8, files_, true).ok());
  store_.os().Heal();
  ASSERT_EQ(Names(Incoming()).size(), 1u);
  EXPECT_THAT(Names(Incoming())[0], ::testing::EndsWith(".planner@8.replaced"));
  // Nothing was lost: the sweep sees that the new one is there.
  ASSERT_TRUE(store_.publisher().SweepIncoming().ok());
  EXPECT_THAT(Names(Incoming()), IsEmpty());
  EXPECT_EQ(ReadFile(store_.version_path("planner", 8) + "/model.gguf"), "weights");
}

TEST_F(PublishRepairTest, ACrashInTheMiddleOfARepairIsUndoneByTheSweep) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  const std::string path = store_.version_path("planner", 8);
  Rot(path + "/model.gguf");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    store_.os().Before("RenameNoReplace", [] { ::_exit(0); });  // The old one is aside by now.
    (void)store_.Publish("planner", 8, files_, true);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_FALSE(Exists(8));
  ASSERT_TRUE(store_.publisher().SweepIncoming().ok());
  EXPECT_EQ(ReadFile(path + "/model.gguf"), "#eights");
  EXPECT_EQ(ModeOf(path), 0555u);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
  EXPECT_TRUE(store_.Publish("planner", 8, files_, true)->repaired);
}

}  // namespace
}  // namespace modelhost
