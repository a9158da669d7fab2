#include "client/modelctl/exit_code.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "modelhost/v1/error_info.pb.h"

namespace modelhost::modelctl {
namespace {

constexpr char kErrorInfoType[] = "google.rpc.ErrorInfo";

// WHAT: WHY, with WHAT only where the daemon has not said it.
std::string Sentence(absl::string_view what, absl::string_view why) {
  if (why.empty()) return absl::StrCat(what, ": failed without a reason");
  if (what.empty() || absl::StrContains(why, ": ")) return std::string(why);
  return absl::StrCat(what, ": ", why);
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t length = Utf8CharBytes({text.data(), text.size()});
    const absl::string_view character = text.substr(0, std::max<size_t>(length, 1));
    text.remove_prefix(character.size());
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
    if (byte(0) == '\n' || byte(0) == '\t' || byte(0) == '\r') {
      if (!out.empty() && out.back() != ' ') out.push_back(' ');
      continue;
    }
    // C0 and C1 (U+0080 to U+009F) controls move a terminal's cursor; broken bytes are nobody's.
    const bool control =
        byte(0) < 0x20 || byte(0) == 0x7f || (length == 2 && byte(0) == 0xc2 && byte(1) < 0xa0);
    if (length == 0 || control) {
      out.push_back('?');
    } else {
      absl::StrAppend(&out, character);
    }
  }
  absl::StripTrailingAsciiWhitespace(&out);
  return out;
}

Exit Fail(ExitCode code, absl::string_view text) { return Exit{code, Printable(text)}; }

std::optional<v1::ErrorInfo> ParseErrorInfo(const std::string& details) {
  v1::RpcStatus status;
  if (!status.ParseFromString(details)) return std::nullopt;
  for (const google::protobuf::Any& detail : status.details()) {
    v1::ErrorInfo info;
    if (absl::EndsWith(detail.type_url(), kErrorInfoType) && info.ParseFromString(detail.value())) {
      return info;
    }
  }
  return std::nullopt;
}

ExitCode ExitCodeOf(int code) {
  switch (static_cast<Code>(code)) {
    case Code::kOk:
      return ExitCode::kOk;
    case Code::kNotFound:
      return ExitCode::kNotFound;
    case Code::kFailedPrecondition:
    case Code::kAlreadyExists:
      return ExitCode::kConflict;
    case Code::kResourceExhausted:
      return ExitCode::kResources;
    case Code::kDataLoss:
    case Code::kInvalidArgument:
    case Code::kOutOfRange:
      return ExitCode::kIntegrity;
    case Code::kDeadlineExceeded:
      return ExitCode::kTimeout;
    case Code::kUnavailable:
      return ExitCode::kUnreachable;
    case Code::kPermissionDenied:
      return ExitCode::kPermission;
    case Code::kAborted:
    case Code::kCancelled:
      return ExitCode::kSuperseded;
    case Code::kUnknown:
    case Code::kUnimplemented:
    case Code::kInternal:
      return ExitCode::kOther;
  }
  // UNAUTHENTICATED is the one code that Code does not name: the daemon sends it when it does not
  // know the connection.
  return code == static_cast<int>(grpc::StatusCode::UNAUTHENTICATED) ? ExitCode::kPermission
                                                                     : ExitCode::kOther;
}

Exit FromRpc(const grpc::Status& status, absl::string_view what) {
  if (status.ok()) return Exit::Ok();
  std::string text = Sentence(what, status.error_message());
  if (const auto info = ParseErrorInfo(status.error_details())) {
    const auto operation = info->metadata().find("operation");
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
        operation != info->metadata().end() && !absl::StrContains(text, operation->second)) {
      absl::StrAppend(&text, " (", operation->second, " goes on; `modelctl ops watch ",
                      operation->second, "` follows it)");
    }
  }
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED && status.error_message().empty()) {
    text = absl::StrCat(what, ": this daemon does not know the call (it is older than modelctl)");
  }
  return Fail(ExitCodeOf(static_cast<int>(status.error_code())), text);
}

Exit FromFailure(int code, absl::string_view message, absl::string_view what) {
  ExitCode exit = ExitCodeOf(code);
  if (exit == ExitCode::kOk) exit = ExitCode::kOther;  // Finished badly, but the code says OK.
  // In an operation it is the model's format that is not known.
  if (static_cast<Code>(code) == Code::kUnimplemented) exit = ExitCode::kIntegrity;
  return Fail(exit, Sentence(what, message));
}

Exit FromError(const Error& error, absl::string_view what) {
  return Fail(ExitCodeOf(static_cast<int>(error.code)), Sentence(what, error.text));
}

Exit FromStatus(const absl::Status& status, absl::string_view what) {
  return FromFailure(static_cast<int>(status.code()),
                     absl::string_view(status.message().data(), status.message().size()), what);
}

}  // namespace modelhost::modelctl
