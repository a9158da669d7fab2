// From the bytes of one frame to a checked request. Bytes come from any process on the machine.
//
// Pure: no system calls, no state, allocates no more than the frame's own size a few times over.
// Every field that is used later has been checked: sizes are exact, counts are in range, names end
// in NUL padding and are valid, descriptors come with uploads only. Padding and fields marked
// reserved are ignored, so that a newer client may use them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/abi/handle_frame.h"

namespace modelhost {

struct HelloRequest {
  uint32_t abi_min = 0;
  uint32_t abi_max = 0;  // Not below abi_min.
};

struct RequestedRef {
  std::string model;
  std::string label;     // Empty exactly when `version` is not 0.
  uint64_t version = 0;  // 0: by label.
  std::array<uint8_t, abi::kDigestBytes> digest{};
};

struct AcquireRequest {
  bool wait = false;
  bool redeclare = false;
  uint64_t deadline_ms = 0;  // Means something with `wait` only.
  // Device memory too; only from kFrameAbiDevice on, which the session checks.
  enum class Device : uint8_t { kNone, kIfAny, kRequired };
  Device device = Device::kNone;
  std::string gpu;  // "GPU-" and a UUID in lower case; empty exactly with kNone.
  std::vector<RequestedRef> refs;
};

struct FetchRequest {
  uint64_t lease_id = 0;
  uint32_t region = 0;
};

struct ReleaseRequest {
  uint64_t lease_id = 0;
};

struct SubscribeRequest {};

struct UploadRequest {
  std::array<uint8_t, abi::kTicketBytes> ticket{};
  uint32_t first = 0;  // first + descriptors does not overflow.
  bool last = false;
};

struct Request {
  uint32_t request_id = 0;  // Not 0.
  std::variant<HelloRequest, AcquireRequest, FetchRequest, ReleaseRequest, SubscribeRequest,
               UploadRequest>
      body;
};

// `fd_count`: descriptors that came with the frame. INVALID_ARGUMENT says what is wrong and where.
absl::StatusOr<Request> ParseRequest(std::span<const std::byte> frame, size_t fd_count);

// The request id of a frame that may be malformed, for the answer to it; 0 when there is none.
uint32_t RequestIdOf(std::span<const std::byte> frame);

// The version that both ends speak, the newest. FAILED_PRECONDITION names both ranges.
absl::StatusOr<uint32_t> NegotiateAbi(const HelloRequest& hello);

}  // namespace modelhost
