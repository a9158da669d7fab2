#include "client/modelctl/source_files.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

class SourceFilesTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  Outcome<SourceSet> Collect() { return CollectSource(root_ / "in"); }
  std::vector<std::string> Paths(const SourceSet& set) {
    std::vector<std::string> paths;
    for (const SourceFile& file : set.files) paths.push_back(file.path);
    return paths;
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
};

TEST_F(SourceFilesTest, TakesRegularFilesInSubfoldersSortedByPath) {
  Write("in/model.gguf", "12345");
  Write("in/a/config.json", "{}");
  const auto set = Collect();
  ASSERT_TRUE(set.ok()) << set.exit().error;
  EXPECT_EQ(Paths(*set), (std::vector<std::string>{"a/config.json", "model.gguf"}));
  EXPECT_EQ(set->bytes, 7u);
  EXPECT_TRUE(set->skipped.empty());
}

TEST_F(SourceFilesTest, FollowsLinksToFilesAsDownloadCachesHaveThem) {
  Write("models--x/blobs/abc", "1234");
  const fs::path snapshot = root_ / "models--x/snapshots/0f1e";
  fs::create_directories(snapshot / "sub");
  fs::create_symlink("../../blobs/abc", snapshot / "model.safetensors");
  fs::create_symlink("../../../blobs/abc", snapshot / "sub/second.safetensors");
  fs::create_symlink("model.safetensors", snapshot / "same.safetensors");
  const auto set = CollectSource(snapshot);
  ASSERT_TRUE(set.ok()) << set.exit().error;
  ASSERT_EQ(Paths(*set), (std::vector<std::string>{"model.safetensors", "same.safetensors",
                                                   "sub/second.safetensors"}));
  EXPECT_EQ(set->bytes, 12u);
  EXPECT_TRUE(OpenSource(set->files[0]).ok());
}

TEST_F(SourceFilesTest, RefusesLinksThatLeadOutOfTheFolder) {
  Write("secret", "1234");
  Write("in/model.gguf", "1");
  fs::create_symlink("../secret", root_ / "in/escape.json");
  auto set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_EQ(set.exit().code, ExitCode::kIntegrity);
  EXPECT_NE(set.exit().error.find("in/escape.json: a link that leads out"), std::string::npos);
  // A folder whose name begins with this one's is another folder.
  fs::remove(root_ / "in/escape.json");
  Write("in2/x", "1");
  fs::create_symlink("../in2/x", root_ / "in/escape.json");
  EXPECT_FALSE(Collect().ok());
}

TEST_F(SourceFilesTest, ADownloadCacheStandsForTheSnapshotThatMainNames) {
  Write("models--x/blobs/abc", "1234");
  Write("models--x/refs/main", "0f1e\n");
  Write("models--x/snapshots/0f1e/config.json", "{}");
  Write("models--x/snapshots/older/config.json", "{}");
  fs::create_symlink("../../blobs/abc", root_ / "models--x/snapshots/0f1e/model.safetensors");
  auto set = CollectSource(root_ / "models--x");
  ASSERT_TRUE(set.ok()) << set.exit().error;
  EXPECT_EQ(Paths(*set), (std::vector<std::string>{"config.json", "model.safetensors"}));
  fs::remove(root_ / "models--x/refs/main");
  set = CollectSource(root_ / "models--x");
  ASSERT_FALSE(set.ok());
  EXPECT_EQ(set.exit().code, ExitCode::kIntegrity);
  EXPECT_NE(set.exit().error.find("snapshots/0f1e, snapshots/older"), std::string::npos);
}

TEST_F(SourceFilesTest, BlobsBesideWhatIsNoSnapshotAreOutOfReach) {
  Write("x/blobs/abc", "1234");
  fs::create_directories(root_ / "x/revisions/r");
  fs::create_symlink("../../blobs/abc", root_ / "x/revisions/r/model.safetensors");
  EXPECT_FALSE(CollectSource(root_ / "x/revisions/r").ok());
}

TEST_F(SourceFilesTest, RefusesLinksToFoldersAndLinksToNowhere) {
  Write("in/model.gguf", "1");
  Write("other/x", "1");
  fs::create_symlink("../other", root_ / "in/sub");
  auto set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_EQ(set.exit().code, ExitCode::kIntegrity);
  EXPECT_NE(set.exit().error.find("in/sub: a link to a folder"), std::string::npos);
  fs::remove(root_ / "in/sub");
  fs::create_symlink("nowhere", root_ / "in/gone");
  set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_NE(set.exit().error.find("in/gone: a link that leads nowhere"), std::string::npos);
}

