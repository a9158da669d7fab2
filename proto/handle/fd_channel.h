// Frames with descriptors over a Unix SOCK_SEQPACKET socket (proto/abi/handle_frame.h).
//
// Sending never raises SIGPIPE and never blocks; receiving never blocks past its deadline. Received
// descriptors are close-on-exec and owned before anything can fail. Thread-compatible.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "proto/abi/handle_frame.h"
#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

using SteadyTime = std::chrono::steady_clock::time_point;

// Connects to the daemon's handles.sock. Does not retry.
//   NOT_FOUND no socket there;  UNAVAILABLE nobody listens;  PERMISSION_DENIED
Result<UniqueFd> ConnectSeqpacket(const std::string& path);

// Two connected ends, for a child process.
Result<std::pair<UniqueFd, UniqueFd>> MakeSeqpacketPair();

// Sends one frame made of `head` and `tail`. `fds` are lent.
//   RESOURCE_EXHAUSTED  the peer's buffer is full (try again when writable)
//   UNAVAILABLE         the peer is gone
Result<void> SendFrame(const UniqueFd& socket, std::span<const std::byte> head,
                       std::span<const std::byte> tail, std::span<const UniqueFd* const> fds);

struct ReceivedFrame {
  abi::FrameHeader header{};
  size_t bytes = 0;  // Of the frame, in the caller's buffer.
  std::vector<UniqueFd> fds;
};

enum class ReceiveWait { kNo, kUntilDeadline };

// Receives one frame into `buffer` (at least abi::kMaxFrameBytes). The header has been checked:
// magic, `bytes` equals what came, `fd_count` equals the descriptors that came.
//   UNAVAILABLE         the peer closed the connection
//   RESOURCE_EXHAUSTED  descriptors were lost: RLIMIT_NOFILE of this process is too low
//   DEADLINE_EXCEEDED   nothing came (with kNo: nothing is there)
//   INVALID_ARGUMENT    a malformed frame
// The descriptors of a frame that is an error are closed, or appended to `refused` where closing
// them may take longer than the caller has.
Result<ReceivedFrame> ReceiveFrame(const UniqueFd& socket, std::span<std::byte> buffer,
                                   ReceiveWait wait, SteadyTime deadline,
                                   std::vector<UniqueFd>* refused = nullptr);

// Ends both directions at once, without closing: who waits in ReceiveFrame finds the end, as the
// peer does.
void EndChannel(const UniqueFd& socket);

// A view of `value` as the bytes of a frame.
template <typename T>
std::span<const std::byte> AsBytes(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

// A header for a frame of `bytes` bytes.
inline abi::FrameHeader MakeHeader(abi::FrameType type, size_t bytes, uint32_t request_id,
                                   size_t fd_count) {
  return abi::FrameHeader{abi::kFrameMagic, static_cast<uint16_t>(type),
                          static_cast<uint32_t>(bytes), request_id,
                          static_cast<uint32_t>(fd_count)};
}

}  // namespace modelhost
