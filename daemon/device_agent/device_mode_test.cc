#include "daemon/device_agent/device_mode.h"

#include "gmock/gmock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

DeviceFacts Discrete() {
  DeviceFacts facts;
  facts.has_driver = facts.has_ipc = facts.host_register = facts.vmm = facts.posix_fd = true;
  facts.vmm_test = facts.ipc_export = facts.ipc_test = TestResult::kPassed;
  return facts;
}

TEST(DeviceMode, ADiscreteGpuSharesDescriptors) {
  EXPECT_EQ(ChooseDeviceMode(Discrete(), true).mode, DeviceMode::kVmmFd);
}

TEST(DeviceMode, AGpuThatReadsHostPagesNeedsNoCopy) {
  DeviceFacts facts = Discrete();
  facts.integrated = facts.pageable_access = facts.host_page_tables = true;
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kHostDirect);
  facts.direct_test = TestResult::kPassed;
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("a kernel read a sealed host page"));
  facts.direct_test = TestResult::kNotPossible;
  facts.direct_failure = "the driver compiles no PTX";
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kHostDirect);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason,
              HasSubstr("by its attributes alone: the driver compiles no PTX"));
  facts.direct_test = TestResult::kFailed;
  facts.direct_failure = "CUDA_ERROR_ILLEGAL_ADDRESS (700)";
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kVmmFd);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("not host_direct: attributes"));
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("(700); the self-test exported"));
  facts.direct_test = TestResult::kPassed;
  facts.host_page_tables = false;  // Pageable memory by migration is something else.
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kVmmFd);
}

TEST(DeviceMode, EveryWayToLackDescriptorsIsNamed) {
  const auto without = [](auto change) {
    DeviceFacts facts = Discrete();
    change(facts);
    const DeviceModeChoice choice = ChooseDeviceMode(facts, false);
    EXPECT_EQ(choice.mode, DeviceMode::kCudaIpc);
    return choice.reason;
  };
  EXPECT_THAT(without([](DeviceFacts& f) { f.no_vmm = "driver 11.4 is older than 12.0"; }),
              HasSubstr("not vmm_fd: driver 11.4 is older than 12.0"));
  EXPECT_THAT(without([](DeviceFacts& f) { f.vmm = false; }), HasSubstr("attribute 102"));
  EXPECT_THAT(without([](DeviceFacts& f) { f.posix_fd = false; }), HasSubstr("attribute 103"));
  EXPECT_THAT(without([](DeviceFacts& f) {
                f.vmm_test = TestResult::kFailed;
                f.vmm_failure = "wrong bytes";
              }),
              HasSubstr("the self-test failed: wrong bytes"));
  EXPECT_THAT(without([](DeviceFacts& f) { f.vmm_test = TestResult::kNotRun; }),
              HasSubstr("did not run"));
}

TEST(DeviceMode, ADeviceThatIsFullKeepsItsMode) {
  DeviceFacts facts = Discrete();
  facts.vmm_test = facts.ipc_export = TestResult::kNotPossible;
  facts.vmm_failure = facts.ipc_failure = "CUDA_ERROR_OUT_OF_MEMORY (2)";
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kVmmFd);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("had no room: CUDA_ERROR_OUT"));
  facts.posix_fd = false;
  facts.ipc_test = TestResult::kNotRun;
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kCudaIpc);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("untested: CUDA_ERROR_OUT"));
}

TEST(DeviceMode, LegacyHandlesNeedAnotherProcessThatOpensThem) {
  DeviceFacts facts = Discrete();
  facts.vmm = false;
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("another process opened a legacy"));
  facts.ipc_test = TestResult::kNotRun;
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kCudaIpc);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("no other process has opened"));
  facts.ipc_test = TestResult::kFailed;
  facts.ipc_failure = "invalid device context (201)";
  EXPECT_EQ(ChooseDeviceMode(facts, false).mode, DeviceMode::kHostOnly);
  EXPECT_THAT(ChooseDeviceMode(facts, false).reason, HasSubstr("fails: invalid device context"));
}

TEST(DeviceMode, RegisteredPagesAreOnlyForWhoAsksForThem) {
  DeviceFacts facts = Discrete();
  facts.integrated = true;
  facts.vmm = false;
  facts.has_ipc = false;
  EXPECT_EQ(ChooseDeviceMode(facts, true).mode, DeviceMode::kHostRegistered);
  const DeviceModeChoice refused = ChooseDeviceMode(facts, false);
  EXPECT_EQ(refused.mode, DeviceMode::kHostOnly);
  EXPECT_THAT(refused.reason, HasSubstr("not host_registered: it is not allowed"));
  facts.integrated = false;
  EXPECT_EQ(ChooseDeviceMode(facts, true).mode, DeviceMode::kHostOnly);
  EXPECT_THAT(DeviceModeLimits(DeviceMode::kHostRegistered), HasSubstr("unprotected"));
}

TEST(DeviceMode, WithoutAnyWayItIsHostOnlyWithEveryReason) {
  DeviceFacts facts = Discrete();
  facts.posix_fd = false;
  facts.ipc_export = TestResult::kFailed;
  facts.ipc_failure = "CUDA_ERROR_NOT_SUPPORTED (801)";
  const DeviceModeChoice choice = ChooseDeviceMode(facts, false);
  EXPECT_EQ(choice.mode, DeviceMode::kHostOnly);
  EXPECT_THAT(choice.reason, HasSubstr("attribute 103"));
  EXPECT_THAT(choice.reason, HasSubstr("not cuda_ipc: legacy CUDA IPC fails: CUDA_ERROR_NOT"));
  DeviceFacts none;
  none.no_driver = "no CUDA driver: libcuda.so.1";
  EXPECT_EQ(ChooseDeviceMode(none, true).reason, "no CUDA driver: libcuda.so.1");
}

}  // namespace
}  // namespace modelhost
