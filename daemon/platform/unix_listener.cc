#include "daemon/platform/unix_listener.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

constexpr int kBacklog = 4096;  // The kernel lowers it to net.core.somaxconn.

int KernelType(SocketType type) {
  return type == SocketType::kStream ? SOCK_STREAM : SOCK_SEQPACKET;
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  constexpr size_t kLimit = sizeof(address.sun_path) - 1;
  if (path.empty() || path.size() > kLimit) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a socket path of ", path.size(), " bytes: the kernel allows 1 to ",
                     kLimit, " (choose a shorter runtime directory with --runtime-dir)"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<UniqueFd> MakeSocket(SocketType type) {
  UniqueFd socket(::socket(AF_UNIX, KernelType(type) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "make a Unix socket");
  return socket;
}

int BindTo(const UniqueFd& socket, const sockaddr_un& address) {
  return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0
             ? 0
             : errno;
}

// OK when the file at `path` is a socket on which nobody listens.
absl::Status CheckStale(const std::string& path, const sockaddr_un& address, SocketType type) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": exists and is not a socket (move it away)"));
  }
  auto probe = MakeSocket(type);
  if (!probe.ok()) return probe.status();
  if (::connect(probe->get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT) return absl::OkStatus();
    // EAGAIN: its queue is full; EPROTOTYPE: a live socket of the other type. Somebody is there.
    if (errno != EAGAIN && errno != EPROTOTYPE) return ErrnoStatus(errno, path);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      path, ": another process answers on this socket (stop it, or choose another --runtime-dir)"));
}

int IntOption(const UniqueFd& socket, int option) {
  int value = -1;
  socklen_t bytes = sizeof(value);
  if (::getsockopt(socket.get(), SOL_SOCKET, option, &value, &bytes) != 0) return -1;
  return value;
}

}  // namespace

absl::StatusOr<UnixListener> UnixListener::Bind(const std::string& path, SocketType type,
                                                uint32_t mode) {
  const auto address = AddressOf(path);
  if (!address.ok()) return address.status();
  auto socket = MakeSocket(type);
  if (!socket.ok()) return socket.status();
  // The file that bind() makes takes the socket's own mode less the umask, so it is never wider
  // than asked; the umask itself belongs to all threads and is left alone.
  if (::fchmod(socket->get(), mode) != 0) return ErrnoStatus(errno, path);
  int error = BindTo(*socket, *address);
  if (error == EADDRINUSE) {
    if (const auto stale = CheckStale(path, *address, type); !stale.ok()) return stale;
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) return ErrnoStatus(errno, path);
    error = BindTo(*socket, *address);
  }
  if (error != 0) return ErrnoStatus(error, absl::StrCat("make the socket ", path));
  UnixListener listener(*std::move(socket), path);
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return ErrnoStatus(errno, path);
  listener.device_ = info.st_dev;
  listener.inode_ = info.st_ino;
  if (::chmod(path.c_str(), mode) != 0) return ErrnoStatus(errno, path);
  if (::listen(listener.fd_.get(), kBacklog) != 0) return ErrnoStatus(errno, path);
  return listener;
}

absl::StatusOr<UnixListener> UnixListener::Adopt(UniqueFd fd, SocketType type) {
  if (IntOption(fd, SO_DOMAIN) != AF_UNIX || IntOption(fd, SO_TYPE) != KernelType(type) ||
      IntOption(fd, SO_ACCEPTCONN) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("inherited descriptor ", fd.get(), ": not a listening Unix socket of type ",
                     type == SocketType::kStream
                         ? "SOCK_STREAM (ListenStream= in the socket unit)"
                         : "SOCK_SEQPACKET (ListenSequentialPacket= in the socket unit)"));
  }
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "inherited socket");
  }
  return UnixListener(std::move(fd), "");
}

UnixListener::UnixListener(UnixListener&& other) noexcept
    : fd_(std::move(other.fd_)),
      path_(std::exchange(other.path_, {})),
      device_(other.device_),
      inode_(other.inode_) {}

UnixListener::~UnixListener() {
  if (path_.empty()) return;
  struct stat info {};
  if (::lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    (void)::unlink(path_.c_str());  // A file that stays is taken over by the next daemon.
  }
}

absl::StatusOr<UniqueFd> UnixListener::Accept() {
  while (true) {
    UniqueFd socket(::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) return socket;
    switch (errno) {
      case EINTR:
      case ECONNABORTED:
        continue;
      case EAGAIN:
        return absl::UnavailableError("accept: nobody is waiting");
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        return absl::ResourceExhaustedError(absl::StrCat(
            "accept: ", std::strerror(errno), " (raise LimitNOFILE / ulimit -n of the daemon)"));
      default:
        return ErrnoStatus(errno, "accept");
    }
  }
}

}  // namespace modelhost
