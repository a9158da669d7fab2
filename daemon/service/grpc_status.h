// The one place where an absl::Status becomes a grpc::Status.
//
// The code and the text stay; one ErrorInfo{reason, domain "modelhost", metadata} rides along
// (proto/modelhost/v1/error_info.proto). Texts are cut so that all of it fits the 8 KiB that gRPC
// allows for trailers, and made UTF-8, since a protobuf string that is not would fail the whole
// reply. Pure.
#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "modelhost/v1/error_info.pb.h"

namespace modelhost {

inline constexpr char kErrorDomain[] = "modelhost";

using ErrorMetadata = std::map<std::string, std::string>;

// OK becomes OK. The reason is that of WithReason, else the name of the code.
grpc::Status ToGrpcStatus(const absl::Status& status, const ErrorMetadata& metadata = {});

// What rides along with an error: its reason, `metadata`, and the errno or the successor (of an
// operation that another took the place of) that it carries.
v1::ErrorInfo ErrorInfoOf(const absl::Status& status, const ErrorMetadata& metadata);
// need, have, limit (bytes), pool and holders of what a budget refused; else empty.
ErrorMetadata RefusalMetadata(const absl::Status& status);

// Gives an error a reason of its own, UPPER_SNAKE_CASE.
absl::Status WithReason(absl::Status status, absl::string_view reason);

// `text` with every byte that is not part of UTF-8, and every control character, as U+FFFD, at most
// `most_bytes` of it ("..." at the end of what was cut).
std::string SafeText(absl::string_view text, size_t most_bytes = SIZE_MAX);
// True: a field of type string can have it as it is (UTF-8).
bool IsProtoText(absl::string_view text);

}  // namespace modelhost
