// How modelctl ends: an exit code, and for a failure one line `error: WHAT: WHY (what to do)`.
//
// The codes are a promise to scripts. This is the one place where a gRPC status or an operation's
// failure becomes one of them. Pure; any thread.
#pragma once

#include <grpcpp/support/status.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/modelctl/exit_codes.h"
#include "modelhost/v1/error_info.pb.h"
#include "proto/handle/error.h"

namespace modelhost::modelctl {

// The end of a verb. With an `error` nothing goes to stdout and the error to stderr; a code without
// an error is a verdict (health, doctor) or a detachment that has been announced already.
struct [[nodiscard]] Exit {
  ExitCode code = ExitCode::kOk;
  std::string error;

  bool ok() const { return code == ExitCode::kOk; }
  static Exit Ok() { return {}; }
};

// `text` becomes one line of printable characters.
Exit Fail(ExitCode code, absl::string_view text);

// A value, or the way to end.
template <typename T>
class [[nodiscard]] Outcome {
 public:
  Outcome(T value)
      : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Outcome(Exit exit)
      : state_(std::in_place_index<1>, std::move(exit)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return state_.index() == 0; }
  // The caller has checked ok().
  T& operator*() & { return *std::get_if<0>(&state_); }
  const T& operator*() const& { return *std::get_if<0>(&state_); }
  T&& operator*() && { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }
  // The caller has checked !ok().
  const Exit& exit() const& { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, Exit> state_;
};

// What the daemon attaches to every error. From the serialised google.rpc.Status of a trailer
// (grpc::Status::error_details). Nothing when there is none or the bytes are no such message; never
// fails.
std::optional<v1::ErrorInfo> ParseErrorInfo(const std::string& details);

// `code` is a google.rpc.Code.
ExitCode ExitCodeOf(int code);

// The end that a failed call means. `what` names what was asked ("swap planner"); it is put in
// front unless the daemon's text names its subject itself.
Exit FromRpc(const grpc::Status& status, absl::string_view what);
// The end that an operation's failure means.
Exit FromFailure(int code, absl::string_view message, absl::string_view what);
Exit FromError(const Error& error, absl::string_view what);
Exit FromStatus(const absl::Status& status, absl::string_view what);

// Text without control characters, so that names from outside cannot drive a terminal.
std::string Printable(absl::string_view text);

}  // namespace modelhost::modelctl
