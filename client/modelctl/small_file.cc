#include "client/modelctl/small_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace modelhost::modelctl {

std::optional<std::string> ReadSmallFile(const std::string& path, size_t max_bytes) {
  // First a descriptor that opens nothing: no FIFO blocks, no device reacts.
  const UniqueFd place(::open(path.c_str(), O_PATH | O_CLOEXEC));
  struct stat info {};
  if (!place.valid() || ::fstat(place.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      static_cast<uint64_t>(info.st_size) > max_bytes) {
    return std::nullopt;
  }
  const std::string link = absl::StrCat("/proc/self/fd/", place.get());
  const UniqueFd file(::open(link.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!file.valid()) return std::nullopt;
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

absl::Status ReadFully(const UniqueFd& file, const std::string& name, uint64_t offset,
                       std::span<std::byte> to) {
  while (!to.empty()) {
    const ssize_t got = ::pread(file.get(), to.data(), to.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat(name, ": read at byte ", offset));
    if (got == 0) {
      return absl::AbortedError(
          absl::StrCat(name, ": ended at byte ", offset, ": it became shorter while it was read"));
    }
    offset += static_cast<uint64_t>(got);
    to = to.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

}  // namespace modelhost::modelctl
