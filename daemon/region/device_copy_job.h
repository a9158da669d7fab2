// One call of DeviceTier::Make. Lives on the stack of the thread that loads; what it made so far
// goes with it when it fails.
//
//   Prepare -> { Claim -> Book -> TakeOffered -> Create -> Fill -> Finish | wait for others }*
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/region/device_tier.h"
#include "proto/handle/region.h"

namespace modelhost {

class DeviceCopyJob {
 public:
  DeviceCopyJob(DeviceTier& tier, const DeviceTier::Work& work);
  ~DeviceCopyJob();
  DeviceCopyJob(const DeviceCopyJob&) = delete;

  absl::StatusOr<std::vector<DeviceImage>> Run();

 private:
  // One part of the plan on one GPU.
  struct Slot {
    DeviceGpu* gpu = nullptr;
    abi::DeviceMode mode = abi::DeviceMode::kNone;
    const DevicePlan::Part* part = nullptr;
    const HostRegion* source = nullptr;
    DeviceRegionKey key;
    bool mine = false;     // Claimed, to be made here.
    bool done = false;     // Its segments hold what they should.
    bool adopted = false;  // They were offered, and go back there when this load fails.
    DeviceRegion::Parts made;
    std::vector<WritableRegion> host_segments;  // kHostRegistered, until they are full.
    std::shared_ptr<const DeviceRegion> copy;

    uint64_t bytes() const;
  };
  struct Phase {
    absl::Duration took;
    uint64_t bytes = 0;
  };

  absl::Status Prepare();
  bool Claim();
  absl::Status WaitForOthers();
  absl::Status Book();
  // What an earlier daemon left, where it still holds what it should.
  absl::Status TakeOffered();
  absl::Status VerifyOffered(Slot& slot, const DeviceRegion::Parts& parts);
  absl::Status Create();
  absl::Status CreateSegments(Slot& slot);
  absl::Status Fill();
  absl::Status FillOn(DeviceGpu& gpu);
  absl::Status Upload(Slot& slot);
  absl::Status Pack(Slot& slot);
  absl::Status CheckSource(const Slot& slot) const;
  void Finish();
  std::vector<DeviceImage> Images() const;

  absl::StatusOr<DeviceGpu::Turn> TakeTurn(DeviceGpu& gpu) const;
  // "copy of planner@8 on GPU-...".
  std::string What(const DeviceGpu& gpu) const;
  absl::Status Failed(const Slot& slot, const absl::Status& why) const;
  // Of the host's budget, of which this load has some already.
  absl::StatusOr<Reservation> BookHost(uint64_t bytes, const std::string& what) const;
  absl::Status Cancelled() const;
  bool GoOn(uint64_t done) const;
  void Begin(const std::string& phase, uint64_t total) const;
  void AddPhase(const std::string& name, absl::Duration took, uint64_t bytes);

  DeviceTier& tier_;
  const DeviceTier::Work& work_;
  const std::string policy_;
  std::vector<std::pair<DeviceGpu*, abi::DeviceMode>> gpus_;  // In the order of the work.
  std::vector<Slot> slots_;
  std::vector<std::pair<std::string, Phase>> phases_;
  uint64_t filled_bytes_ = 0;  // Of the slots before the one at work.
};

}  // namespace modelhost
