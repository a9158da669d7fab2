#include "daemon/store/publish.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/store/clone_test_os.h"
#include "daemon/store/publish_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Hex(const std::string& text) { return Sha256(std::as_bytes(std::span(text))).Hex(); }

uint64_t InodeOf(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

TEST_F(PublishTest, MakesAnImmutableVersion) {
  auto result = store_.Publish("planner", 8, files_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->bytes, 9u);
  EXPECT_EQ(result->linked_bytes, 0u);
  EXPECT_FALSE(result->already_there);
  const std::string path = store_.version_path("planner", 8);
  EXPECT_EQ(ReadFile(path + "/model.gguf"), "weights");
  EXPECT_EQ(ReadFile(path + "/sub/dir/tokenizer.json"), "{}");
  EXPECT_EQ(ModeOf(path), 0555u);
  EXPECT_EQ(ModeOf(path + "/sub"), 0555u);
  EXPECT_EQ(ModeOf(path + "/sub/dir"), 0555u);
  EXPECT_EQ(ModeOf(path + "/model.gguf"), 0444u);
  EXPECT_EQ(ModeOf(path + "/sub/dir/tokenizer.json"), 0444u);
  EXPECT_EQ(ModeOf(path + "/manifest.json"), 0444u);
  auto manifest = ParseManifest(ReadFile(path + "/manifest.json"));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->digest, result->digest);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, IsDurableBeforeItIsNamed) {
  std::vector<std::string> order;
  for (const char* call : {"WriteAt", "Sync", "RenameNoReplace"}) {
    store_.os().Before(call, [&order, call] { order.emplace_back(call); });
  }
  ASSERT_TRUE(store_.Publish("planner", 1, {{"sub/a", "x"}}).ok());
  EXPECT_THAT(order, ElementsAre("WriteAt", "Sync",  // The file.
                                 "Sync", "Sync",     // models/ and models/planner/, both grown.
                                 "WriteAt", "Sync",  // The manifest.
                                 "Sync", "Sync",     // sub/ and the version's directory.
                                 "RenameNoReplace", "Sync"));
}

TEST_F(PublishTest, WorksForAPlainUser) {
  ScratchDir scratch;
  AsPlainUser(scratch.path(), [&] {
    TestStore store(scratch.path());
    auto first = store.Publish("planner", 1, files_);
    ASSERT_TRUE(first.ok()) << first.status();
    // A file of one's own may be linked; the whole directory is write-protected in the end.
    auto second = store.Publish("planner", 2, {{"model.gguf", "weights"}, {"new.json", "[]"}});
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ(second->linked_bytes, 7u);
    EXPECT_EQ(ModeOf(store.version_path("planner", 2)), 0555u);
    EXPECT_TRUE(store.store().OpenVersion("planner", 2, nullptr).ok());
    // Repair moves directories that were write-protected.
    std::filesystem::permissions(store.version_path("planner", 1) + "/model.gguf",
                                 std::filesystem::perms(0644));
    std::ofstream(store.version_path("planner", 1) + "/model.gguf") << "WEIGHTS";
    auto repaired = store.Publish("planner", 1, files_, /*replace_bad=*/true);
    ASSERT_TRUE(repaired.ok()) << repaired.status();
    EXPECT_TRUE(repaired->repaired);
    EXPECT_EQ(ReadFile(store.version_path("planner", 1) + "/model.gguf"), "weights");
    EXPECT_EQ(Names(store.root() + "/incoming").size(), 0u);
    // What cannot be written is said.
    ASSERT_EQ(::chmod((store.root() + "/incoming").c_str(), 0500), 0);
    const absl::Status status = store.Publish("planner", 3, files_).status();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    ASSERT_EQ(::chmod((store.root() + "/incoming").c_str(), 0700), 0);
  });
}

TEST_F(PublishTest, FilesThatTheStoreHasBecomeHardLinks) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  auto result = store_.Publish("detector", 5, {{"renamed.gguf", "weights"}, {"new", "x"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->linked_bytes, 7u);
  EXPECT_EQ(InodeOf(store_.version_path("planner", 1) + "/model.gguf"),
            InodeOf(store_.version_path("detector", 5) + "/renamed.gguf"));
  EXPECT_TRUE(store_.store().OpenVersion("detector", 5, nullptr).ok());
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, LinksAreFoundAfterARestart) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  store_.Reopen();
  EXPECT_EQ(store_.Publish("planner", 2, files_)->linked_bytes, 9u);
}

