#include "daemon/platform/dir_watcher.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "daemon/platform/event_loop.h"
#include "daemon/platform/linux_os.h"

namespace modelhost {
namespace {

class DirWatcherTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "/dir_watcher_XXXXXX";
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    auto loop = EventLoop::Create(clock_);
    ASSERT_TRUE(loop.ok());
    loop_ = *std::move(loop);
    auto watcher = DirWatcher::Create(*loop_, clock_, {.settle = absl::Milliseconds(30)}, [this] {
      ++changes_;
      if (on_change_) on_change_();
    });
    ASSERT_TRUE(watcher.ok()) << watcher.status();
    watcher_ = *std::move(watcher);
  }
  void TearDown() override {
    watcher_.reset();
    LinuxOs os;
    auto parent = os.OpenDir(testing::TempDir() + "/");
    ASSERT_TRUE(os.RemoveTreeAt(*parent, path_.substr(path_.rfind('/') + 1)).ok());
  }
  void Make(const std::string& name) const {
    ASSERT_EQ(::mkdir((path_ + "/" + name).c_str(), 0700), 0);
  }

  SystemClock clock_;
  std::string path_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<DirWatcher> watcher_;
  int changes_ = 0;
  std::function<void()> on_change_;
};

TEST_F(DirWatcherTest, ManyChangesAreToldOnce) {
  ASSERT_TRUE(watcher_->SetPaths({path_}).ok());
  on_change_ = [this] { loop_->Quit(); };
  for (int i = 0; i < 20; ++i) Make(std::to_string(i));
  loop_->Run();
  EXPECT_EQ(changes_, 1);
}

TEST_F(DirWatcherTest, ARenameInAndARemovalAreTold) {
  Make("out");
  Make("out/x");
  Make("in");
  ASSERT_TRUE(watcher_->SetPaths({path_ + "/in"}).ok());
  on_change_ = [this] {
    if (changes_ == 1) {
      ASSERT_EQ(::rmdir((path_ + "/in/x").c_str()), 0);
    } else {
      loop_->Quit();
    }
  };
  ASSERT_EQ(::rename((path_ + "/out/x").c_str(), (path_ + "/in/x").c_str()), 0);
  loop_->Run();
  EXPECT_EQ(changes_, 2);
}

TEST_F(DirWatcherTest, PathsThatAreNotThereAreSkippedAndOldOnesForgotten) {
  Make("a");
  Make("b");
  ASSERT_TRUE(watcher_->SetPaths({path_ + "/a", path_ + "/none"}).ok());
  ASSERT_TRUE(watcher_->SetPaths({path_ + "/b"}).ok());
  Make("a/x");  // No longer watched.
  loop_->PostDelayed(absl::Milliseconds(100), [this] {
    EXPECT_EQ(changes_, 1);  // That "b" is watched now, and not "a/x".
    on_change_ = [this] { loop_->Quit(); };
    Make("b/x");
  });
  loop_->Run();
  EXPECT_EQ(changes_, 2);
}

TEST_F(DirWatcherTest, WhatCameBeforeTheWatchIsToldOnce) {
  Make("early");
  ASSERT_TRUE(watcher_->SetPaths({path_}).ok());
  // As the owner does: look again, and say what is to be watched.
  on_change_ = [this] { ASSERT_TRUE(watcher_->SetPaths({path_}).ok()); };
  loop_->PostDelayed(absl::Milliseconds(150), [this] { loop_->Quit(); });
  loop_->Run();
  EXPECT_EQ(changes_, 1);
}

}  // namespace
}  // namespace modelhost
