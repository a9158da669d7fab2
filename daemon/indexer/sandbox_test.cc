// What the sandbox lets through, and that anything else is the end. Each case runs in a child.
#include "daemon/indexer/sandbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <vector>

#include "gtest/gtest.h"

namespace modelhost {
namespace {

constexpr int kDone = 42;
constexpr SandboxLimits kLimits{.memory_bytes = uint64_t{64} << 20, .cpu_seconds = 5};

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

TEST_F(SandboxTest, MemoryHasAnEnd) {
  EXPECT_EQ(EndOf([] {
              void* too_much = std::malloc(128 << 20);
              ::_exit(too_much == nullptr ? kDone : 2);
            }),
            kDone);
}

}  // namespace
}  // namespace modelhost
