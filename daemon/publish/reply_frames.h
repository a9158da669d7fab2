// Frames from the daemon to a client, made and not yet sent. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/registry/model_manager.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct OutFrame {
  std::vector<std::byte> bytes;
  std::vector<const UniqueFd*> fds;  // Lent by `keep`; at most abi::kMaxFdsPerFrame.
  std::shared_ptr<const void> keep;
};

// Granted, and as many RegionFds as the eager regions of the version need. The descriptors are the
// daemon's own, so all receivers share one open file (offset, status flags): they are for mapping,
// which uses neither. With `device` (the client asked for it) as many DeviceFds follow as its
// segments need, one without segments where there are none. `redeclare`: Granted alone, without
// descriptors.
std::vector<OutFrame> GrantFrames(uint32_t request_id, uint32_t number, uint32_t count,
                                  const Grant& grant, bool redeclare, bool device);

// RegionFds with one descriptor of its own.
OutFrame FetchFrame(uint32_t request_id, uint64_t lease, uint32_t region,
                    const ResidentVersion& version, UniqueFd fd);

OutFrame HelloFrame(uint32_t request_id, uint32_t abi, uint64_t epoch, const UniqueFd& page,
                    uint64_t page_bytes);
OutFrame AckFrame(uint32_t request_id);
// `status` is not OK; its text is cut at abi::kMaxErrorText.
OutFrame ErrorFrame(uint32_t request_id, const absl::Status& status);

// "host_memfd" or "host_file": how the weights of a version reach a client.
const char* TransportOf(const ResidentVersion& version);

}  // namespace modelhost
