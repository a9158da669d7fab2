// The one place where the contract libraries' Error becomes absl::Status, and back for frames.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/handle/error.h"

namespace modelhost {

absl::Status ToStatus(const Error& error);
// `what` is put before the text: "what: text".
absl::Status ToStatus(const Error& error, std::string_view what);
// "what: strerror(sys_errno)" with the canonical code of the errno. The errno rides along as a
// payload.
absl::Status ErrnoStatus(int sys_errno, std::string_view what);
// The errno that a status from here carries, 0 without one.
int ErrnoOf(const absl::Status& status);

template <typename T>
absl::StatusOr<T> ToStatusOr(Result<T> result) {
  if (!result.ok()) return ToStatus(result.error());
  return *std::move(result);
}
inline absl::Status ToStatus(const Result<void>& result) {
  return result.ok() ? absl::OkStatus() : ToStatus(result.error());
}

}  // namespace modelhost
