#include "daemon/runtime_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

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
  if (::geteuid() != 0) return;  // Only root can make a directory that is another's.
  const std::string path = base_ + "/theirs";
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  const auto owned = TakeDir(os_, path, ::geteuid(), 1);
  EXPECT_EQ(owned.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(owned.status().message()), HasSubstr("uid 65534"));
}

}  // namespace
}  // namespace modelhost
