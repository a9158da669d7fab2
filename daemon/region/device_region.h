// The copy of (parts of) one file content on one GPU, shared by every version that has it.
//
// Immutable but for `lost` and what is booked for it; any thread. Destruction closes descriptors,
// which may take the kernel a while: let a pool thread drop the last one. It does not wait for the
// device: what no descriptor keeps goes to a DeviceReleaser. Importers keep what they have mapped.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/platform/device.h"
#include "daemon/region/memory_budget.h"
#include "daemon/store/digest.h"
#include "proto/abi/handle_frame.h"

namespace modelhost {

struct DeviceRegionKey {
  std::string gpu;  // UUID.
  Digest content;   // ContentKey of the host region.
  Digest part;      // PartDigest
  friend auto operator<=>(const DeviceRegionKey&, const DeviceRegionKey&) = default;
};

// Gives back device memory that no descriptor keeps.
class DeviceReleaser {
 public:
  virtual ~DeviceReleaser() = default;
  // First the segments, then `booked`. Does not wait.
  virtual void ReleaseLater(std::vector<DeviceSegment> segments, Reservation booked) = 0;
};

class DeviceRegion {
 public:
  struct Parts {
    DeviceRegionKey key;
    Digest planned;  // PlannedDeviceId: what the books knew it by before it was parsed.
    abi::DeviceMode mode = abi::DeviceMode::kNone;
    Reservation device;  // Of the GPU's budget; kHostRegistered: of the host's. Goes last.
    std::vector<DeviceSegment> segments;
    std::vector<uint64_t> checksums;  // Of each segment; kHostRegistered: none.
  };
  // `releaser` is lent, and outlives it.
  DeviceRegion(DeviceReleaser& releaser, Parts parts)
      : releaser_(releaser), parts_(std::move(parts)), booked_(parts_.device.bytes()) {}
  ~DeviceRegion();
  DeviceRegion(const DeviceRegion&) = delete;

  const DeviceRegionKey& key() const { return parts_.key; }
  const Digest& planned() const { return parts_.planned; }
  abi::DeviceMode mode() const { return parts_.mode; }
  const std::vector<DeviceSegment>& segments() const { return parts_.segments; }
  const std::vector<uint64_t>& checksums() const { return parts_.checksums; }
  uint64_t booked_bytes() const { return booked_.load(std::memory_order_relaxed); }
  uint64_t bytes() const;  // Of its segments.
  // The GPU was lost or reset, or the agent that held it is gone: nobody can import it any more.
  bool lost() const { return lost_.load(std::memory_order_relaxed); }
  // Its booking is given back: what takes its place needs the room. The first time only.
  void MarkLost() const;

 private:
  DeviceReleaser& releaser_;
  // `device` is touched by the one that sets lost_, and by the destructor.
  mutable Parts parts_;
  mutable std::atomic<uint64_t> booked_;
  mutable std::atomic<bool> lost_{false};
};

// All of one version on one GPU.
struct DeviceImage {
  std::string gpu;
  abi::DeviceMode mode = abi::DeviceMode::kNone;
  // Their segments, one after the other, are the index's. Empty for kHostDirect.
  std::vector<std::shared_ptr<const DeviceRegion>> regions;
  bool let_go = false;  // Lost, and its lost regions are not here any more.

  uint64_t bytes() const;
  bool lost() const;
};

// By which the books know a copy before its file is parsed: SHA-256 over GPU, the file's SHA-256
// and the policy.
Digest PlannedDeviceId(const std::string& gpu, const Digest& file, const std::string& policy);

}  // namespace modelhost
