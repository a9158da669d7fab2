// What the sandbox lets through, and that anything else is the end. Each case runs in a child.
#include "daemon/indexer/sandbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace modelhost {
namespace {

constexpr int kDone = 42;
constexpr SandboxLimits kLimits{
    .memory_bytes = uint64_t{64} << 20, .file_bytes = 1000, .cpu_seconds = 1};

// How a child ends that enters the sandbox and does `what`; its exit status, or minus the signal.
int EndOf(const std::function<void()>& what) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (!EnterSandbox(kLimits).ok()) ::_exit(1);
    what();
    ::_exit(kDone);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

class SandboxTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef MODELHOST_SANITIZED
    GTEST_SKIP() << "no system call filter in a build under a sanitizer";
#endif
  }
};

TEST_F(SandboxTest, ComputingAllocatingAndWritingGoOn) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  EXPECT_EQ(EndOf([&] {
              std::vector<char> small(1000, 'x');
              std::vector<char> large(8 << 20, 'x');
              large.resize(16 << 20);
              if (::write(ends[1], large.data(), 100) != 100) ::_exit(2);
            }),
            kDone);
  char got[100];
  EXPECT_EQ(::read(ends[0], got, sizeof got), 100);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(SandboxTest, NothingIsOpenedConnectedOrStarted) {
  EXPECT_EQ(EndOf([] { ::open("/etc/passwd", O_RDONLY); }), -SIGSYS);
  EXPECT_EQ(EndOf([] { ::socket(AF_UNIX, SOCK_STREAM, 0); }), -SIGSYS);
  EXPECT_EQ(EndOf([] { ::fork(); }), -SIGSYS);
  EXPECT_EQ(EndOf([] { ::kill(::getppid(), 0); }), -SIGSYS);
  EXPECT_EQ(EndOf([] {
              char program[] = "/bin/true";
              char* arguments[] = {program, nullptr};
              ::execv(program, arguments);
            }),
            -SIGSYS);
}

TEST_F(SandboxTest, MemoryCannotBeExecutedNorMapAFile) {
  EXPECT_EQ(EndOf([] {
              ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
            }),
            -SIGSYS);
  EXPECT_EQ(EndOf([] { ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, 0, 0); }), -SIGSYS);
  const uintptr_t page = reinterpret_cast<uintptr_t>(&EndOf) & ~uintptr_t{4095};
  EXPECT_EQ(EndOf([&] {
              ::mprotect(reinterpret_cast<void*>(page), 4096, PROT_READ | PROT_WRITE | PROT_EXEC);
            }),
            -SIGSYS);
}

TEST_F(SandboxTest, MemoryIsNotLockedNorDoesItGrowBesideTheLimit) {
  for (const int flag : {MAP_LOCKED, MAP_GROWSDOWN, MAP_HUGETLB, MAP_FIXED}) {
    EXPECT_EQ(EndOf([flag] {
                ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flag,
                       -1, 0);
              }),
              -SIGSYS)
        << flag;
  }
}

TEST_F(SandboxTest, OneThatAbortsEndsAsItself) {
  EXPECT_EQ(EndOf([] { std::abort(); }), -SIGABRT);
}

TEST_F(SandboxTest, TimeAndFilesHaveAnEndWithASignalOfItsOwn) {
  EXPECT_EQ(EndOf([] {
              while (true) asm volatile("");
            }),
            -SIGXCPU);
  const int file = ::memfd_create("answer", MFD_CLOEXEC);
  EXPECT_EQ(EndOf([file] {
              const std::vector<char> piece(600, 'x');
              for (int i = 0; i < 3; ++i) (void)!::write(file, piece.data(), piece.size());
            }),
            -SIGXFSZ);
  ::close(file);
}

TEST_F(SandboxTest, StandardOutputIsNotTheDaemons) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (!EnterSandbox(kLimits).ok() || ::write(ends[1], "x", 1) != 1) ::_exit(1);
    while (true) asm volatile("");
  }
  char ready = 0;
  ASSERT_EQ(::read(ends[0], &ready, 1), 1);
  const std::string proc = "/proc/" + std::to_string(pid);
  for (const int standard : {0, 1, 2}) {
    char name[64] = {};
    EXPECT_GT(::readlink((proc + "/fd/" + std::to_string(standard)).c_str(), name, sizeof name), 0);
    EXPECT_STREQ(name, "/dev/null");
  }
  std::string score;
  std::ifstream(proc + "/oom_score_adj") >> score;
  EXPECT_EQ(score, "1000");
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(SandboxTest, MemoryHasAnEnd) {
  EXPECT_EQ(EndOf([] {
              void* too_much = std::malloc(128 << 20);
              ::_exit(too_much == nullptr ? kDone : 2);
            }),
            kDone);
}

}  // namespace
}  // namespace modelhost
