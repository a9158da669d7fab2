#include "daemon/runtime_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/platform/linux_os.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

class RuntimeDir : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "runtime_dir_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(base_); }

  LinuxOs os_;
  std::string base_;
};

TEST_F(RuntimeDir, IsMadeForUsAlone) {
  const auto owned = TakeDir(os_, base_ + "/a/b", ::geteuid(), 123);
  ASSERT_TRUE(owned.ok()) << owned.status();
  const auto info = os_.Stat(owned->dir);
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->mode & 0777, 0700U);
}

TEST_F(RuntimeDir, ASecondDaemonIsToldWhoHasIt) {
  const auto first = TakeDir(os_, base_ + "/run", ::geteuid(), 4711);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = TakeDir(os_, base_ + "/run", ::geteuid(), 4712);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("pid 4711"));
}

TEST_F(RuntimeDir, IsFreeAgainWhenItsHolderIsGone) {
  { ASSERT_TRUE(TakeDir(os_, base_ + "/run", ::geteuid(), 1).ok()); }
  EXPECT_TRUE(TakeDir(os_, base_ + "/run", ::geteuid(), 2).ok());
}

TEST_F(RuntimeDir, OneThatOthersMayWriteIsRefused) {
  const std::string path = base_ + "/open";
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  const auto owned = TakeDir(os_, path, ::geteuid(), 1);
  EXPECT_EQ(owned.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(owned.status().message()), HasSubstr("chmod go-w"));
}

TEST_F(RuntimeDir, OneOfSomebodyElseIsRefused) {
  // Ours is what we say: a directory of this user's is somebody else's for another uid. As root the
  // owner is changed instead, since root's directories are good for anybody.
  const std::string path = base_ + "/theirs";
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  }
  const uint32_t owner = root ? 65534 : ::geteuid();
  const auto owned = TakeDir(os_, path, root ? 0 : owner + 1, 1);
  EXPECT_EQ(owned.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(owned.status().message()), HasSubstr(absl::StrCat("uid ", owner)));
}

TEST_F(RuntimeDir, AParentThatOthersMayWriteIsRefusedUnlessItIsSticky) {
  // Who may rename entries of the parent could put a directory of their own in our place.
  const std::string parent = base_ + "/parent";
  ASSERT_EQ(::mkdir(parent.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(parent.c_str(), 0777), 0);
  const auto refused = TakeDir(os_, parent + "/run", ::geteuid(), 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(parent + ": others may write"));
  ASSERT_EQ(::chmod(parent.c_str(), 01777), 0);  // As /tmp.
  EXPECT_TRUE(TakeDir(os_, parent + "/run", ::geteuid(), 1).ok());
}

}  // namespace
}  // namespace modelhost
