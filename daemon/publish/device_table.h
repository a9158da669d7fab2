// What the index says of GPUs: the table of segments, and where each tensor lies in them.
//
// Checks a plan against the version while the tables are made from it: a plan of other contents is
// the loader's mistake. Sizes in bytes. The plan is lent. Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "daemon/region/device_plan.h"
#include "daemon/region/resident_version.h"
#include "proto/abi/version_index.h"

namespace modelhost {

class DeviceTable {
 public:
  // INTERNAL: the plan does not fit the version, or not itself. Errors say no more than that part:
  // the caller says of which index.
  absl::Status Init(const DevicePlan& plan, const ResidentVersion& version);

  // Marks a mappable tensor, whose region and bytes are filled in, if the plan has it.
  void Place(abi::TensorEntry& tensor);

  // After all tensors. INTERNAL: the plan has bytes that are no tensor's.
  absl::Status CheckAllPlaced() const;

  const std::vector<abi::DeviceSegmentEntry>& segments() const { return segments_; }

 private:
  absl::Status AddPart(const DevicePlan::Part& part, const ResidentVersion& version);

  const DevicePlan* plan_ = nullptr;
  std::vector<const DevicePlan::Part*> by_region_;  // Null: nothing of that region goes.
  std::vector<std::vector<bool>> placed_;           // By region and range.
  std::vector<abi::DeviceSegmentEntry> segments_;
};

}  // namespace modelhost
