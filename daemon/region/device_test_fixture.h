// For tests of the device tier: GPUs in this process, regions made by hand, and one version's plan.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "daemon/platform/clock.h"
#include "daemon/platform/linux_os.h"
#include "daemon/region/device_tier.h"
#include "proto/handle/region.h"
#include "tests/fakes/fake_device.h"

namespace modelhost {

class DeviceTest : public testing::Test {
 protected:
  static constexpr uint64_t kMiB = uint64_t{1} << 20;
  static constexpr char kGpu[] = "GPU-1";
  static constexpr char kOther[] = "GPU-2";

  void SetUp() override;
  void TearDown() override;

  // With the GPUs that were added so far.
  void StartTier(DeviceTierOptions options = {});
  // A sealed region whose content is `bytes` of `seed`.
  std::shared_ptr<const HostRegion> Sealed(char seed, uint64_t bytes);
  // Of a file in a temporary directory.
  std::shared_ptr<const HostRegion> File(char seed, uint64_t bytes, Residency residency);
  // One part per region: three tensors, of which two lie apart from the others.
  DevicePlan PlanOf(size_t regions, uint64_t max_segment = UINT64_MAX) const;
  // What a segment of region `r` in PlanOf must hold.
  static std::string Expected(const HostRegion& region, const DevicePlan::Part& part,
                              uint32_t segment);

  absl::StatusOr<std::vector<DeviceImage>> Make();
  std::vector<DeviceImage> MustMake();
  // Nothing is left of a load that failed, or will be in a moment.
  void ExpectNothingLeft();

  FakeGpus gpus_;
  LinuxOs os_;
  SystemClock clock_;
  BudgetPool host_{"host", uint64_t{64} << 20};
  std::unique_ptr<DeviceTier> tier_;
  std::string root_;
  // Of the next Make.
  std::string name_ = "planner@8";
  DevicePolicy policy_{true, "", {}};
  DevicePlan plan_;
  std::vector<std::string> on_ = {kGpu};
  std::vector<std::shared_ptr<const HostRegion>> regions_;
  CancelToken cancel_;
  std::vector<std::string> phases_;
  std::vector<std::string> warnings_;
  uint64_t progressed_ = 0;
};

}  // namespace modelhost
