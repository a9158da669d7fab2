// Listening Unix sockets of our own: made here or inherited from systemd.
//
// A socket file left by a killed daemon is taken over; one that somebody answers on is not
// (FAILED_PRECONDITION). The runtime directory's lock (app) makes that race-free. The socket file
// is removed on destruction only when this object made it and it is still the same file.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

enum class SocketType { kStream, kSeqpacket };

class UnixListener {
 public:
  // `mode`: permission bits of the socket file; it never has more, not even for a moment.
  //   INVALID_ARGUMENT     the path is longer than a socket path may be
  //   FAILED_PRECONDITION  another process answers there, or something else has the name
  //   NOT_FOUND, PERMISSION_DENIED  from the directory
  static absl::StatusOr<UnixListener> Bind(const std::string& path, SocketType type, uint32_t mode);
  // INVALID_ARGUMENT unless `fd` is a listening Unix socket of `type`.
  static absl::StatusOr<UnixListener> Adopt(UniqueFd fd, SocketType type);

  UnixListener(UnixListener&& other) noexcept;
  UnixListener& operator=(UnixListener&&) = delete;
  ~UnixListener();

  // Watch for EPOLLIN, then Accept until UNAVAILABLE (nobody is waiting). RESOURCE_EXHAUSTED: out
  // of descriptors, try again later. Accepted sockets are non-blocking and close-on-exec.
  absl::StatusOr<UniqueFd> Accept();
  const UniqueFd& fd() const { return fd_; }
  // Ends listening. The descriptor is the caller's to close, which closes the connections that wait
  // and what was sent on them; this object still has the socket file to remove.
  [[nodiscard]] UniqueFd TakeFd() { return std::move(fd_); }

 private:
  UnixListener(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;  // Empty: inherited.
  uint64_t device_ = 0;
  uint64_t inode_ = 0;  // Of the socket file.
};

}  // namespace modelhost
