// The real agent, in a process of its own, on the fake driver.
#include <map>

#include "daemon/device_agent/device_agent_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

TEST_F(DeviceAgentTest, GpusAreListedAndWithoutADriverItsReason) {
  Set("FAKECUDA_DEVICES", "2");
  const auto devices = DeviceAgent::List(program_, clock_, Options());
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->size(), 2);
  EXPECT_EQ((*devices)[0].uuid, kGpu);
  EXPECT_EQ((*devices)[1].name, "Fake GPU 1");
  EXPECT_EQ((*devices)[0].total_bytes, 1024 * kMiB);
  const auto none = DeviceAgent::List(program_, clock_, Options("libnowhere.so.1"));
  EXPECT_TRUE(absl::IsUnavailable(none.status()));
  EXPECT_THAT(none.status().message(), HasSubstr("no CUDA driver: libnowhere.so.1"));
  Set("FAKECUDA_INIT", "34");
  EXPECT_THAT(DeviceAgent::List(program_, clock_, Options()).status().message(),
              HasSubstr("CUDA_ERROR_STUB_LIBRARY (34)"));
}

TEST_F(DeviceAgentTest, EachModeIsChosenAndSaysWhy) {
  struct Case {
    const char* mode;
    const char* library;
    std::map<std::string, std::string> environment;
    bool allow;
    const char* reason;
  };
  const Case cases[] = {
      {"vmm_fd", FAKECUDA_PATH, {}, false, "read back device memory"},
      {"host_direct",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_88", "1"}, {"FAKECUDA_ATTR_100", "1"}},
       false,
       "page tables (attributes 88 and 100); a kernel read a sealed host page"},
      {"host_direct",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_88", "1"},
        {"FAKECUDA_ATTR_100", "1"},
        {"FAKECUDA_FAIL", "cuModuleLoadData:1:200"}},
       false,
       "by its attributes alone: it compiles no PTX: CUDA_ERROR_INVALID_IMAGE (200)"},
      {"vmm_fd",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_88", "1"},
        {"FAKECUDA_ATTR_100", "1"},
        {"FAKECUDA_FAIL", "cuLaunchKernel:1:stick"}},
       false,
       "promise it, but a kernel that reads a host page: CUDA_ERROR_ILLEGAL_ADDRESS (700); the "
       "self-test exported"},
      {"vmm_fd",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_88", "1"},
        {"FAKECUDA_ATTR_100", "1"},
        {"FAKECUDA_FAIL", "cuStreamSynchronize:2:kill"}},
       false,
       "promise it, but the device agent has ended"},
      {"host_registered",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_18", "1"}, {"FAKECUDA_ATTR_103", "0"}},
       true,
       "attribute 103"},
      {"cuda_ipc", FAKECUDA_OLD_PATH, {}, false, "the driver lacks cuMem"},
      {"cuda_ipc",
       FAKECUDA_OLD_PATH,
       {},
       false,
       "another process opened a legacy handle and read it back"},
      {"host_only",
       FAKECUDA_OLD_PATH,
       {{"FAKECUDA_FAIL", "cuIpcOpenMemHandle:1:201"}},
       false,
       "legacy CUDA IPC fails: open a CUDA IPC handle: CUDA_ERROR_INVALID_CONTEXT (201)"},
      {"host_only",
       FAKECUDA_OLD_PATH,
       {{"FAKECUDA_FAIL", "cuIpcOpenMemHandle:1:kill"}},
       false,
       "legacy CUDA IPC fails: the device agent has ended"},
      {"cuda_ipc", FAKECUDA_PATH, {{"FAKECUDA_DRIVER_VERSION", "11040"}}, false, "older than 12.0"},
      {"cuda_ipc",
       FAKECUDA_PATH,
       {{"FAKECUDA_FAIL", "cuMemImportFromShareableHandle:1:999"}},
       false,
       "the self-test failed: import a descriptor of device memory: CUDA_ERROR_UNKNOWN (999)"},
      {"host_only",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_102", "0"}, {"FAKECUDA_NO_IPC", "1"}},
       true,
       "legacy CUDA IPC fails"},
  };
  for (const Case& one : cases) {
    for (const auto& [name, value] : one.environment) ::setenv(name.c_str(), value.c_str(), 1);
    DeviceAgentOptions options = Options(one.library);
    options.allow_registered = one.allow;
    const auto report = Agent(options)->Report();
    for (const auto& [name, value] : one.environment) ::unsetenv(name.c_str());
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->mode, one.mode);
    EXPECT_THAT(report->reason, HasSubstr(one.reason));
  }
}

