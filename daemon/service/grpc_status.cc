#include "daemon/service/grpc_status.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/memory_budget.h"
#include "daemon/registry/operation_log.h"
#include "modelhost/v1/error_info.pb.h"

namespace modelhost {
namespace {

constexpr absl::string_view kReasonPayload = "modelhost/reason";
constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
// The text is sent twice, once percent-encoded and once in base64.
constexpr size_t kMostMessageBytes = 1024;
constexpr size_t kMostMetadataBytes = 128;
constexpr char kReplacement[] = "\xEF\xBF\xBD";

// The length of the UTF-8 sequence at the start of `text`, 0 when there is none.
size_t SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  size_t length = 0;
  uint8_t low = 0x80;  // Bounds of the second byte: no overlong forms, no surrogates.
  uint8_t high = 0xBF;
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) length = 2;
  if (first >= 0xE0 && first <= 0xEF) length = 3;
  if (first >= 0xF0 && first <= 0xF4) length = 4;
  if (length == 0 || text.size() < length) return 0;
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  return length;
}

// One that moves a terminal's cursor, or worse: C0, DEL, C1.
bool IsControl(absl::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7F;
  return first == 0xC2 && static_cast<uint8_t>(character[1]) < 0xA0;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonPayload);
  return payload.has_value() ? std::string(*payload) : absl::StatusCodeToString(status.code());
}

}  // namespace

bool IsProtoText(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string SafeText(absl::string_view text, size_t most_bytes) {
  std::string out;
  out.reserve(std::min(text.size(), most_bytes));
  while (!text.empty()) {
    const size_t length = SequenceLength(text);
    const bool bad = length == 0 || IsControl(text.substr(0, length));
    const absl::string_view piece = bad ? absl::string_view(kReplacement) : text.substr(0, length);
    if (out.size() + piece.size() > most_bytes) return out + "...";
    out.append(piece.data(), piece.size());
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

ErrorMetadata RefusalMetadata(const absl::Status& status) {
  const auto refusal = BudgetRefusalOf(status);
  if (!refusal.has_value()) return {};
  return {{"pool", refusal->pool},
          {"need", absl::StrCat(refusal->need_bytes)},
          {"have", absl::StrCat(refusal->have_bytes)},
          {"limit", absl::StrCat(refusal->limit_bytes)},
          {"holders", refusal->holders}};
}

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  if (!status.ok()) status.SetPayload(kReasonPayload, absl::Cord(reason));
  return status;
}

v1::ErrorInfo ErrorInfoOf(const absl::Status& status, const ErrorMetadata& metadata) {
  v1::ErrorInfo info;
  info.set_reason(ReasonOf(status));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) {
    if (!value.empty()) (*info.mutable_metadata())[key] = SafeText(value, kMostMetadataBytes);
  }
  // Who holds the rest is often more than one line; the text has it too.
  constexpr size_t kMostHoldersBytes = 512;
  for (const auto& [key, value] : RefusalMetadata(status)) {
    (*info.mutable_metadata())[key] =
        SafeText(value, key == "holders" ? kMostHoldersBytes : kMostMetadataBytes);
  }
  if (const int sys_errno = ErrnoOf(status); sys_errno != 0) {
    (*info.mutable_metadata())["errno"] = absl::StrCat(sys_errno);
  }
  if (const OperationId successor = SuccessorOf(status); successor != 0) {
    info.set_reason("SUPERSEDED");
    (*info.mutable_metadata())["successor"] = absl::StrCat("op-", successor);
  }
  return info;
}

grpc::Status ToGrpcStatus(const absl::Status& status, const ErrorMetadata& metadata) {
  if (status.ok()) return grpc::Status::OK;
  const std::string text = SafeText(status.message(), kMostMessageBytes);

  const v1::ErrorInfo info = ErrorInfoOf(status, metadata);
  v1::RpcStatus details;
  details.set_code(static_cast<int32_t>(status.code()));
  details.set_message(text);
  google::protobuf::Any* any = details.add_details();
  any->set_type_url(kErrorInfoUrl);
  any->set_value(info.SerializeAsString());
  // The numbers of absl's codes are gRPC's.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), text,
                      details.SerializeAsString());
}

}  // namespace modelhost
