#include "daemon/platform/linux_os.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <thread>

#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// How long a turn of the calling thread is; 0 where the kernel (before 6.12) has no such thing.
uint64_t TurnNs() {
  uint64_t attributes[6] = {};  // sched_getattr(2); the fourth is sched_runtime.
  EXPECT_EQ(::syscall(SYS_sched_getattr, 0, attributes, sizeof(attributes), 0), 0);
  return attributes[3];
}

class LinuxOsTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "linux_os_XXXXXX";
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    auto dir = os_.OpenDir(path_);
    ASSERT_TRUE(dir.ok()) << dir.status();
    dir_ = *std::move(dir);
  }
  void TearDown() override {
    auto parent = os_.OpenDir(testing::TempDir() + "/");
    ASSERT_TRUE(parent.ok()) << parent.status();
    EXPECT_TRUE(os_.RemoveTreeAt(*parent, path_.substr(path_.rfind('/') + 1)).ok());
  }
  void Write(const std::string& name, const std::string& text) {
    auto file = os_.CreateFileAt(dir_, name, 0600);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(os_.WriteAt(*file, 0, Bytes(text)).ok());
  }

  LinuxOs os_;
  std::string path_;
  UniqueFd dir_;
};

TEST_F(LinuxOsTest, ReadsBackWhatItWrote) {
  Write("a", "hello");
  auto file = os_.OpenFileAt(dir_, "a");
  ASSERT_TRUE(file.ok()) << file.status();
  std::string text(8, '.');
  auto got = os_.ReadAt(*file, 1, std::as_writable_bytes(std::span(text)));
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(*got, 4U);
  EXPECT_EQ(text.substr(0, 4), "ello");
  EXPECT_EQ(os_.Stat(*file)->bytes, 5U);
  EXPECT_EQ(::fcntl(file->get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(file->get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(LinuxOsTest, RefusesSymlinksAnywhereInAName) {
  Write("real", "x");
  ASSERT_EQ(::symlinkat("real", dir_.get(), "link"), 0);
  ASSERT_EQ(::mkdirat(dir_.get(), "d", 0700), 0);
  ASSERT_EQ(::symlinkat("d", dir_.get(), "dlink"), 0);
  Write("d/x", "x");
  EXPECT_EQ(os_.OpenFileAt(dir_, "link").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(os_.OpenFileAt(dir_, "link").status().message()),
              HasSubstr(path_ + "/link: is a symbolic link"));
  EXPECT_EQ(os_.OpenDirAt(dir_, "dlink").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(os_.OpenFileAt(dir_, "d/x").ok());
  EXPECT_FALSE(os_.OpenFileAt(dir_, "dlink/x").ok());
  EXPECT_EQ(os_.StatAt(dir_, "link")->kind, FileKind::kSymlink);
  EXPECT_EQ(os_.Link(dir_, "link", dir_, "l2").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(os_.OpenDir(path_ + "/dlink").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(LinuxOsTest, RefusesNamesThatLeaveTheDirectory) {
  for (const std::string name : {"", "../x", "a/../b", "/etc/passwd", "a//b", "./a", ".."}) {
    EXPECT_FALSE(os_.OpenFileAt(dir_, name).ok()) << name;
    EXPECT_FALSE(os_.CreateFileAt(dir_, name, 0600).ok()) << name;
    EXPECT_FALSE(os_.RemoveFileAt(dir_, name).ok()) << name;
  }
}

TEST_F(LinuxOsTest, DoesNotWaitForAFifo) {
  ASSERT_EQ(::mkfifoat(dir_.get(), "fifo", 0600), 0);
  EXPECT_EQ(os_.OpenFileAt(dir_, "fifo").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(LinuxOsTest, ErrorsNameThePathAndCarryTheErrno) {
  const absl::Status missing = os_.OpenFileAt(dir_, "nope").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrnoOf(missing), ENOENT);
  EXPECT_THAT(std::string(missing.message()), HasSubstr(path_ + "/nope"));
  Write("a", "1");
  EXPECT_EQ(os_.CreateFileAt(dir_, "a", 0600).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(LinuxOsTest, RenameNoReplaceReplacesNothing) {
  Write("a", "1");
  Write("b", "2");
  EXPECT_EQ(os_.RenameNoReplace(dir_, "a", dir_, "b").code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(os_.Rename(dir_, "a", dir_, "b").ok());
  EXPECT_TRUE(os_.RenameNoReplace(dir_, "b", dir_, "c").ok());
  EXPECT_EQ(os_.StatAt(dir_, "c")->bytes, 1U);
}

TEST_F(LinuxOsTest, ListsSortedWithKinds) {
  Write("b", "");
  ASSERT_TRUE(os_.MakeDirAt(dir_, "a", 0700).ok());
  ASSERT_EQ(::symlinkat("b", dir_.get(), "c"), 0);
  auto entries = os_.ListDir(dir_);
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 3U);
  EXPECT_EQ((*entries)[0].name, "a");
  EXPECT_EQ((*entries)[0].kind, FileKind::kDirectory);
  EXPECT_EQ((*entries)[1].kind, FileKind::kRegular);
  EXPECT_EQ((*entries)[2].kind, FileKind::kSymlink);
}

TEST_F(LinuxOsTest, RemovesWriteProtectedTreesAndNotWhatLinksPointTo) {
  Write("kept", "x");
  ASSERT_TRUE(os_.MakeDirs(path_ + "/t/u/v", 0700).ok());
  Write("t/u/v/f", "x");
  ASSERT_EQ(::symlinkat("../kept", dir_.get(), "t/link"), 0);
  ASSERT_EQ(::symlinkat("..", dir_.get(), "t/up"), 0);
  ASSERT_EQ(::fchmodat(dir_.get(), "t/u/v", 0555, 0), 0);
  ASSERT_EQ(::fchmodat(dir_.get(), "t/u", 0, 0), 0);
  EXPECT_TRUE(os_.RemoveTreeAt(dir_, "t").ok());
  EXPECT_EQ(os_.StatAt(dir_, "t").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(os_.StatAt(dir_, "kept").ok());
}

TEST_F(LinuxOsTest, OnlyOneHasALock) {
  Write("lock", "");
  auto a = os_.OpenFileAt(dir_, "lock");
  auto b = os_.OpenFileAt(dir_, "lock");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_TRUE(os_.TryLock(*a).ok());
  EXPECT_EQ(os_.TryLock(*b).code(), absl::StatusCode::kUnavailable);
  a->Reset();
  EXPECT_TRUE(os_.TryLock(*b).ok());
}

TEST_F(LinuxOsTest, AllocateRefusesWhatDoesNotFit) {
  auto file = os_.CreateFileAt(dir_, "big", 0600);
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(os_.Allocate(*file, 0).ok());
  EXPECT_TRUE(os_.Allocate(*file, 4096).ok());
  EXPECT_EQ(os_.Allocate(*file, uint64_t{1} << 50).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(LinuxOsTest, CloneSaysWhereItCannot) {
  Write("from", "x");
  auto from = os_.OpenFileAt(dir_, "from");
  auto to = os_.CreateFileAt(dir_, "to", 0600);
  ASSERT_TRUE(from.ok() && to.ok());
  const absl::Status cloned = os_.Clone(*from, *to);
  EXPECT_TRUE(cloned.ok() || absl::IsUnimplemented(cloned)) << cloned;
}

TEST_F(LinuxOsTest, PopulateOfATruncatedFileIsAnErrorAndNoSignal) {
  constexpr size_t kBytes = 1 << 20;
  Write("f", std::string(kBytes, 'x'));
  const int fd = ::openat(dir_.get(), "f", O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  void* at = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(at), kBytes);
  EXPECT_TRUE(os_.Populate(bytes).ok());
  EXPECT_EQ(os_.ResidentBytes(bytes).value(), kBytes);
  ASSERT_EQ(::ftruncate(fd, 4096), 0);
  EXPECT_EQ(os_.Populate(bytes).code(), absl::StatusCode::kDataLoss);
  ::munmap(at, kBytes);
  ::close(fd);
}

TEST_F(LinuxOsTest, SetsTheIoPriorityOfTheThread) {
  EXPECT_TRUE(os_.SetIoPriority("best-effort:6").ok());
  EXPECT_TRUE(os_.SetIoPriority("idle").ok());
  EXPECT_TRUE(os_.SetIoPriority("none").ok());
  for (const char* bad : {"", "best-effort", "best-effort:8", "best-effort:-1", "realtime:1"}) {
    EXPECT_EQ(os_.SetIoPriority(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST_F(LinuxOsTest, AThreadInTheBackgroundGivesWayAndOthersDoNot) {
  errno = 0;
  const int mine = ::getpriority(PRIO_PROCESS, 0);
  const uint64_t turn = TurnNs();
  std::thread background([&] {
    ASSERT_TRUE(os_.MakeThreadBackground().ok());
    EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), std::min(mine + 10, 19));
    EXPECT_EQ(::sched_getscheduler(0), SCHED_BATCH);
    if (turn > 0) {
      EXPECT_EQ(TurnNs(), 100'000U);
    }
    // What it begins gives way too: parsing is part of a load.
    std::thread child([&] { EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), std::min(mine + 10, 19)); });
    child.join();
  });
  background.join();
  EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), mine);
  EXPECT_NE(::sched_getscheduler(0), SCHED_BATCH);
  EXPECT_EQ(TurnNs(), turn);
}

TEST_F(LinuxOsTest, CpuTimeIsThatOfTheThreadAlone) {
  std::thread busy([&] {
    while (os_.ThreadCpuTime() < absl::Milliseconds(20)) {
    }
  });
  const absl::Duration before = os_.ThreadCpuTime();
  busy.join();
  EXPECT_LT(os_.ThreadCpuTime() - before, absl::Milliseconds(20));
}

TEST_F(LinuxOsTest, LimitsAreThere) {
  const MemoryLimits limits = os_.Limits();
  EXPECT_GT(limits.ram_bytes, uint64_t{64} << 20);
  EXPECT_GT(limits.cgroup_bytes, uint64_t{1} << 20);
}

}  // namespace
}  // namespace modelhost