TEST_F(DeviceAgentTest, AnUploadIsWholeWithAndWithoutThePageCacheAndByLegacyHandles) {
  const auto agent = Agent(Options());
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
  EXPECT_EQ(Load(*agent, true), absl::OkStatus());
  const auto memory = agent->Memory();
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->free_bytes, memory->total_bytes);
  EXPECT_EQ(Load(*Agent(Options(FAKECUDA_OLD_PATH)), false), absl::OkStatus());
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentTest, WhatIsOnTheDeviceIsWhatWasInTheFile) {
  const auto agent = Agent(Options());
  const UniqueFd source = Source(4 * kMiB);
  const auto segment = agent->Create(8 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const auto sum = agent->Upload(*segment, Pieces(), {&source}, false, GoOn);
  ASSERT_TRUE(sum.ok()) << sum.status();
  // The fake's descriptor can be read like a file.
  std::vector<char> device(8 * kMiB);
  std::vector<char> file(4 * kMiB);
  ASSERT_EQ(::pread(segment->fd.get(), device.data(), device.size(), 0), 8 * kMiB);
  ASSERT_EQ(::pread(source.get(), file.data(), file.size(), 0), 4 * kMiB);
  std::vector<char> expected(8 * kMiB, 0);
  for (const DeviceCopy& copy : Pieces()) {
    std::copy_n(file.begin() + static_cast<int64_t>(copy.source_offset), copy.bytes,
                expected.begin() + static_cast<int64_t>(copy.device_offset));
  }
  EXPECT_TRUE(device == expected);
  // One bit turns.
  device[4 * kMiB] ^= 1;
  ASSERT_EQ(::pwrite(segment->fd.get(), &device[4 * kMiB], 1, 4 * kMiB), 1);
  EXPECT_TRUE(absl::IsDataLoss(agent->Verify(*segment, *sum, GoOn)));
}

TEST_F(DeviceAgentTest, WhatCannotBeLoadedFailsWithItsReasonAndTheAgentStays) {
  Set("FAKECUDA_MEM_MB", "16");
  const auto agent = Agent(Options());
  EXPECT_THAT(Load(*agent, false, kMiB).message(), HasSubstr("the source ends before"));
  EXPECT_THAT(Load(*agent, true, kMiB).message(), HasSubstr("the source ends before"));
  const auto first = agent->Create(16 * kMiB, GoOn);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = agent->Create(8 * kMiB, GoOn);
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  const UniqueFd source = Source(kMiB);
  for (const DeviceCopy& bad : {DeviceCopy{0, 17 * kMiB, 0, 0}, DeviceCopy{0, 1, 0, 1},
                                DeviceCopy{16 * kMiB, 1, 0, 0}, DeviceCopy{0, 0, 0, 0}}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(agent->Upload(*first, {bad}, {&source}, false, GoOn).status()));
  }
  EXPECT_TRUE(absl::IsCancelled(
      agent->Upload(*first, {{0, 8, 0, 0}}, {&source}, false, [](uint64_t) { return false; })
          .status()));
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentTest, ALookAtASegmentTellsALostDeviceFromALostSegment) {
  struct Case {
    const char* fail;
    absl::StatusCode code;
    uint64_t processes;
  };
  // The self-test imports, maps and reads before: twice, twice, once.
  for (const Case& one :
       {Case{"cuInit:9:1", absl::StatusCode::kOk, 1},
        Case{"cuMemcpyDtoH:2:stick", absl::StatusCode::kUnavailable, 2},
        Case{"cuMemcpyDtoH:3:kill", absl::StatusCode::kAborted, 2},
        Case{"cuMemcpyDtoH:3:1", absl::StatusCode::kDataLoss, 1},
        Case{"cuMemImportFromShareableHandle:3:1", absl::StatusCode::kDataLoss, 1},
        Case{"cuMemImportFromShareableHandle:3:stick", absl::StatusCode::kUnavailable, 2},
        Case{"cuMemImportFromShareableHandle:3:kill", absl::StatusCode::kAborted, 2},
        Case{"cuMemMap:3:2", absl::StatusCode::kResourceExhausted, 1}}) {
    SCOPED_TRACE(one.fail);
    ::setenv("FAKECUDA_FAIL", one.fail, 1);
    const auto agent = Agent(Options());
    const auto segment = agent->Create(8 * kMiB, GoOn);
    ::unsetenv("FAKECUDA_FAIL");
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(agent->Check(*segment).code(), one.code);
    EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
    EXPECT_EQ(agent->incarnation(), one.processes);
  }
  const auto agent = Agent(Options());
  const auto segment = agent->Create(8 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  // One that is killed before it has opened the device has not seen it.
  Set("FAKECUDA_FAIL", "cuInit:1:kill");
  EXPECT_TRUE(absl::IsAborted(Agent(Options())->Check(*segment)));
  Set("FAKECUDA_FAIL", "cuInit:1:100");
  EXPECT_TRUE(absl::IsUnavailable(Agent(Options())->Check(*segment)));
  // A descriptor behind which nothing is, as after a reset.
  ASSERT_EQ(::ftruncate(segment->fd.get(), 0), 0);
  const absl::Status gone = agent->Check(*segment);
  EXPECT_TRUE(absl::IsDataLoss(gone)) << gone;
  EXPECT_THAT(gone.message(), HasSubstr("the segment is no longer there: import a descriptor"));
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentTest, AFullGpuKeepsItsModeWhenAnotherProcessLooksAtIt) {
  Set("FAKECUDA_MEM_MB", "8");
  const auto first = Agent(Options());
  const auto segment = first->Create(8 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const auto second = Agent(Options());
  const auto report = second->Report();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mode, "vmm_fd");
  EXPECT_THAT(report->reason, HasSubstr("the self-test had no room"));
  EXPECT_EQ(second->Check(*segment), absl::OkStatus());
}

TEST_F(DeviceAgentTest, AnUploadWithoutAPieceIsZeros) {
  const auto agent = Agent(Options());
  const auto segment = agent->Create(2 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const std::vector<char> dirt(2 * kMiB, 'x');
  ASSERT_EQ(::pwrite(segment->fd.get(), dirt.data(), dirt.size(), 0), 2 * kMiB);
  const auto sum = agent->Upload(*segment, {}, {}, false, GoOn);
  ASSERT_TRUE(sum.ok()) << sum.status();
  std::vector<char> device(2 * kMiB, 'y');
  ASSERT_EQ(::pread(segment->fd.get(), device.data(), device.size(), 0), 2 * kMiB);
  EXPECT_TRUE(device == std::vector<char>(2 * kMiB, 0));
}

TEST_F(DeviceAgentTest, AGpuThatIsNotSeenAnyMoreIsUnavailable) {
  const auto agent = Agent(Options());
  const auto segment = agent->Create(2 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  Set("FAKECUDA_DEVICES", "2");
  Set("CUDA_VISIBLE_DEVICES", "1");
  EXPECT_TRUE(absl::IsUnavailable(Agent(Options())->Check(*segment)));
  Set("CUDA_VISIBLE_DEVICES", "7");
  EXPECT_TRUE(absl::IsUnavailable(Agent(Options())->Check(*segment)));
}

TEST_F(DeviceAgentTest, LegacyMemoryIsLostWithItsAgent) {
  const auto agent = Agent(Options(FAKECUDA_OLD_PATH));
  const auto segment = agent->Create(8 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_FALSE(segment->fd.valid());
  ::setenv("FAKECUDA_FAIL", "cuMemGetInfo:1:kill", 1);
  const auto fresh = Agent(Options(FAKECUDA_OLD_PATH));
  EXPECT_TRUE(absl::IsUnavailable(fresh->Memory().status()));
  ::unsetenv("FAKECUDA_FAIL");
  DeviceSegment lost;
  lost.bytes = 8 * kMiB;
  lost.id = 1;
  lost.incarnation = 1;
  ASSERT_TRUE(fresh->Report().ok());
  EXPECT_TRUE(absl::IsDataLoss(fresh->Check(lost)));
  EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(fresh->Verify(lost, 0, [](uint64_t) { return true; })));
  EXPECT_EQ(agent->Release(*segment), absl::OkStatus());
}

}  // namespace
}  // namespace modelhost
