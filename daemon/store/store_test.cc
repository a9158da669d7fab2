#include "daemon/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class StoreTest : public ::testing::Test {
 protected:
  // A version as an operator makes one with cp or rsync: no manifest.
  std::string PutByHand(uint64_t version, const TestStore::Files& files) {
    const std::string path = store_.version_path("planner", version);
    for (const auto& [name, bytes] : files) WriteFile(path + "/" + name, bytes);
    return path;
  }
  absl::StatusOr<VersionFiles> Open(uint64_t version) {
    return store_.store().OpenVersion("planner", version, nullptr);
  }
  // Both ways of looking at planner@1 refuse it, and name what is wrong.
  void ExpectRefused(const std::string& path, const std::string& reason) {
    const absl::Status status = Open(1).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("planner@1: "));
    EXPECT_THAT(status.message(), HasSubstr(path));
    EXPECT_THAT(status.message(), HasSubstr(reason));
    auto models = store_.store().Scan();
    ASSERT_TRUE(models.ok());
    ASSERT_EQ(models->size(), 1u);
    ASSERT_EQ((*models)[0].versions.size(), 1u);
    EXPECT_THAT((*models)[0].versions[0].invalid, HasSubstr(path));
    EXPECT_THAT((*models)[0].versions[0].invalid, HasSubstr(reason));
  }

  ScratchDir scratch_;
  TestStore store_{scratch_.path()};
};

TEST_F(StoreTest, OpensAPublishedVersion) {
  ASSERT_TRUE(store_.Publish("planner", 8, {{"a.gguf", "weights"}, {"sub/t.json", "{}"}}).ok());
  auto files = Open(8);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_FALSE(files->computed);
  ASSERT_EQ(files->manifest->files.size(), 2u);
  ASSERT_EQ(files->files.size(), 2u);
  EXPECT_EQ(files->manifest->files[0].path, "a.gguf");
  EXPECT_EQ(files->manifest->files[0].role, "weights");
  EXPECT_EQ(files->manifest->files[1].role, "sidecar");
  EXPECT_EQ(files->infos[0].bytes, 7u);
  std::byte bytes[7];
  ASSERT_EQ(store_.os().ReadAt(files->files[0], 0, bytes).value(), 7u);
  EXPECT_EQ(std::string(reinterpret_cast<char*>(bytes), 7), "weights");
}

TEST_F(StoreTest, WhatIsNotThereIsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(Open(8).status()));
  ASSERT_TRUE(store_.Publish("planner", 8, {{"a", "x"}}).ok());
  EXPECT_TRUE(absl::IsNotFound(Open(9).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(store_.store().OpenVersion("../etc", 1, nullptr).status()));
}

TEST_F(StoreTest, AVersionPutThereByHandGetsAManifestOnce) {
  PutByHand(1, {{"model.gguf", "GGUF...."}, {"tokenizer.json", "{}"}});
  uint64_t read = 0;
  auto first = store_.store().OpenVersion("planner", 1, [&](uint64_t done) {
    read = done;
    return true;
  });
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->computed);
  EXPECT_EQ(read, 10u);
  EXPECT_EQ(first->manifest->files[0].role, "weights");
  EXPECT_EQ(first->manifest->files[1].role, "sidecar");
  EXPECT_EQ(first->manifest->files[0].chunks.size(), 1u);

  read = 0;
  store_.Reopen();
  auto second = store_.store().OpenVersion("planner", 1, [&](uint64_t done) {
    read = done;
    return true;
  });
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(read, 0u);
  EXPECT_EQ(second->manifest->digest, first->manifest->digest);
  EXPECT_EQ(store_.store().Scan().value()[0].versions[0].digest, first->manifest->digest);

  // The same files published have the same identity.
  auto published =
      store_.Publish("other", 1, {{"model.gguf", "GGUF...."}, {"tokenizer.json", "{}"}});
  ASSERT_TRUE(published.ok());
  EXPECT_EQ(published->digest, first->manifest->digest);
}

TEST_F(StoreTest, AChangedFileMeansAnotherManifest) {
  const std::string path = PutByHand(1, {{"a.bin", "old."}});
  const Digest before = Open(1)->manifest->digest;
  WriteFile(path + "/a.bin", "new.");
  EXPECT_NE(Open(1)->manifest->digest, before);
}

TEST_F(StoreTest, ComputingAManifestCanBeCancelled) {
  PutByHand(1, {{"a.bin", "bytes"}});
  const absl::Status status =
      store_.store().OpenVersion("planner", 1, [](uint64_t) { return false; }).status();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(StoreTest, AFileThatChangesWhileItIsHashedIsDataLoss) {
  const std::string path = PutByHand(1, {{"a.bin", "bytes"}});
  const absl::Status status = store_.store()
                                  .OpenVersion("planner", 1,
                                               [&](uint64_t) {
                                                 WriteFile(path + "/a.bin", "longer bytes");
                                                 return true;
                                               })
                                  .status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("a.bin: changed while it was read"));
}

