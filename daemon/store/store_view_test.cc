// Serving through a read-only mount of the store: real mounts, in a mount namespace of the test's
// own.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "daemon/store/store_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr int kNoNamespace = 77;

bool EnterOwnMounts() {
  const bool inside = ::unshare(::geteuid() == 0 ? CLONE_NEWNS : CLONE_NEWUSER | CLONE_NEWNS) == 0;
  return inside && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

class StoreViewTest : public ::testing::Test {
 protected:
  StoreViewTest() { std::filesystem::create_directory(view_); }

  // Mounts die with the child, which `body` runs in.
  void InOwnMounts(const std::function<void()>& body) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (!EnterOwnMounts()) ::_exit(kNoNamespace);
      body();
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNoNamespace) {
      GTEST_SKIP() << "no mount namespace to be had";
    }
    EXPECT_EQ(status, 0) << "see the failures above";
  }
  void Bind(const std::string& from, const std::string& to, bool read_only) {
    ASSERT_EQ(::mount(from.c_str(), to.c_str(), nullptr, MS_BIND | MS_REC, nullptr), 0);
    if (!read_only) return;
    ASSERT_EQ(::mount(nullptr, to.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr), 0)
        << errno;
  }
  absl::StatusOr<std::unique_ptr<Store>> Open() {
    return Store::Open(store_.os(), store_.root(), store_.state(), ::geteuid(), view_);
  }
  static int ReopenForWriting(const UniqueFd& fd) {
    const UniqueFd again(
        ::open(absl::StrCat("/proc/self/fd/", fd.get()).c_str(), O_RDWR | O_CLOEXEC));
    return again.valid() ? 0 : errno;
  }

  ScratchDir scratch_;
  TestStore store_{scratch_.path()};
  const std::string view_ = scratch_ / "view";
};

TEST_F(StoreViewTest, WhatIsServedCannotBeOpenedForWritingNotEvenByRoot) {
  InOwnMounts([&] {
    ASSERT_TRUE(store_.Publish("planner", 1, {{"a.gguf", "weights"}, {"sub/t.json", "{}"}}).ok());
    Bind(store_.root(), view_, /*read_only=*/true);
    auto store = Open();
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE((*store)->read_only());
    auto files = (*store)->OpenVersion("planner", 1, nullptr);
    ASSERT_TRUE(files.ok()) << files.status();
    ASSERT_EQ(files->files.size(), 2u);
    for (const UniqueFd& file : files->files) EXPECT_EQ(ReopenForWriting(file), EROFS);

    if (::geteuid() != 0) return;
    auto without = store_.store().OpenVersion("planner", 1, nullptr);
    ASSERT_TRUE(without.ok());
    EXPECT_FALSE(store_.store().read_only());
    EXPECT_EQ(ReopenForWriting(without->files[0]), 0) << "a mode does not stop root";
  });
}

TEST_F(StoreViewTest, WhatIsPublishedLaterIsServedToo) {
  InOwnMounts([&] {
    Bind(store_.root(), view_, /*read_only=*/true);
    auto store = Open();
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE(absl::IsNotFound((*store)->OpenVersion("planner", 1, nullptr).status()));
    // As the daemon does: staged, linked and renamed in the same Store.
    Publisher publisher(**store);
    auto staged = publisher.Stage("planner", 1, {{"a.gguf", 7}}, {});
    ASSERT_TRUE(staged.ok()) << staged.status();
    WriteFile(scratch_ / "source/a.gguf", "weights");
    LinuxOs real;
    auto dir = real.OpenDir(scratch_ / "source");
    auto source = real.OpenFileAt(*dir, "a.gguf");
    ASSERT_TRUE((*staged)->AddFile({"a.gguf", 7}, *source, nullptr).ok());
    auto done = (*staged)->Commit([](const std::string&) { return true; }, false);
    ASSERT_TRUE(done.ok()) << done.status();
    auto files = (*store)->OpenVersion("planner", 1, nullptr);
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(ReopenForWriting(files->files[0]), EROFS);
    EXPECT_TRUE((*store)->SetResidency("planner", Residency::kSealed).ok());
  });
}

TEST_F(StoreViewTest, AMountBelowTheStoreThatTheViewDoesNotShareIsNotServed) {
  InOwnMounts([&] {
    ASSERT_TRUE(store_.Publish("planner", 1, {{"a.gguf", "weights"}}).ok());
    ASSERT_TRUE(store_.Publish("planner", 2, {{"a.gguf", "another"}}).ok());
    Bind(store_.root(), view_, /*read_only=*/true);
    auto store = Open();
    ASSERT_TRUE(store.ok()) << store.status();
    // A writable mount in the view: the same directory, but not protected.
    Bind(store_.version_path("planner", 1), view_ + "/models/planner/versions/1", false);
    const absl::Status writable = (*store)->OpenVersion("planner", 1, nullptr).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(writable)) << writable;
    EXPECT_THAT(writable.message(), HasSubstr("a.gguf: is not on a read-only mount"));
    // Another directory there than in the store.
    Bind(store_.version_path("planner", 1), view_ + "/models/planner/versions/2", true);
    const absl::Status other = (*store)->OpenVersion("planner", 2, nullptr).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
    EXPECT_THAT(other.message(), HasSubstr("planner@2: its directory: is not the same in"));
    // A publish of the same bytes takes it for no bad version that it may replace.
    auto staged = Publisher(**store, nullptr).Stage("planner", 2, {{"a.gguf", 7}}, {});
    ASSERT_TRUE(staged.ok()) << staged.status();
    LinuxOs real;
    auto source = real.OpenFileAt(*real.OpenDir(store_.version_path("planner", 2)), "a.gguf");
    ASSERT_TRUE((*staged)->AddFile({"a.gguf", 7}, *source, nullptr).ok());
    const auto again = (*staged)->Commit([](const std::string&) { return true; }, false);
    EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
  });
}

TEST_F(StoreViewTest, AViewThatMayBeWrittenToIsRefused) {
  InOwnMounts([&] {
    Bind(store_.root(), view_, /*read_only=*/false);
    const absl::Status status = Open().status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(view_));
    EXPECT_THAT(status.message(), HasSubstr("no read-only mount"));
    EXPECT_THAT(status.message(), HasSubstr("BindReadOnlyPaths="));
  });
}

TEST_F(StoreViewTest, AViewOfSomethingElseIsRefused) {
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr(view_));
  EXPECT_THAT(status.message(), HasSubstr("is not the store"));
  std::filesystem::remove(view_);
  EXPECT_TRUE(absl::IsNotFound(Open().status()));
}

TEST_F(StoreViewTest, AFailureToAskIsAnError) {
  store_.os().FailCall("OnReadOnlyMount", 1, EIO);
  EXPECT_TRUE(absl::IsDataLoss(
      Store::Open(store_.os(), store_.root(), store_.state(), ::geteuid(), store_.root())
          .status()));
}

}  // namespace
}  // namespace modelhost
