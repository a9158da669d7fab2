// Device memory and what may go wrong: daemons that send something else, drivers that fail.
#include <sys/mman.h>

#include "client/src/testing/device_fixture.h"

namespace modelhost::testing {
namespace {

using ::testing::HasSubstr;

using DeviceFaultsTest = DeviceTest;

// --- What the daemon sends is not trusted
// -------------------------------------------------------------------------------------------------

TEST_F(DeviceFaultsTest, FramesThatDoNotFitAreNeverUsed) {
  StartPlanner();
  const auto expect = [&](mh_status status, const char* why, const Faults& faults) {
    server_->SetFaults(faults);
    InClient([&] {
      const ClientPtr client = Connect();
      HandlePtr handle;
      EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), status)
          << why << ": " << error_.message;
      EXPECT_THAT(error_.message, HasSubstr(why));
      EXPECT_EQ(handle, nullptr);
    });
    EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; })) << why;
  };
  Faults faults;
  faults.device_total_extra = -1;
  expect(MH_INTERNAL, "counts its segments wrongly", faults);
  faults = {};
  faults.device_short_tail = true;
  expect(MH_INTERNAL, "counts its segments wrongly", faults);
  faults = {};
  faults.device_endless = true;
  expect(MH_INTERNAL, "counts its segments wrongly", faults);
  faults = {};
  faults.device_drop_fds = true;
  expect(MH_INTERNAL, "too few or too many descriptors", faults);
  faults = {};
  faults.device_wrong_order = true;
  expect(MH_INTERNAL, "out of order", faults);
  faults = {};
  faults.device_unannounced = true;
  expect(MH_INTERNAL, "does not say of devices", faults);
  faults = {};
  faults.device_before_regions = true;
  expect(MH_INTERNAL, "not due", faults);
  faults = {};
  faults.device_drop_segment = true;
  expect(MH_DATA_LOSS, "1 device segments came, but the index has 2", faults);
  faults = {};
  faults.device_extra_segment = true;
  expect(MH_DATA_LOSS, "3 device segments came, but the index has 2", faults);
  faults = {};
  faults.device_bytes_extra = 512;
  expect(MH_DATA_LOSS, "the index says 65536", faults);
  faults = {};
  faults.device_mode = static_cast<uint32_t>(abi::DeviceMode::kHostDirect);
  expect(MH_INTERNAL, "counts its segments wrongly", faults);
  faults = {};
  faults.device_mode = static_cast<uint32_t>(abi::DeviceMode::kCudaIpc);
  expect(MH_INTERNAL, "too few or too many descriptors", faults);
  faults = {};
  faults.device_mode = static_cast<uint32_t>(abi::DeviceMode::kHostRegistered);
  expect(MH_DATA_LOSS, "planner@7: device segment 0 of 2", faults);
  faults = {};
  faults.device_mode = 77;
  faults.device_drop_fds = true;
  expect(MH_UNIMPLEMENTED, "mode 77, which this library does not know", faults);
}

TEST_F(DeviceFaultsTest, WhoDidNotAskTakesNone) {
  StartPlanner();
  Faults faults;
  faults.device_unasked = true;
  server_->SetFaults(faults);
  const ClientPtr client = Connect();
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "planner", &handle), MH_INTERNAL);
  EXPECT_THAT(error_.message, HasSubstr("does not say of devices"));
}

TEST_F(DeviceFaultsTest, MemoryThatIsNotWhatItIsSaidToBeIsRefused) {
  StartPlanner();
  const auto expect = [&](const char* why, UniqueFd first, uint64_t bytes = kSegmentBytes) {
    FakeVersion version = OnDevice("planner", 9, 9, 2, 1);
    version.device_segments[0].bytes = bytes;
    server_->Add(version);
    FakeDevice device;
    device.gpu = kGpu0;
    device.bytes = {bytes};
    device.fds.push_back(std::move(first));
    server_->SetDevice("planner", 9, std::move(device));
    InClient([&] {
      const ClientPtr client = Connect();
      HandlePtr handle;
      // Not even without: other bytes are wrong for everyone.
      for (const uint32_t want : {MH_WANT_DEVICE, MH_WANT_DEVICE_IF_ANY}) {
        EXPECT_EQ(AcquireOn(client, "planner@9", want, &handle), MH_DATA_LOSS) << error_.message;
        EXPECT_THAT(error_.message, HasSubstr("planner@9: device segment 0 of 1"));
        EXPECT_THAT(error_.message, HasSubstr(why));
      }
    });
  };
  const std::string bytes(kSegmentBytes, 'x');
  expect("import a descriptor", UniqueFd(::memfd_create("plain", MFD_CLOEXEC)));
  expect("another GPU", MakeSegment(1, bytes));
  expect("map device memory of 131072", MakeSegment(0, bytes), 2 * kSegmentBytes);
}

// --- Failing drivers
// -------------------------------------------------------------------------------------------------

TEST_F(DeviceFaultsTest, EveryCallOfTheDriverMayFailAndNothingIsLeftBehind) {
  StartPlanner();
  for (const char* symbol :
       {"cuDeviceGetUuid", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent",
        "cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    // Each of the calls that the first acquire makes, and all of those that a later one makes.
    for (const char* number : {"1", "2", "1+"}) {
      const std::string failure = std::string(symbol) + ":" + number + ":2";
      InClient([&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        const bool later = std::string(number) == "1+";
        if (later) handle = AcquiredOn(client, "planner");
        handle.reset();
        const size_t descriptors = OpenDescriptors();
        ::setenv("FAKECUDA_FAIL", failure.c_str(), 1);
        const mh_status status = AcquireOn(client, "planner", MH_WANT_DEVICE, &handle);
        // Not every one is called twice in one acquire.
        if (status != MH_OK || later) {
          EXPECT_EQ(status, MH_RESOURCE_EXHAUSTED) << failure << ": " << error_.message;
          EXPECT_THAT(error_.message, HasSubstr("CUDA_ERROR_OUT_OF_MEMORY (2)"));
        }
        handle.reset();
        ::unsetenv("FAKECUDA_FAIL");
        if (later) {
          EXPECT_EQ(OpenDescriptors(), descriptors) << symbol;
        }
        handle = AcquiredOn(client, "planner");
        ASSERT_NE(handle, nullptr) << failure;
        ExpectSameBytes(OwnCuda(), handle.get());
      });
    }
  }
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(DeviceFaultsTest, WhatCanDoWithoutADeviceDoesWhereTheDriverFails) {
  StartPlanner();
  InClient(
      [&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE_IF_ANY, &handle), MH_OK);
        EXPECT_THAT(mh_handle_device_reason(handle.get()), HasSubstr("device segment 1 of 2"));
        EXPECT_EQ(TensorOf(handle.get(), 0).device_data, nullptr);
        EXPECT_EQ(ValueOf(handle.get()), 7);
      },
      {{"FAKECUDA_FAIL", "cuMemMap:2:2"}});
}

}  // namespace
}  // namespace modelhost::testing
