#include "proto/handle/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace modelhost {

void UniqueFd::Reset() {
  // The result is of no use: on Linux the number is free again even when close() fails.
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<UniqueFd> UniqueFd::Duplicate() const {
  const int copy = ::fcntl(fd_, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) return ErrnoError(errno, "duplicate a descriptor");
  return UniqueFd(copy);
}

}  // namespace modelhost
