#include "daemon/registry/retry_policy.h"

#include <algorithm>
#include <cerrno>

namespace modelhost {

bool IsTransient(const absl::Status& status, int sys_errno) {
  if (status.ok()) return false;
  switch (sys_errno) {
    case 0:
      return absl::IsUnavailable(status);
    case EIO:
    case EAGAIN:
    case EINTR:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case ESTALE:
    case ETIMEDOUT:
    case ENOTCONN:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
    case EREMOTEIO:
    case ENOLCK:
      return true;
    default:
      return false;
  }
}

absl::Duration RetryDelay(const RetryPolicy& policy, int attempt, double random) {
  absl::Duration delay = policy.first;
  for (int i = 1; i < attempt && delay < policy.longest; ++i) delay *= 2;
  delay = std::min(delay, policy.longest);
  return delay * (1 + policy.jitter * (2 * random - 1));
}

}  // namespace modelhost
