#include "daemon/platform/errno_status.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr absl::string_view kErrnoPayload = "modelhost/errno";

absl::Status WithErrno(absl::Status status, int sys_errno) {
  if (!status.ok() && sys_errno != 0) {
    status.SetPayload(kErrnoPayload, absl::Cord(absl::StrCat(sys_errno)));
  }
  return status;
}

}  // namespace

absl::Status ToStatus(const Error& error) {
  return WithErrno(absl::Status(static_cast<absl::StatusCode>(error.code), error.text),
                   error.sys_errno);
}

absl::Status ToStatus(const Error& error, std::string_view what) {
  return WithErrno(
      absl::Status(static_cast<absl::StatusCode>(error.code),
                   absl::StrCat(absl::string_view(what.data(), what.size()), ": ", error.text)),
      error.sys_errno);
}

absl::Status ErrnoStatus(int sys_errno, std::string_view what) {
  return ToStatus(ErrnoError(sys_errno, std::string(what)));
}

int ErrnoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrnoPayload);
  int value = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &value)) return 0;
  return value;
}

}  // namespace modelhost
