#include "daemon/device_agent/agent_frames.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "daemon/device_agent/device_mode.h"

namespace modelhost::agent {
namespace {

Error Bad(std::string why) {
  return Error{Code::kInvalidArgument, "malformed request: " + std::move(why), 0};
}

template <size_t kBytes>
bool Ends(const char (&text)[kBytes]) {
  return std::memchr(text, '\0', kBytes) != nullptr;
}

bool KnownTest(uint32_t test) { return test <= static_cast<uint32_t>(TestResult::kNotPossible); }

bool PowerOfTwoOrNone(uint64_t number) { return (number & (number - 1)) == 0; }

// How many descriptors may come with a request.
struct FdRange {
  size_t least = 0;
  size_t most = 0;
};
std::optional<FdRange> FdsOf(const Request& request) {
  const size_t segment = SegmentIsDescriptor(request) ? 1 : 0;
  switch (static_cast<Frame>(request.header.type)) {
    case Frame::kList:
    case Frame::kOpen:
    case Frame::kCreate:
    case Frame::kRelease:
    case Frame::kMemory:
    case Frame::kCancel:
    case Frame::kTryImport:
    case Frame::kTryHostRead:
      return FdRange{0, 0};
    case Frame::kVerify:
    case Frame::kCheck:
      return FdRange{segment, segment};
    case Frame::kUpload:
      return FdRange{segment + 1, segment + 1 + kMaxSources};
    case Frame::kReply:
    case Frame::kProgress:
      break;
  }
  return std::nullopt;
}

bool NamesBytes(Frame frame) {
  return frame == Frame::kCreate || frame == Frame::kUpload || frame == Frame::kVerify ||
         frame == Frame::kCheck;
}

}  // namespace

Result<Request> ParseRequest(std::span<const std::byte> frame, size_t fds) {
  if (frame.size() != sizeof(Request)) return Bad("its length is " + std::to_string(frame.size()));
  Request request;
  std::memcpy(&request, frame.data(), sizeof(request));
  const auto type = static_cast<Frame>(request.header.type);
  const auto range = FdsOf(request);
  if (!range.has_value()) return Bad("type " + std::to_string(request.header.type));
  if (fds < range->least || fds > range->most) {
    return Bad(std::to_string(fds) + " descriptors came with type " +
               std::to_string(request.header.type));
  }
  if (!Ends(request.uuid) || !Ends(request.direct_failure) || !Ends(request.ipc_failure)) {
    return Bad("a text does not end");
  }
  if (!KnownTest(request.direct_test) || !KnownTest(request.ipc_test)) {
    return Bad("a test result that does not exist");
  }
  if (NamesBytes(type) && (request.bytes == 0 || request.bytes % sizeof(uint64_t) != 0 ||
                           request.bytes > static_cast<uint64_t>(INT64_MAX))) {
    return Bad("a segment of " + std::to_string(request.bytes) + " bytes");
  }
  if (request.items > kMaxItems) {
    return Bad("an upload of " + std::to_string(request.items) + " pieces");
  }
  return request;
}

Result<std::vector<UploadItem>> ParsePlan(std::span<const std::byte> plan, uint64_t items,
                                          size_t sources, uint64_t bytes) {
  if (items > kMaxItems || plan.size() != items * sizeof(UploadItem)) {
    return Error{Code::kInvalidArgument,
                 "a plan of " + std::to_string(plan.size()) + " bytes for " +
                     std::to_string(items) + " pieces",
                 0};
  }
  std::vector<UploadItem> parsed(items);
  if (!parsed.empty()) std::memcpy(parsed.data(), plan.data(), plan.size());
  uint64_t end = 0;
  for (size_t i = 0; i < parsed.size(); ++i) {
    const UploadItem& item = parsed[i];
    if (item.bytes == 0 || item.source >= sources || item.device_offset < end ||
        item.device_offset > bytes || item.bytes > bytes - item.device_offset ||
        item.bytes > static_cast<uint64_t>(INT64_MAX) ||
        item.source_offset > static_cast<uint64_t>(INT64_MAX) - item.bytes) {
      return Error{Code::kInvalidArgument,
                   "item " + std::to_string(i) + " of the upload does not fit its segment", 0};
    }
    end = item.device_offset + item.bytes;
  }
  return parsed;
}

Result<Reply> ParseReply(std::span<const std::byte> frame, size_t fds, uint32_t request_id) {
  const Error odd{Code::kInternal, "the device agent answers what was not asked", 0};
  if (frame.size() != sizeof(Reply)) return odd;
  Reply reply;
  std::memcpy(&reply, frame.data(), sizeof(reply));
  const auto type = static_cast<Frame>(reply.header.type);
  if ((type != Frame::kReply && type != Frame::kProgress) ||
      reply.header.request_id != request_id || fds > (type == Frame::kReply ? 1U : 0U) ||
      reply.code > static_cast<uint32_t>(Code::kDataLoss) || !Ends(reply.text) ||
      !Ends(reply.device.uuid) || !Ends(reply.device.name) || !Ends(reply.device.reason) ||
      reply.device.mode > static_cast<uint32_t>(DeviceMode::kCudaIpc) ||
      reply.devices > kMaxDevices || !PowerOfTwoOrNone(reply.device.granularity)) {
    return odd;
  }
  return reply;
}

void CopyText(std::span<char> to, std::string_view text) {
  const size_t bytes = std::min(text.size(), to.size() - 1);
  std::memcpy(to.data(), text.data(), bytes);
  to[bytes] = '\0';
}

}  // namespace modelhost::agent
