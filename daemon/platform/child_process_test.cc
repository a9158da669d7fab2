#include "daemon/platform/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace modelhost {
namespace {

// A shell script is not what is started here: the kernel opens the script again by a path that is
// gone. So: programs of the system.
UniqueFd Open(const char* path) { return UniqueFd(::open(path, O_RDONLY | O_CLOEXEC)); }

class ChildProcessTest : public ::testing::Test {
 protected:
  // Who runs the tests may have left descriptors open; none of ours are.
  void SetUp() override { ::close_range(3, UINT_MAX, CLOSE_RANGE_CLOEXEC); }

  SystemClock clock_;
  const std::function<bool()> go_on_ = [] { return true; };
};

TEST_F(ChildProcessTest, TheExitStatusComesBack) {
  const UniqueFd good = Open("/bin/true");
  const UniqueFd bad = Open("/bin/false");
  for (int i = 0; i < 20; ++i) {
    auto child = ChildProcess::Start(i % 2 == 0 ? good : bad, {.name = "child"}, {});
    ASSERT_TRUE(child.ok()) << child.status();
    const auto end = child->Wait(clock_, absl::Seconds(20), go_on_);
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_FALSE(end->signalled);
    EXPECT_EQ(end->code, i % 2);
  }
}

// `sleep N` sleeps for as many seconds as its first descriptor has for a number, which is above 3.
TEST_F(ChildProcessTest, TimeIsLimitedAndNobodyIsLeftBehind) {
  auto child = ChildProcess::Start(Open("/bin/sleep"), {.name = "child"}, {});
  ASSERT_TRUE(child.ok()) << child.status();
  const absl::Time begin = absl::Now();
  const auto end = child->Wait(clock_, absl::Milliseconds(50), go_on_);
  EXPECT_TRUE(absl::IsDeadlineExceeded(end.status())) << end.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(ChildProcessTest, AWishToStopIsHeardSoon) {
  auto child = ChildProcess::Start(Open("/bin/sleep"), {.name = "child"}, {});
  ASSERT_TRUE(child.ok()) << child.status();
  const absl::Time begin = absl::Now();
  const auto end = child->Wait(clock_, absl::Seconds(20), [] { return false; });
  EXPECT_TRUE(absl::IsCancelled(end.status())) << end.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
}

TEST_F(ChildProcessTest, OneThatIsDroppedIsKilled) {
  { auto child = ChildProcess::Start(Open("/bin/sleep"), {.name = "child"}, {}); }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

// `ls FIRST` fails: there is no such file. `cat` would block. What a child has is seen in /proc.
TEST_F(ChildProcessTest, ItHasTheDescriptorsThatWereGivenAndNoOthers) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reading(ends[0]);
  const UniqueFd writing(ends[1]);
  auto child = ChildProcess::Start(Open("/bin/sleep"), {.name = "child"}, {&writing, &reading});
  ASSERT_TRUE(child.ok()) << child.status();
  // The only child of this thread.
  std::string pid(64, '\0');
  const UniqueFd children =
      Open(("/proc/self/task/" + std::to_string(::gettid()) + "/children").c_str());
  const ssize_t bytes = ::read(children.get(), pid.data(), pid.size());
  ASSERT_GT(bytes, 0);
  pid.resize(pid.find(' '));
  const auto target = [&](int fd) {
    char name[256];
    const ssize_t size =
        ::readlink(("/proc/" + pid + "/fd/" + std::to_string(fd)).c_str(), name, sizeof name);
    return size < 0 ? std::string() : std::string(name, static_cast<size_t>(size));
  };
  // The dynamic linker opens and closes files of its own at first.
  int found = 0;
  int others = 0;
  const absl::Time end = absl::Now() + absl::Seconds(20);
  do {
    found = others = 0;
    for (int fd = 3; fd < 256; ++fd) {
      const std::string name = target(fd);
      if (!name.empty()) ++(name.starts_with("pipe:") ? found : others);
    }
  } while (others != 0 && absl::Now() < end);
  EXPECT_EQ(found, 2);
  EXPECT_EQ(others, 0);
  EXPECT_EQ(target(0), "/dev/null");
  EXPECT_EQ(target(1), "/dev/null");
}

TEST_F(ChildProcessTest, OneThatIsNotWaitedForIsTakenAwayLater) {
  auto child = ChildProcess::Start(Open("/bin/sleep"), {.name = "child"}, {});
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_FALSE(child->Gone());
  child->Kill(absl::ZeroDuration());
  LateChildren late;
  late.Keep(*std::move(child));
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (late.Reap() > 0 && absl::Now() < end) std::this_thread::yield();
  EXPECT_EQ(late.Reap(), 0u);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(ChildProcessTest, ArgumentsComeBeforeTheNumberAndTheEnvironmentIsKeptIfAsked) {
  ::setenv("CHILD_PROCESS_TEST", "here", 1);
  for (const bool keep : {false, true}) {
    const UniqueFd answer(::memfd_create("answer", MFD_CLOEXEC));
    auto child = ChildProcess::Start(
        Open("/bin/sh"),
        {.name = "sh",
         .arguments = {"-c", "echo \"$0 $CHILD_PROCESS_TEST\" >/proc/self/fd/$1", "first"},
         .keep_environment = keep},
        {&answer});
    ASSERT_TRUE(child.ok()) << child.status();
    const auto end = child->Wait(clock_, absl::Seconds(20), go_on_);
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(end->code, 0);
    std::string text(64, '\0');
    const ssize_t bytes = ::pread(answer.get(), text.data(), text.size(), 0);
    text.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
    EXPECT_EQ(text, keep ? "first here\n" : "first \n");
  }
}

TEST_F(ChildProcessTest, AFileThatIsNoProgramIsAnError) {
  const auto child = ChildProcess::Start(Open("/etc/passwd"), {.name = "child"}, {});
  ASSERT_FALSE(child.ok());
  EXPECT_THAT(std::string(child.status().message()), ::testing::HasSubstr("cannot start child"));
}

}  // namespace
}  // namespace modelhost
