#include "daemon/platform/descriptor.h"

#include <fcntl.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {

absl::StatusOr<UniqueFd> ReopenReadOnly(const UniqueFd& fd) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd.get());
  UniqueFd opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!opened.valid()) return ErrnoStatus(errno, "open a descriptor of a region again");
  return opened;
}

}  // namespace modelhost
