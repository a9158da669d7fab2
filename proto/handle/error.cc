#include "proto/handle/error.h"

#include <cerrno>
#include <cstring>

namespace modelhost {
namespace {

Code CodeOfErrno(int sys_errno) {
  switch (sys_errno) {
    case ENOENT:
    case ENXIO:
    case ENODEV:
      return Code::kNotFound;
    case EEXIST:
    case ENOTEMPTY:
      return Code::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return Code::kPermissionDenied;
    case ENOMEM:
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case EFBIG:
    case ENOBUFS:
      return Code::kResourceExhausted;
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case EBUSY:
    case ETXTBSY:
    case EXDEV:
      return Code::kFailedPrecondition;
    case EINVAL:
    case ENAMETOOLONG:
      return Code::kInvalidArgument;
    case ETIMEDOUT:
      return Code::kDeadlineExceeded;
    case EIO:
      return Code::kDataLoss;
    case ENOSYS:
    case EOPNOTSUPP:
      return Code::kUnimplemented;
    case ECONNREFUSED:
    case ECONNRESET:
    case ENOTCONN:
    case EPIPE:
    case EAGAIN:
      return Code::kUnavailable;
    case ECANCELED:
    case EINTR:
      return Code::kCancelled;
    default:
      return Code::kUnknown;
  }
}

}  // namespace

Error ErrnoError(int sys_errno, std::string what) {
  char buffer[128];
  const char* text = strerror_r(sys_errno, buffer, sizeof(buffer));  // The GNU variant.
  return Error{CodeOfErrno(sys_errno), std::move(what) + ": " + text, sys_errno};
}

}  // namespace modelhost
