#include "client/modelctl/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

class OutputFileTest : public ::testing::TestWithParam<OutputFile::Temporary> {
 protected:
  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  std::vector<std::string> Entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }
  std::string Content(const std::string& name) const {
    std::ifstream in(root_ / name, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  absl::StatusOr<OutputFile> Create(const std::string& name, bool replace) const {
    return OutputFile::Create(Path(name), replace, GetParam());
  }
  static absl::Status Append(OutputFile& file, const std::string& text) {
    return file.Append(std::as_bytes(std::span<const char>(text)));
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
};

TEST_P(OutputFileTest, TheNameAppearsWithTheCommitAndNothingElseStays) {
  {
    auto file = Create("t", false);
    ASSERT_TRUE(file.ok()) << file.status();
    // More than the buffer, in pieces of all sizes.
    std::string expected;
    for (int i = 0; i < 40; ++i) {
      const std::string piece(static_cast<size_t>(1) << (i % 22), static_cast<char>('a' + i % 26));
      ASSERT_TRUE(Append(*file, piece).ok());
      expected += piece;
    }
    ASSERT_TRUE(file->AppendZeros(100).ok());
    expected += std::string(100, '\0');
    EXPECT_EQ(file->size(), expected.size());
    ASSERT_TRUE(file->Sync().ok());
    EXPECT_FALSE(fs::exists(Path("t")));
    const auto mapping = file->Map();
    ASSERT_TRUE(mapping.ok());
    EXPECT_EQ(mapping->bytes().size(), expected.size());
    ASSERT_TRUE(file->Commit().ok());
    EXPECT_EQ(Content("t"), expected);
  }
  EXPECT_THAT(Entries(), ElementsAre("t"));
}

TEST_P(OutputFileTest, WithoutACommitNothingStays) {
  {
    auto file = Create("t", false);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(Append(*file, "x").ok());
    ASSERT_TRUE(file->Sync().ok());
  }
  EXPECT_THAT(Entries(), IsEmpty());
}

TEST_P(OutputFileTest, WhatIsThereIsLeftAlone) {
  std::ofstream(Path("t")) << "old";
  EXPECT_EQ(Create("t", false).status().code(), absl::StatusCode::kAlreadyExists);
  fs::remove(Path("t"));
  // It came meanwhile, as a file or as a link to nowhere.
  for (const bool link : {false, true}) {
    auto file = Create("t", false);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(Append(*file, "new").ok());
    ASSERT_TRUE(file->Sync().ok());
    if (link) {
      fs::create_symlink("nowhere", Path("t"));
    } else {
      std::ofstream(Path("t")) << "old";
    }
    EXPECT_EQ(file->Commit().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(fs::is_symlink(Path("t")), link);
    EXPECT_EQ(Content("t"), link ? "" : "old");
    fs::remove(Path("t"));
  }
  EXPECT_THAT(Entries(), IsEmpty());
}

TEST_P(OutputFileTest, ReplacingTakesTheNameAndNotWhatALinkLeadsTo) {
  std::ofstream(Path("t")) << "old";
  std::ofstream(Path("elsewhere")) << "kept";
  fs::create_symlink("elsewhere", Path("link"));
  for (const std::string name : {"t", "link", "fresh"}) {
    auto file = Create(name, true);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(Append(*file, "new").ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(file->Commit().ok());
    EXPECT_EQ(Content(name), "new");
    EXPECT_FALSE(fs::is_symlink(Path(name)));
  }
  EXPECT_EQ(Content("elsewhere"), "kept");
  EXPECT_THAT(Entries(), ::testing::UnorderedElementsAre("t", "link", "fresh", "elsewhere"));
}

TEST_P(OutputFileTest, WhatIsNoFileIsNotReplaced) {
  fs::create_directory(Path("folder"));
  ASSERT_EQ(::mkfifo(Path("fifo").c_str(), 0600), 0);
  for (const char* name : {"folder", "fifo"}) {
    EXPECT_EQ(Create(name, true).status().code(), absl::StatusCode::kAlreadyExists) << name;
  }
}

TEST_P(OutputFileTest, AFolderThatIsNotThereIsNamed) {
  const auto file = Create("none/t", false);
  EXPECT_EQ(file.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(Path("none")));
  std::ofstream(Path("plain")) << "x";
  EXPECT_FALSE(Create("plain/t", false).ok());
}

TEST_P(OutputFileTest, TheFileIsAsOpenAsTheMaskOfTheUserSays) {
  const mode_t before = ::umask(027);
  auto file = Create("t", false);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->Sync().ok());
  ASSERT_TRUE(file->Commit().ok());
  ::umask(before);
  struct stat info {};
  ASSERT_EQ(::stat(Path("t").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST_P(OutputFileTest, WhatAKilledProcessLeftIsNotInTheWay) {
  const std::string left = ".t.partial-" + std::to_string(::getpid());
  std::ofstream(Path(left)) << "left";
  std::ofstream(Path(left + "-1")) << "left";
  std::ofstream(Path("t")) << "old";
  auto file = Create("t", true);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(Append(*file, "new").ok());
  ASSERT_TRUE(file->Sync().ok());
  const absl::Status status = file->Commit();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Content("t"), "new");
  EXPECT_EQ(Content(left), "left");
  EXPECT_THAT(Entries(), ::testing::UnorderedElementsAre("t", left, left + "-1"));
}

TEST_P(OutputFileTest, RoomIsAskedForBeforeTheFirstByte) {
  auto file = Create("t", false);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->CheckSpace(1).ok());
  for (const uint64_t bytes : {uint64_t{1} << 62, UINT64_MAX}) {
    const absl::Status status = file->CheckSpace(bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()), HasSubstr("t: needs " + std::to_string(bytes) +
                                                         " bytes, and its file system has "));
  }
}

TEST_P(OutputFileTest, LongNamesLeaveRoomForTheTemporary) {
  auto file = Create(std::string(255, 'n'), true);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Sync().ok());
  EXPECT_TRUE(file->Commit().ok());
  EXPECT_FALSE(Create(std::string(256, 'n'), true).ok());
}

INSTANTIATE_TEST_SUITE_P(Both, OutputFileTest,
                         ::testing::Values(OutputFile::Temporary::kUnnamed,
                                           OutputFile::Temporary::kNamed));

}  // namespace
}  // namespace modelhost::modelctl