TEST_F(StoreTest, AStateDirectoryThatIsFullCostsOnlyTime) {
  PutByHand(1, {{"a.bin", "bytes"}});
  store_.os().FailFrom("WriteAt", 1, ENOSPC);
  EXPECT_TRUE(Open(1).ok());
}

TEST_F(StoreTest, ChecksumsOfAHandmadeVersionMustAgree) {
  const std::string sum = Sha256(std::as_bytes(std::span("other", 5))).Hex();
  const std::string path =
      PutByHand(1, {{"a.bin", "bytes"}, {"checksums.sha256", absl::StrCat(sum, "  a.bin\n")}});
  const absl::Status status = Open(1).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("a.bin"));
  EXPECT_THAT(status.message(), HasSubstr(sum));
  WriteFile(path + "/a.bin", "other");
  EXPECT_TRUE(Open(1).ok()) << Open(1).status();
}

TEST_F(StoreTest, ASymlinkIsRefused) {
  const std::string path = PutByHand(1, {{"a.bin", "x"}});
  std::filesystem::create_symlink("a.bin", path + "/b.bin");
  ExpectRefused("b.bin", "symbolic link");
}

TEST_F(StoreTest, ASymlinkedDirectoryIsRefused) {
  const std::string path = PutByHand(1, {{"a.bin", "x"}});
  std::filesystem::create_symlink("/etc", path + "/sub");
  ExpectRefused("sub", "symbolic link");
}

TEST_F(StoreTest, AVersionThatIsASymlinkIsRefused) {
  PutByHand(1, {{"a.bin", "x"}});
  std::filesystem::rename(store_.version_path("planner", 1), scratch_ / "elsewhere");
  std::filesystem::create_symlink(scratch_ / "elsewhere", store_.version_path("planner", 1));
  ExpectRefused("1", "symbolic link");
}

TEST_F(StoreTest, AFifoIsRefusedWithoutWaitingForIt) {
  const std::string path = PutByHand(1, {{"a.bin", "x"}});
  ASSERT_EQ(::mkfifo((path + "/pipe").c_str(), 0600), 0);
  ExpectRefused("pipe", "not a regular file");
}

TEST_F(StoreTest, WhatOthersMayWriteIsRefused) {
  const std::string path = PutByHand(1, {{"a.bin", "x"}});
  ASSERT_EQ(::chmod((path + "/a.bin").c_str(), 0666), 0);
  ExpectRefused("a.bin", "mode 0666");
  ASSERT_EQ(::chmod((path + "/a.bin").c_str(), 0664), 0);
  ExpectRefused("a.bin", "mode 0664");
  ASSERT_EQ(::chmod((path + "/a.bin").c_str(), 0644), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  ExpectRefused("", "mode 0777");
}

TEST_F(StoreTest, AnotherOwnerIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const std::string path = PutByHand(1, {{"a.bin", "x"}});
  ASSERT_EQ(::chown((path + "/a.bin").c_str(), 12345, 0), 0);
  ExpectRefused("a.bin", "belongs to uid 12345");
}

TEST_F(StoreTest, NamesThatAreNotPlainAreRefused) {
  PutByHand(1, {{"a\nb", "x"}});
  ExpectRefused("a\\x0ab", "control character");
}

TEST_F(StoreTest, FilesBesideThoseOfTheManifestAreRefused) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"a.bin", "x"}}).ok());
  const std::string path = store_.version_path("planner", 1);
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  WriteFile(path + "/extra.bin", "x");
  ExpectRefused("extra.bin", "not listed");
  std::filesystem::remove(path + "/extra.bin");
  std::filesystem::remove(path + "/a.bin");
  ExpectRefused("a.bin", "but not there");
}

TEST_F(StoreTest, ATruncatedFileIsRefused) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"a.bin", "12345"}}).ok());
  ASSERT_EQ(::chmod((store_.version_path("planner", 1) + "/a.bin").c_str(), 0644), 0);
  std::filesystem::resize_file(store_.version_path("planner", 1) + "/a.bin", 3);
  ExpectRefused("a.bin", "has 3 bytes, manifest.json says 5");
}

TEST_F(StoreTest, TheManifestOfAnotherVersionIsRefused) {
  ASSERT_TRUE(store_.Publish("planner", 7, {{"a.bin", "x"}}).ok());
  std::filesystem::rename(store_.version_path("planner", 7), store_.version_path("planner", 1));
  ExpectRefused("manifest.json", "is that of planner@7");
}

