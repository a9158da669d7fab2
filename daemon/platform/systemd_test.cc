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

TEST_F(NotifyTest, ADescriptorGoesToTheStoreAndIsTakenOutByName) {
  SystemdFdStore store;
  const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(store.Store("mh-1-2", null).ok());
  std::array<char, 512> text{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{text.data(), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  ASSERT_GT(got, 0);
  EXPECT_EQ(std::string(text.data(), static_cast<size_t>(got)),
            "FDSTORE=1\nFDPOLL=0\nFDNAME=mh-1-2");
  const cmsghdr* head = CMSG_FIRSTHDR(&message);
  ASSERT_NE(head, nullptr);
  ASSERT_EQ(head->cmsg_type, SCM_RIGHTS);
  int number = -1;
  std::memcpy(&number, CMSG_DATA(head), sizeof(number));
  const UniqueFd sent(number);
  EXPECT_TRUE(sent.valid());

  ASSERT_TRUE(store.Remove("mh-1-2").ok());
  EXPECT_EQ(Received(), "FDSTOREREMOVE=1\nFDNAME=mh-1-2");
}

TEST_F(NotifyTest, TheRoomOfTheStoreIsWhatSystemdSays) {
  EXPECT_EQ(FdStoreRoom(), kFdStoreMax);  // Older ones do not say.
  ::setenv("FDSTORE", "7", 1);
  EXPECT_EQ(FdStoreRoom(), 7U);
  ::setenv("FDSTORE", "many", 1);
  EXPECT_EQ(FdStoreRoom(), 0U);
  ::unsetenv("FDSTORE");
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
  const InheritedFds none = TakeInheritedFds({"control"});
  EXPECT_TRUE(none.sockets.empty() && none.stored.empty());
  EXPECT_EQ(FdStoreRoom(), 0U);
  EXPECT_EQ(SystemdFdStore().Remove("a").code(), absl::StatusCode::kUnavailable);
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

const std::set<std::string> kSockets = {"control", "handles"};

TEST(Systemd, InheritedSocketsAreTakenByNameAndOnceAndTheRestIsWhatWasStored) {
  EXPECT_TRUE(InChild([] {
    const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (const int fd : {3, 4, 5, 6, 7}) {
      if (fd != file.get() && ::dup2(file.get(), fd) != fd) return false;
    }
    ::setenv("LISTEN_PID", absl::StrCat(::getpid()).c_str(), 1);
    ::setenv("LISTEN_FDS", "5", 1);
    ::setenv("LISTEN_FDNAMES", "control:handles:handles:stored:stored", 1);
    auto fds = TakeInheritedFds(kSockets);
    const bool taken = fds.sockets.size() == 2 && fds.sockets.at("control").get() == 3 &&
                       fds.sockets.at("handles").get() == 4 && ::getenv("LISTEN_FDS") == nullptr &&
                       (::fcntl(3, F_GETFD) & FD_CLOEXEC) != 0 &&
                       ::fcntl(5, F_GETFD) < 0;  // The second of one name is closed.
    const bool kept = fds.stored.size() == 2 && fds.stored[0].name == "stored" &&
                      fds.stored[0].fd.get() == 6 && fds.stored[1].fd.get() == 7;
    return taken && kept && TakeInheritedFds(kSockets).sockets.empty();
  }));
}

TEST(Systemd, DescriptorsOfAnotherProcessAreNotTouched) {
  EXPECT_TRUE(InChild([] {
    ::setenv("LISTEN_PID", "1", 1);
    ::setenv("LISTEN_FDS", "1", 1);
    return TakeInheritedFds(kSockets).sockets.empty();
  }));
}

}  // namespace
}  // namespace modelhost