TEST_F(PublishTest, WhereThereAreNoHardLinksItIsACopy) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  for (const int error : {EPERM, EMLINK, EXDEV, ENOSPC}) {
    store_.os().FailFrom("Link", 1, error);
    auto result = store_.Publish("planner", 100 + static_cast<uint64_t>(error), files_);
    store_.os().Heal();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->linked_bytes, 0u);
  }
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, ARottenFileIsNotLinked) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  Rot(store_.version_path("planner", 1) + "/model.gguf");
  auto result = store_.Publish("planner", 2, files_);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->linked_bytes, 2u);
  EXPECT_EQ(ReadFile(store_.version_path("planner", 2) + "/model.gguf"), "weights");
}

TEST_F(PublishTest, AFileThatSomebodyMayWriteIsNotLinked) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  ASSERT_EQ(::chmod((store_.version_path("planner", 1) + "/model.gguf").c_str(), 0644), 0);
  EXPECT_EQ(store_.Publish("planner", 2, files_)->linked_bytes, 2u);
}

TEST_F(PublishTest, AFileThatCannotBeMadeDurableIsNotLinked) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"model.gguf", "weights"}}).ok());
  store_.os().FailCall("Sync", 1, EIO);  // Of the file that is there already.
  auto second = store_.Publish("planner", 2, {{"model.gguf", "weights"}});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->linked_bytes, 0u);
  EXPECT_EQ(store_.Publish("planner", 3, {{"model.gguf", "weights"}})->linked_bytes, 7u);
}

TEST_F(PublishTest, ComparingWithWhatIsThereCanBeCancelled) {
  ASSERT_TRUE(store_.Publish("planner", 1, {{"model.gguf", "weights"}}).ok());
  const PublishFile file{"model.gguf", 7};
  int asked = 0;
  const auto until_second = [&](uint64_t) { return ++asked < 2; };
  {
    WriteFile(scratch_ / "src/model.gguf", "weights");
    LinuxOs os;
    auto source = os.OpenFileAt(*os.OpenDir(scratch_ / "src"), "model.gguf");
    auto staged = store_.publisher().Stage("planner", 2, {file});
    ASSERT_TRUE(staged.ok());
    EXPECT_TRUE(absl::IsCancelled((*staged)->AddFile(file, *source, until_second)));
    EXPECT_EQ(asked, 2);
  }
  // A stream asks at its end, and when it meets a version without a manifest of that number.
  WriteFile(store_.version_path("planner", 3) + "/other.gguf", "other", 0444);
  auto staged = store_.publisher().Stage("planner", 3, {{"new.gguf", 3}});
  ASSERT_TRUE(staged.ok());
  (*staged)->OnProgress([](uint64_t) { return false; });
  ASSERT_TRUE((*staged)->AppendBytes({"new.gguf", 3}, std::as_bytes(std::span("new", 3))).ok());
  EXPECT_TRUE(absl::IsCancelled((*staged)->Commit(nullptr, false).status()));
}

TEST_F(PublishTest, WhatTheStoreWouldNotServeIsRefusedAtOnce) {
  std::string deep = "a.gguf";
  for (int i = 0; i < kMostVersionDepth; ++i) deep = "d/" + deep;
  ASSERT_TRUE(store_.Publish("planner", 1, {{deep, "weights"}}).ok());
  EXPECT_TRUE(store_.store().OpenVersion("planner", 1, nullptr).ok());
  const absl::Status refused = store_.Publish("planner", 2, {{"d/" + deep, "weights"}}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("directories deep"));
  std::vector<std::string> many;
  for (size_t i = 0; i <= kMostVersionFiles; ++i) many.push_back(std::to_string(i));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckVersionPaths(many)));
  many.pop_back();
  EXPECT_TRUE(CheckVersionPaths(many).ok());
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, ALinkDoesNotMakeAFileUnverified) {
  ASSERT_TRUE(store_.Publish("planner", 1, files_).ok());
  auto state = store_.os().OpenDir(store_.state());
  auto verified = VerifiedFiles::Load(store_.os(), *state);
  auto opened = store_.store().OpenVersion("planner", 1, nullptr);
  ASSERT_TRUE(opened.ok());
  const Digest digest = opened->manifest->files[0].sha256;
  verified->Record(opened->infos[0], digest);

  Publisher publisher(store_.store(), verified.get());
  const PublishFile file{"copy.gguf", 7};
  auto staged = publisher.Stage("planner", 2, {file});
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE((*staged)->AppendBytes(file, std::as_bytes(std::span("weights", 7))).ok());
  ASSERT_EQ((*staged)->Commit(nullptr, false)->linked_bytes, 7u);
  auto after = store_.os().Stat(opened->files[0]);
  EXPECT_EQ(verified->Find(*after), digest);
}

