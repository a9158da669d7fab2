// Listening sockets: taken over only from the dead, never wider than asked.
#include "daemon/platform/unix_listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "proto/handle/fd_channel.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

class UnixListenerTest : public ::testing::Test {
 protected:
  UnixListenerTest() {
    std::string name = ::testing::TempDir() + "listener.XXXXXX";
    dir_ = ::mkdtemp(name.data());
  }
  ~UnixListenerTest() override { std::filesystem::remove_all(dir_); }

  std::string Path(const std::string& name = "h.sock") const { return dir_ + "/" + name; }
  // As a killed daemon leaves it: the file, and nobody behind it.
  void LeaveStale(const std::string& path) {
    const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(::listen(socket.get(), 1), 0);
  }
  static uint32_t ModeOf(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(::lstat(path.c_str(), &info), 0);
    return info.st_mode & 07777;
  }

  std::string dir_;
};

TEST_F(UnixListenerTest, AcceptsWhoConnectsAndThenNobody) {
  auto listener = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0660);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(absl::IsUnavailable(listener->Accept().status()));
  const auto client = ConnectSeqpacket(Path());
  ASSERT_TRUE(client.ok());
  const auto socket = listener->Accept();
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_NE(::fcntl(socket->get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(socket->get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_TRUE(absl::IsUnavailable(listener->Accept().status()));
}

TEST_F(UnixListenerTest, TheModeIsWhatWasAskedWhateverTheUmask) {
  for (const mode_t mask : {0, 022, 077}) {
    const mode_t before = ::umask(mask);
    const auto listener = UnixListener::Bind(Path(), SocketType::kStream, 0660);
    ::umask(before);
    ASSERT_TRUE(listener.ok()) << listener.status();
    EXPECT_EQ(ModeOf(Path()), 0660U) << mask;
  }
}

TEST_F(UnixListenerTest, ASocketLeftByAKilledDaemonIsTakenOver) {
  LeaveStale(Path());
  const auto listener = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_TRUE(ConnectSeqpacket(Path()).ok());
}

TEST_F(UnixListenerTest, ASocketThatSomebodyAnswersOnIsLeftAlone) {
  const auto first = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(first.ok());
  for (const SocketType type : {SocketType::kSeqpacket, SocketType::kStream}) {
    const auto second = UnixListener::Bind(Path(), type, 0600);
    EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
    EXPECT_THAT(std::string(second.status().message()), HasSubstr(Path()));
  }
  EXPECT_TRUE(ConnectSeqpacket(Path()).ok());
}

TEST_F(UnixListenerTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(Path()) << "precious";
  const auto listener = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  EXPECT_TRUE(absl::IsFailedPrecondition(listener.status())) << listener.status();
  EXPECT_EQ(std::filesystem::file_size(Path()), 8U);
}

TEST_F(UnixListenerTest, APathThatIsTooLongNamesItselfAndTheLimit) {
  const std::string path = Path(std::string(120, 'x'));
  const auto listener = UnixListener::Bind(path, SocketType::kSeqpacket, 0600);
  EXPECT_TRUE(absl::IsInvalidArgument(listener.status())) << listener.status();
  EXPECT_THAT(std::string(listener.status().message()), HasSubstr(path));
  EXPECT_THAT(std::string(listener.status().message()), HasSubstr("107"));
  EXPECT_TRUE(
      absl::IsNotFound(UnixListener::Bind(Path("no/dir"), SocketType::kSeqpacket, 0600).status()));
}

TEST_F(UnixListenerTest, RemovesItsFileButNotItsSuccessors) {
  {
    const auto listener = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
    ASSERT_TRUE(listener.ok());
  }
  EXPECT_FALSE(std::filesystem::exists(Path()));
  auto first = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(first.ok());
  std::filesystem::remove(Path());
  const auto second = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(second.ok());
  { const UnixListener ended = *std::move(first); }
  EXPECT_TRUE(std::filesystem::exists(Path()));
}

TEST_F(UnixListenerTest, AdoptsOnlyAListeningSocketOfItsType) {
  auto made = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(made.ok());
  auto copy = made->fd().Duplicate();
  ASSERT_TRUE(copy.ok());
  auto wrong = made->fd().Duplicate();
  EXPECT_TRUE(absl::IsInvalidArgument(
      UnixListener::Adopt(*std::move(wrong), SocketType::kStream).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      UnixListener::Adopt(UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET, 0)), SocketType::kSeqpacket)
          .status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      UnixListener::Adopt(UniqueFd(::open("/dev/null", O_RDONLY)), SocketType::kStream).status()));
  {
    auto adopted = UnixListener::Adopt(*std::move(copy), SocketType::kSeqpacket);
    ASSERT_TRUE(adopted.ok()) << adopted.status();
    EXPECT_TRUE(absl::IsUnavailable(adopted->Accept().status()));
    EXPECT_NE(::fcntl(adopted->fd().get(), F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_TRUE(std::filesystem::exists(Path()));  // Not its file.
}

TEST_F(UnixListenerTest, OutOfDescriptorsIsToldApartFromNobodyWaiting) {
  auto listener = UnixListener::Bind(Path(), SocketType::kSeqpacket, 0600);
  ASSERT_TRUE(listener.ok());
  const auto client = ConnectSeqpacket(Path());
  ASSERT_TRUE(client.ok());
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit none = limit;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto refused = listener->Accept();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_TRUE(listener->Accept().ok());
}

}  // namespace
}  // namespace modelhost