TEST_F(SourceFilesTest, RefusesSocketsAndFifosByName) {
  Write("in/model.gguf", "1");
  ASSERT_EQ(::mkfifo((root_ / "in/pipe").c_str(), 0600), 0);
  auto set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_NE(set.exit().error.find("in/pipe: a FIFO"), std::string::npos);
  fs::remove(root_ / "in/pipe");

  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (root_ / "in/sock").c_str(), sizeof(address.sun_path) - 1);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_NE(set.exit().error.find("in/sock: a socket"), std::string::npos);
}

TEST_F(SourceFilesTest, SaysWhatItSkips) {
  Write("in/model.gguf", "1");
  Write("in/.git/HEAD", "x");
  Write("in/manifest.json", R"({"schema": 1, "digest": "ab"})");
  const auto set = Collect();
  ASSERT_TRUE(set.ok()) << set.exit().error;
  EXPECT_EQ(Paths(*set), std::vector<std::string>{"model.gguf"});
  EXPECT_EQ(set->skipped.size(), 2u);
}

TEST_F(SourceFilesTest, RefusesAManifestThatIsNotTheStores) {
  Write("in/model.gguf", "1");
  Write("in/manifest.json", R"({"name": "a web app"})");
  const auto set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_NE(set.exit().error.find("rename yours"), std::string::npos);
}

TEST_F(SourceFilesTest, AFifoInPlaceOfASmallFileBlocksNothing) {
  Write("in/model.gguf", "1");
  ASSERT_EQ(::mkfifo((root_ / "in/manifest.json").c_str(), 0600), 0);
  const auto set = Collect();
  ASSERT_FALSE(set.ok());
  EXPECT_NE(set.exit().error.find("in/manifest.json: a FIFO"), std::string::npos);

  Write("models--x/blobs/abc", "1234");
  Write("models--x/snapshots/0f1e/config.json", "{}");
  fs::create_directories(root_ / "models--x/refs");
  ASSERT_EQ(::mkfifo((root_ / "models--x/refs/main").c_str(), 0600), 0);
  const auto cache = CollectSource(root_ / "models--x");
  ASSERT_TRUE(cache.ok()) << cache.exit().error;
  EXPECT_EQ(Paths(*cache), std::vector<std::string>{"config.json"});
}

TEST_F(SourceFilesTest, OfACopyOfAVersionItsRequirementsAreKept) {
  Write("in/model.engine", "1");
  Write("in/manifest.json",
        R"({"schema": 1, "model": "m", "requires": {"tensorrt": "10.3.0"}, "files": [{"a": 1}], )"
        R"("digest": "ab"})");
  auto set = Collect();
  ASSERT_TRUE(set.ok()) << set.exit().error;
  EXPECT_EQ(set->manifest_requires, (Requirements{{"tensorrt", "10.3.0"}}));
  // One of which it cannot be known what it requires is no manifest to leave out.
  for (const char* text : {R"({"schema": 1, "digest": "ab", "requires": {"tensorrt": 10}})",
                           R"({"schema": 1, "digest": "ab", "requires": {"tensorrt": "ten"}})",
                           R"({"schema": 1, "digest": "ab", "requires")"}) {
    Write("in/manifest.json", text);
    EXPECT_EQ(Collect().exit().code, ExitCode::kIntegrity) << text;
  }
}

TEST_F(SourceFilesTest, RefusesNamesThatNoVersionMayHave) {
  Write("in/a\\b.gguf", "1");
  EXPECT_FALSE(Collect().ok());
  fs::remove(root_ / "in/a\\b.gguf");
  Write("in/a\xff.gguf", "1");
  EXPECT_FALSE(Collect().ok());
}

TEST_F(SourceFilesTest, NothingToPublishIsAnErrorAndSoIsNoFolder) {
  fs::create_directories(root_ / "in");
  EXPECT_EQ(Collect().exit().code, ExitCode::kIntegrity);
  EXPECT_EQ(CollectSource(root_ / "none").exit().code, ExitCode::kNotFound);
}

TEST_F(SourceFilesTest, AFileThatGrewMeanwhileIsNotSent) {
  Write("in/model.gguf", "1");
  const auto set = Collect();
  ASSERT_TRUE(set.ok());
  Write("in/model.gguf", "12");
  const auto fd = OpenSource(set->files[0]);
  ASSERT_FALSE(fd.ok());
  EXPECT_EQ(fd.exit().code, ExitCode::kConflict);
}

TEST_F(SourceFilesTest, ASingleFileKeepsItsName) {
  Write("in/model.gguf", "123");
  const auto set = CollectSource(root_ / "in/model.gguf");
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(Paths(*set), std::vector<std::string>{"model.gguf"});
  SourceFileSource source(*set);
  ASSERT_TRUE(source.Open("model.gguf").ok());
  EXPECT_EQ(source.Open("model.gguf")->size(), 3u);
  EXPECT_FALSE(source.Open("other").ok());
}

}  // namespace
}  // namespace modelhost::modelctl