TEST_F(PublishTest, TheSameBytesAgainAreAlreadyThere) {
  auto first = store_.Publish("planner", 8, files_);
  ASSERT_TRUE(first.ok());
  const uint64_t inode = InodeOf(store_.version_path("planner", 8));
  auto again = store_.Publish("planner", 8, files_);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->already_there);
  EXPECT_EQ(again->digest, first->digest);
  EXPECT_EQ(InodeOf(store_.version_path("planner", 8)), inode);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, OtherBytesUnderTheSameNumberAreRefused) {
  ASSERT_TRUE(store_.Publish("planner", 8, files_).ok());
  for (const bool replace_bad : {false, true}) {
    const absl::Status status =
        store_.Publish("planner", 8, {{"model.gguf", "WEIGHTS"}}, replace_bad).status();
    EXPECT_TRUE(absl::IsAlreadyExists(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("planner@8"));
  }
  EXPECT_EQ(ReadFile(store_.version_path("planner", 8) + "/model.gguf"), "weights");
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, TheLoserOfARaceForANumberIsTold) {
  // Somebody takes the number between our look and our rename.
  store_.os().Before("RenameNoReplace", [&] {
    store_.os().Heal();
    EXPECT_TRUE(store_.Publish("planner", 8, {{"model.gguf", "theirs!"}}).ok());
  });
  EXPECT_TRUE(absl::IsAlreadyExists(store_.Publish("planner", 8, files_).status()));
  store_.os().Before("RenameNoReplace", [&] {
    store_.os().Heal();
    EXPECT_TRUE(store_.Publish("planner", 9, files_).ok());
  });
  auto same = store_.Publish("planner", 9, files_);
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_TRUE(same->already_there);
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, ChecksumsAreHonoured) {
  const TestStore::Files good = {{"a.gguf", "weights"},
                                 {"checksums.sha256", absl::StrCat(Hex("weights"), "  a.gguf\n")}};
  EXPECT_TRUE(store_.Publish("planner", 1, good).ok());
  EXPECT_TRUE(store_.store().OpenVersion("planner", 1, nullptr).ok());

  const TestStore::Files bad = {{"a.gguf", "weightS"},
                                {"checksums.sha256", absl::StrCat(Hex("weights"), "  a.gguf\n")}};
  absl::Status status = store_.Publish("planner", 2, bad).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("a.gguf"));
  EXPECT_THAT(status.message(), HasSubstr(Hex("weights")));
  EXPECT_THAT(status.message(), HasSubstr(Hex("weightS")));

  const TestStore::Files missing = {
      {"a.gguf", "weights"}, {"checksums.sha256", absl::StrCat(Hex("weights"), "  b.gguf\n")}};
  status = store_.Publish("planner", 2, missing).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("b.gguf"));
  EXPECT_FALSE(Exists(2));
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, WhichVersionsAndNamesAreRefusedBeforeAnythingIsWritten) {
  auto stage = [&](const std::string& model, uint64_t version, std::vector<PublishFile> files) {
    return store_.publisher().Stage(model, version, files).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(stage("Planner", 1, {{"a", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 0, {{"a", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", uint64_t{1} << 63, {{"a", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 1, {})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 1, {{"../a", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 1, {{"a", 1}, {"a", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 1, {{"manifest.json", 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(stage("planner", 1, {{"a", UINT64_MAX}, {"b", UINT64_MAX}})));
  const absl::Status full = stage("planner", 1, {{"a", uint64_t{1} << 60}});
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(full.message(), HasSubstr("needs 1152"));
  EXPECT_THAT(Names(Incoming()), IsEmpty());
  EXPECT_EQ(store_.os().calls("CreateFileAt"), 0);
}

// A publish in which the nth call of one kind fails leaves nothing; or it had already happened, and
// publishing again says so.
TEST_F(PublishTest, WhicheverCallFailsNothingIsLeftBehind) {
  uint64_t version = 1;
  ASSERT_TRUE(store_.Publish("planner", version, files_).ok());
  int failures = 0;
  for (const char* call : {"OpenDirAt", "OpenFileAt", "CreateFileAt", "TryLock", "MakeDirAt",
                           "StatAt", "Stat", "FreeBytes", "Allocate", "ReadAt", "WriteAt", "Sync",
                           "SetMode", "Link", "Rename", "RenameNoReplace"}) {
    for (int nth = 1;; ++nth) {
      ++version;
      const TestStore::Files files = {{"model.gguf", "weights"},
                                      {"sub/new.json", absl::StrCat(version)}};
      const int before = store_.os().calls(call);
      store_.os().FailCall(call, nth, ENOSPC);
      auto result = store_.Publish("planner", version, files);
      store_.os().Heal();
      const bool reached = store_.os().calls(call) - before >= nth;
      EXPECT_THAT(Names(Incoming()), IsEmpty()) << call << " " << nth;
      if (result.ok()) {
        EXPECT_TRUE(Exists(version));
      } else {
        ++failures;
        EXPECT_EQ(ErrnoOf(result.status()), ENOSPC) << result.status();
        EXPECT_TRUE(absl::IsResourceExhausted(result.status())) << result.status();
        const bool in_place =
            std::string(result.status().message()).find("is in place") != std::string::npos;
        EXPECT_EQ(Exists(version), in_place) << call << " " << nth << result.status();
        auto again = store_.Publish("planner", version, files);
        ASSERT_TRUE(again.ok()) << again.status();
        EXPECT_EQ(again->already_there, in_place) << call << " " << nth;
      }
      EXPECT_TRUE(store_.store().OpenVersion("planner", version, nullptr).ok());
      if (!reached) break;
    }
  }
  EXPECT_GT(failures, 25);
}

TEST_F(PublishTest, ASourceThatChangesWhileItIsReadIsDataLoss) {
  WriteFile(scratch_ / "src/a.gguf", std::string(1000, 'x'));
  LinuxOs os;
  auto dir = os.OpenDir(scratch_ / "src");
  const PublishFile file{"a.gguf", 1000};
  for (const bool cut : {false, true}) {
    WriteFile(scratch_ / "src/a.gguf", std::string(1000, 'x'));
    auto source = os.OpenFileAt(*dir, "a.gguf");
    auto staged = store_.publisher().Stage("planner", 1, {file});
    ASSERT_TRUE(staged.ok());
    store_.os().Before(
        "ReadAt", [&] { WriteFile(scratch_ / "src/a.gguf", std::string(cut ? 500 : 1000, 'y')); });
    const absl::Status added = (*staged)->AddFile(file, *source, nullptr);
    store_.os().Heal();
    EXPECT_TRUE(absl::IsDataLoss(added)) << added;
    EXPECT_THAT(added.message(), HasSubstr("planner@1: a.gguf: "));
    // There is no going on after it.
    EXPECT_FALSE((*staged)->Commit(nullptr, false).ok());
  }
  EXPECT_FALSE(Exists(1));
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, ASourceThatIsNoFileOrOfAnotherSizeIsRefused) {
  WriteFile(scratch_ / "src/a", "12345");
  LinuxOs os;
  auto dir = os.OpenDir(scratch_ / "src");
  auto source = os.OpenFileAt(*dir, "a");
  auto staged = store_.publisher().Stage("planner", 1, {{"a", 4}, {"b", 5}});
  ASSERT_TRUE(staged.ok());
  EXPECT_TRUE(absl::IsDataLoss((*staged)->AddFile({"a", 4}, *source, nullptr)));
  EXPECT_TRUE(absl::IsInvalidArgument((*staged)->AddFile({"b", 5}, *dir, nullptr)));
  EXPECT_TRUE(absl::IsInvalidArgument((*staged)->AddFile({"c", 5}, *source, nullptr)));
  ASSERT_TRUE((*staged)->AddFile({"b", 5}, *source, nullptr).ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*staged)->AddFile({"b", 5}, *source, nullptr)));
  const absl::Status status = (*staged)->Commit(nullptr, false).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("a: was announced and never sent"));
}

TEST_F(PublishTest, ProgressCountsAllFilesAndCanCancel) {
  WriteFile(scratch_ / "src/a", std::string(100, 'a'));
  WriteFile(scratch_ / "src/b", std::string(50, 'b'));
  LinuxOs os;
  auto dir = os.OpenDir(scratch_ / "src");
  auto a = os.OpenFileAt(*dir, "a");
  auto b = os.OpenFileAt(*dir, "b");
  std::vector<uint64_t> told;
  {
    auto staged = store_.publisher().Stage("planner", 1, {{"a", 100}, {"b", 50}});
    ASSERT_TRUE(staged.ok());
    auto progress = [&](uint64_t bytes) {
      told.push_back(bytes);
      return bytes < 150;
    };
    EXPECT_TRUE((*staged)->AddFile({"a", 100}, *a, progress).ok());
    EXPECT_TRUE(absl::IsCancelled((*staged)->AddFile({"b", 50}, *b, progress)));
  }
  EXPECT_THAT(told, ElementsAre(100, 150));
  EXPECT_THAT(Names(Incoming()), IsEmpty());
}

TEST_F(PublishTest, AStreamInPiecesOfAnySize) {
  const std::string large(kChunkBytes + 12345, 'z');
  const PublishFile first{"large.gguf", large.size()};
  const PublishFile second{"small", 3};
  auto staged = store_.publisher().Stage("planner", 1, {first, second, {"empty", 0}});
  ASSERT_TRUE(staged.ok());
  const auto bytes = std::as_bytes(std::span(large));
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min<size_t>(bytes.size() - at, 1000003);
    ASSERT_TRUE((*staged)->AppendBytes(first, bytes.subspan(at, size)).ok());
    at += size;
  }
  ASSERT_TRUE((*staged)->AppendBytes(second, std::as_bytes(std::span("abc", 3))).ok());
  auto result = (*staged)->Commit(nullptr, false);
  ASSERT_TRUE(result.ok()) << result.status();
  auto opened = store_.store().OpenVersion("planner", 1, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const ManifestFile& file = opened->manifest->files[1];
  EXPECT_EQ(file.path, "large.gguf");
  EXPECT_EQ(file.sha256.Hex(), Hex(large));
  ASSERT_EQ(file.chunks.size(), 2u);
  EXPECT_EQ(file.chunks[0].Hex(), Hex(large.substr(0, kChunkBytes)));
  EXPECT_EQ(file.chunks[1].Hex(), Hex(large.substr(kChunkBytes)));
  EXPECT_TRUE(opened->manifest->files[0].chunks.empty());
}

TEST_F(PublishTest, AStreamMustKeepToWhatItAnnounced) {
  auto bytes = std::as_bytes(std::span("abcdef", 6));
  const PublishFile a{"a", 4};
  const PublishFile b{"b", 2};
  auto staged = store_.publisher().Stage("planner", 1, {a, b});
  EXPECT_TRUE(absl::IsInvalidArgument((*staged)->AppendBytes(a, bytes)));  // Too long.
  EXPECT_TRUE((*staged)->AppendBytes(a, bytes.first(2)).ok());
  EXPECT_TRUE(absl::IsDataLoss((*staged)->AppendBytes(b, bytes.first(2))));  // a was too short.
  staged = store_.publisher().Stage("planner", 1, {a, b});
  EXPECT_TRUE((*staged)->AppendBytes(b, bytes.first(2)).ok());
  EXPECT_TRUE((*staged)->AppendBytes(a, bytes.first(4)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*staged)->AppendBytes(b, bytes.first(2))));  // Twice.
}

TEST_F(PublishTest, ACloneIsHashedAsItIs) {
  LinuxOs real;
  CopyingCloneOs os(real);
  auto store = Store::Open(os, store_.root(), store_.state(), ::geteuid());
  ASSERT_TRUE(store.ok());
  Publisher publisher(**store);
  const std::string bytes(kChunkBytes + 5, 'c');
  WriteFile(scratch_ / "src/a", bytes);
  auto dir = real.OpenDir(scratch_ / "src");
  auto source = real.OpenFileAt(*dir, "a");
  const PublishFile file{"a", bytes.size()};
  auto staged = publisher.Stage("planner", 1, {file});
  ASSERT_TRUE(staged.ok());
  ASSERT_TRUE((*staged)->AddFile(file, *source, nullptr).ok());
  ASSERT_TRUE((*staged)->Commit(nullptr, false).ok());
  EXPECT_EQ(os.clones(), 1);
  auto opened = (*store)->OpenVersion("planner", 1, nullptr);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->manifest->files[0].sha256.Hex(), Hex(bytes));
  EXPECT_EQ(opened->manifest->files[0].chunks.size(), 2u);
}

}  // namespace
}  // namespace modelhost