TEST_F(StoreTest, ScanListsTheUnusableWithTheirReason) {
  ASSERT_TRUE(store_.Publish("planner", 10, {{"a.bin", "xyz"}}).ok());
  ASSERT_TRUE(store_.Publish("planner", 9, {{"a.bin", "x"}}).ok());
  ASSERT_TRUE(store_.Publish("detector", 1, {{"a.bin", "x"}}).ok());
  WriteFile(store_.root() + "/models/planner/versions/08/a.bin", "x");
  WriteFile(store_.root() + "/models/planner/versions/11", "a file");
  std::filesystem::create_directory(store_.root() + "/models/planner/versions/12");
  WriteFile(store_.root() + "/models/Bad Name/versions/1/a.bin", "x");
  WriteFile(store_.root() + "/models/README", "x");
  WriteFile(store_.root() + "/models/planner/model.toml", "residency = \"warm\"\n");
  WriteFile(store_.root() + "/models/detector/model.toml", "residency = \"hot\"\n");
  auto models = store_.store().Scan();
  ASSERT_TRUE(models.ok()) << models.status();
  ASSERT_EQ(models->size(), 2u);
  const ScannedModel& detector = (*models)[0];
  EXPECT_EQ(detector.name, "detector");
  EXPECT_THAT(detector.policy_error, HasSubstr("models/detector/model.toml:1: "));
  const ScannedModel& planner = (*models)[1];
  EXPECT_EQ(planner.policy.residency, Residency::kWarm);
  EXPECT_EQ(planner.policy_error, "");
  ASSERT_EQ(planner.versions.size(), 5u);
  EXPECT_EQ(planner.versions[0].number, 9u);
  EXPECT_EQ(planner.versions[1].number, 10u);
  EXPECT_EQ(planner.versions[1].invalid, "");
  EXPECT_EQ(planner.versions[1].bytes, 3u);
  EXPECT_TRUE(planner.versions[1].digest.has_value());
  EXPECT_THAT(planner.versions[2].invalid, HasSubstr("not a directory"));
  EXPECT_THAT(planner.versions[3].invalid, HasSubstr("no files"));
  EXPECT_EQ(planner.versions[4].name, "08");
  EXPECT_THAT(planner.versions[4].invalid, HasSubstr("leading zero"));
  EXPECT_THAT(store_.store().Ignored(), Contains(HasSubstr("Bad Name")));
  EXPECT_THAT(store_.store().Ignored(), Contains(HasSubstr("README")));
}

TEST_F(StoreTest, AStoreThatIsGoneIsAnErrorNotAnEmptyStore) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"a.bin", "x"}}).ok());
  std::filesystem::rename(store_.root() + "/models", scratch_ / "away");
  EXPECT_FALSE(store_.store().Scan().ok());
  std::filesystem::rename(scratch_ / "away", store_.root() + "/models");
  store_.os().FailCall("ListDir", 1, EIO);
  EXPECT_TRUE(absl::IsDataLoss(store_.store().Scan().status()));
  store_.os().FailCall("ListDir", 2, EIO);
  EXPECT_THAT(store_.store().Scan().value()[0].versions_error, HasSubstr("injected"));
}

TEST_F(StoreTest, AScanReadsAManifestOnlyOnce) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"a.bin", "x"}}).ok());
  store_.Reopen();
  ASSERT_TRUE(store_.store().Scan().ok());
  const int reads = store_.os().calls("ReadAt");
  ASSERT_TRUE(store_.store().Scan().ok());
  EXPECT_EQ(store_.os().calls("ReadAt"), reads);
}

TEST_F(StoreTest, AStoreThatOthersMayWriteIsNotServed) {
  ASSERT_EQ(::chmod(store_.root().c_str(), 0777), 0);
  LinuxOs os;
  EXPECT_TRUE(absl::IsFailedPrecondition(
      Store::Open(os, store_.root(), store_.state(), ::geteuid()).status()));
}

TEST_F(StoreTest, DirectoriesAreMadeForOneself) {
  EXPECT_EQ(ModeOf(store_.root()), 0700u);
  EXPECT_EQ(ModeOf(store_.root() + "/models"), 0700u);
  EXPECT_EQ(ModeOf(store_.root() + "/incoming"), 0700u);
  EXPECT_EQ(ModeOf(store_.state()), 0700u);
}

TEST_F(StoreTest, WatchesTheModelsAndTheirVersions) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"a.bin", "x"}}).ok());
  std::filesystem::create_directory(store_.root() + "/models/empty");
  const std::string models = store_.root() + "/models";
  EXPECT_THAT(store_.store().WatchPaths(),
              ElementsAre(models, models + "/empty", models + "/planner/versions"));
}

TEST_F(StoreTest, SetResidencyKeepsTheOtherKeys) {
  ASSERT_TRUE(store_.store().SetResidency("planner", Residency::kSealed).ok());
  const std::string path = store_.root() + "/models/planner/model.toml";
  EXPECT_EQ(ReadFile(path), "residency = \"sealed\"\n");
  WriteFile(path, "# ours\nrequired = true\nresidency = \"warm\" # ours too\n");
  ASSERT_TRUE(store_.store().SetResidency("planner", Residency::kMapped).ok());
  EXPECT_EQ(ReadFile(path), "# ours\nrequired = true\nresidency = \"mapped\" # ours too\n");
  EXPECT_EQ(store_.store().Scan().value()[0].policy.residency, Residency::kMapped);
  WriteFile(path, "broken");
  EXPECT_TRUE(absl::IsInvalidArgument(store_.store().SetResidency("planner", Residency::kMapped)));
  EXPECT_EQ(ReadFile(path), "broken");
  EXPECT_FALSE(store_.store().SetResidency("../x", Residency::kMapped).ok());
}

}  // namespace
}  // namespace modelhost
