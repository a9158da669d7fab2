// The protocol with systemd, spoken to a socket and an environment of the test's own.
#include "daemon/platform/systemd.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Runs `body` in a child, whose environment and descriptors it may change. True when it was true.
bool InChild(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class NotifyTest : public ::testing::Test {
 protected:
  NotifyTest() {
    std::string name = ::testing::TempDir() + "notify.XXXXXX";
    dir_ = ::mkdtemp(name.data());
    const std::string path = dir_ + "/s";
    socket_ = UniqueFd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
  }
  ~NotifyTest() override {
    ::unsetenv("NOTIFY_SOCKET");
    std::filesystem::remove_all(dir_);
  }

  std::string Received() {
    std::array<char, 512> buffer{};
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
    return got < 0 ? "(nothing)" : std::string(buffer.data(), static_cast<size_t>(got));
  }

  std::string dir_;
  UniqueFd socket_;
};

TEST_F(NotifyTest, TellsWhatHappens) {
  NotifyReady("3 models");
  EXPECT_EQ(Received(), "READY=1\nSTATUS=3 models");
  NotifyStopping();
  EXPECT_EQ(Received(), "STOPPING=1");
  NotifyExtendTimeout(absl::Seconds(90));
  EXPECT_EQ(Received(), "EXTEND_TIMEOUT_USEC=90000000");
  NotifyWatchdog();
  EXPECT_EQ(Received(), "WATCHDOG=1");
  NotifyReloading();
  EXPECT_THAT(Received(), AllOf(HasSubstr("RELOADING=1"), HasSubstr("MONOTONIC_USEC=")));
}

TEST_F(NotifyTest, AStatusCannotSayMoreThanAStatus) {
  NotifyStatus("loading\nREADY=1");
  EXPECT_EQ(Received(), "STATUS=loading READY=1");
}

TEST(Systemd, WithoutOneNothingHappens) {
  ::unsetenv("NOTIFY_SOCKET");
  ::unsetenv("WATCHDOG_USEC");
  ::unsetenv("LISTEN_FDS");
  NotifyReady("x");
  NotifyWatchdog();
  EXPECT_EQ(WatchdogInterval(), absl::InfiniteDuration());
  EXPECT_TRUE(TakeInheritedFds().empty());
}

TEST(Systemd, TheWatchdogIsFedTwiceAPeriod) {
  ::setenv("WATCHDOG_USEC", "3000000", 1);
  ::setenv("WATCHDOG_PID", absl::StrCat(::getpid()).c_str(), 1);
  EXPECT_EQ(WatchdogInterval(), absl::Milliseconds(1500));
  ::setenv("WATCHDOG_PID", "1", 1);  // For another process.
  EXPECT_EQ(WatchdogInterval(), absl::InfiniteDuration());
  ::unsetenv("WATCHDOG_USEC");
  ::unsetenv("WATCHDOG_PID");
}

TEST(Systemd, InheritedDescriptorsAreTakenByNameAndOnce) {
  EXPECT_TRUE(InChild([] {
    const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (const int fd : {3, 4, 5}) {
      if (fd != file.get() && ::dup2(file.get(), fd) != fd) return false;
    }
    ::setenv("LISTEN_PID", absl::StrCat(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", "3", 1);
    ::setenv("LISTEN_FDNAMES", "control:handles:handles", 1);
    auto fds = TakeInheritedFds();
    const bool taken = fds.size() == 2 && fds.at("control").get() == 3 &&
                       fds.at("handles").get() == 4 && ::getenv("LISTEN_FDS") == nullptr &&
                       (::fcntl(3, F_GETFD) & FD_CLOEXEC) != 0 &&
                       ::fcntl(5, F_GETFD) < 0;  // The second of one name is closed.
    return taken && TakeInheritedFds().empty();
  }));
}

TEST(Systemd, DescriptorsOfAnotherProcessAreNotTouched) {
  EXPECT_TRUE(InChild([] {
    ::setenv("LISTEN_PID", "1", 1);
    ::setenv("LISTEN_FDS", "1", 1);
    return TakeInheritedFds().empty();
  }));
}

}  // namespace
}  // namespace modelhost
