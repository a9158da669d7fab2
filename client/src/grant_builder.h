// Collects the frames that answer one Acquire: for each reference a Granted, then its RegionFds,
// and then its DeviceFds where device memory was asked for.
//
// Everything is mapped as it comes and its descriptor closed, so that a grant of 300 regions needs
// no more descriptors at once than one frame carries; but device memory, whose driver may take its
// time, is mapped later by whoever wanted it (Model::AttachDevice). A frame that breaks the
// protocol is an error of the connection; content that is wrong (no seals, wrong sizes, a broken
// index) or cannot be mapped fails this grant alone, after all of its frames have come.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/src/cuda_image.h"
#include "client/src/model.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/error.h"
#include "proto/handle/fd_channel.h"

namespace modelhost {

struct Grant {
  abi::Granted head{};
  std::unique_ptr<Model> model;  // Null for a lease that was only declared again.
  DeviceGrant device;
};

class GrantBuilder {
 public:
  enum class Kind { kAcquire, kRedeclare };

  // `device`: the Acquire asks for device memory.
  GrantBuilder(Kind kind, uint32_t references, bool device = false);

  // INTERNAL: the peer does not keep to the protocol; the connection is of no more use.
  Result<void> OnGranted(std::span<const std::byte> bytes, ReceivedFrame& frame);
  Result<void> OnRegionFds(std::span<const std::byte> bytes, ReceivedFrame& frame);
  Result<void> OnDeviceFds(std::span<const std::byte> bytes, ReceivedFrame& frame);

  // All frames have come; nothing may follow.
  bool complete() const {
    return grants_.size() == references_ && regions_left_ == 0 && !device_due_;
  }
  // Once complete: why the grant is of no use, though leases were given.
  const std::optional<Error>& failure() const { return failure_; }
  std::vector<Grant>& grants() { return grants_; }
  const std::vector<Grant>& grants() const { return grants_; }

 private:
  Result<void> TakeRegions(std::span<const std::byte> refs, uint32_t count, ReceivedFrame& frame,
                           size_t first_fd);
  void Fail(Error error);

  Kind kind_;
  uint32_t references_;
  bool device_;
  uint32_t regions_left_ = 0;
  bool device_due_ = false;       // DeviceFds frames of the last grant are still to come.
  uint32_t device_segments_ = 0;  // Of it, that have come.
  uint32_t device_total_ = 0;
  std::vector<Grant> grants_;
  std::optional<Error> failure_;
};

}  // namespace modelhost
