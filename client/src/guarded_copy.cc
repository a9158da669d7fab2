#include "client/src/guarded_copy.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "client/src/connection.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {
namespace {

constexpr size_t kChunk = size_t{64} << 20;
// What a pipe usually holds. One of a user with very many pipes holds less, and takes less.
constexpr size_t kPipeChunk = 64 << 10;

Error Lost(size_t at) {
  return Error{Code::kDataLoss,
               "copy: the page " + std::to_string(at) +
                   " bytes in cannot be read (the store file was truncated, or its disk fails)",
               0};
}

}  // namespace

Result<void> GuardedCopyByPipe(void* to, const void* from, size_t bytes) {
  std::array<int, 2> ends{};
  // Not blocking: both ends are ours, and nobody else would make room.
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    return ExplainLimit(ErrnoError(errno, "copy: pipe"));
  }
  const UniqueFd out(ends[0]);
  const UniqueFd in(ends[1]);
  size_t done = 0;
  while (done < bytes) {
    const size_t step = std::min(bytes - done, kPipeChunk);
    const ssize_t put = ::write(in.get(), static_cast<const char*>(from) + done, step);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EFAULT) return Lost(done);
    if (put < 0) return ErrnoError(errno, "copy");
    size_t got = 0;
    while (got < static_cast<size_t>(put)) {
      const ssize_t part =
          ::read(out.get(), static_cast<char*>(to) + done + got, static_cast<size_t>(put) - got);
      if (part < 0 && errno == EINTR) continue;
      if (part <= 0) return ErrnoError(errno, "copy");
      got += static_cast<size_t>(part);
    }
    done += got;
  }
  return {};
}

Result<void> GuardedCopy(void* to, const void* from, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const size_t step = std::min(bytes - done, kChunk);
    const iovec local{static_cast<char*>(to) + done, step};
    const iovec remote{const_cast<char*>(static_cast<const char*>(from)) + done, step};
    const ssize_t part = ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
    if (part > 0) {
      done += static_cast<size_t>(part);
      continue;
    }
    if (part == 0 || errno == EFAULT) return Lost(done);
    if (errno == EINTR) continue;
    if (errno == EPERM || errno == ENOSYS || errno == EACCES) {
      return GuardedCopyByPipe(static_cast<char*>(to) + done, static_cast<const char*>(from) + done,
                               bytes - done);
    }
    return ErrnoError(errno, "copy");
  }
  return {};
}

}  // namespace modelhost
