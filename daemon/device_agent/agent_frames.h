// What comes over the socket between the daemon and a device agent, checked before anything else
// looks at it. Pure: no driver, no descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "daemon/device_agent/agent_wire.h"
#include "proto/handle/error.h"

namespace modelhost::agent {

// A request with `fds` descriptors, as ReceiveFrame took it. INVALID_ARGUMENT: it is none, or asks
// for what cannot be. After it: texts end, sizes of segments are multiples of 8 and fit 63 bits,
// and the descriptors that its type needs are there.
Result<Request> ParseRequest(std::span<const std::byte> frame, size_t fds);

// Of a request that names a segment: the first descriptor is it (vmm_fd), else `segment`
// (cuda_ipc).
inline bool SegmentIsDescriptor(const Request& request) { return request.segment == 0; }

// The plan of an upload of `items` pieces from `sources` files into a segment of `bytes`.
// INVALID_ARGUMENT unless they are sorted, apart, not empty and inside of everything.
Result<std::vector<UploadItem>> ParsePlan(std::span<const std::byte> plan, uint64_t items,
                                          size_t sources, uint64_t bytes);

// A reply or progress for request number `request_id`. INTERNAL: it is neither. After it: texts
// end, numbers of enumerations are known, and only a reply has a descriptor, at most one.
Result<Reply> ParseReply(std::span<const std::byte> frame, size_t fds, uint32_t request_id);
inline bool IsLast(const Reply& reply) {
  return reply.header.type == static_cast<uint16_t>(Frame::kReply);
}

// A text of a frame that was checked.
template <size_t kBytes>
std::string_view TextOf(const char (&text)[kBytes]) {
  return std::string_view(text);
}
// As much of `text` as there is room for.
void CopyText(std::span<char> to, std::string_view text);

}  // namespace modelhost::agent
