// The real agent, in a process of its own, on the fake driver.
#include "daemon/device_agent/device_agent.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "gmock/gmock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr char kGpu[] = "GPU-00fafafa-fafa-fafa-fafa-fafafafafa00";

class DeviceAgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    program_ = UniqueFd(::open(AGENT_TEST_CHILD, O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(program_.valid());
  }
  void TearDown() override {
    for (const std::string& name : set_) ::unsetenv(name.c_str());
  }
  void Set(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
    set_.push_back(name);
  }
  DeviceAgentOptions Options(const char* library = FAKECUDA_PATH) {
    DeviceAgentOptions options;
    options.arguments = {library};
    options.ring_bytes = 4 * kMiB;
    options.threads = 2;
    return options;
  }
  std::unique_ptr<DeviceAgent> Agent(DeviceAgentOptions options) {
    return std::make_unique<DeviceAgent>(program_, clock_, kGpu, std::move(options));
  }
  // A file of `bytes` pseudo-random bytes.
  UniqueFd Source(uint64_t bytes) {
    UniqueFd fd(::open(::testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    std::vector<uint64_t> words(bytes / 8 + 1);
    uint64_t word = 7;
    for (uint64_t& one : words) one = word = word * 6364136223846793005ULL + 1442695040888963407ULL;
    EXPECT_EQ(::pwrite(fd.get(), words.data(), bytes, 0), static_cast<ssize_t>(bytes));
    return fd;
  }
  static std::vector<DeviceCopy> Pieces() {
    // Odd offsets, gaps, one that spans chunks of the ring, one that is tiny.
    return {{0, 3 * kMiB + 5, 13, 0}, {4 * kMiB, 7, 3, 0}, {5 * kMiB + 512, 2 * kMiB, kMiB + 1, 0}};
  }
  // The first load of a model.
  absl::Status Load(DeviceAgent& agent, bool direct, uint64_t source_bytes = 4 * kMiB) {
    const UniqueFd source = Source(source_bytes);
    const auto segment = agent.Create(8 * kMiB);
    if (!segment.ok()) return segment.status();
    const auto sum =
        agent.Upload(*segment, Pieces(), {&source}, direct, [](uint64_t) { return true; });
    if (!sum.ok()) return sum.status();
    if (const absl::Status good = agent.Verify(*segment, *sum, [](uint64_t) { return true; });
        !good.ok()) {
      return good;
    }
    return agent.Release(*segment);
  }

  SystemClock clock_;
  UniqueFd program_;
  std::vector<std::string> set_;
};

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
       "page tables"},
      {"host_registered",
       FAKECUDA_PATH,
       {{"FAKECUDA_ATTR_18", "1"}, {"FAKECUDA_ATTR_103", "0"}},
       true,
       "attribute 103"},
      {"cuda_ipc", FAKECUDA_OLD_PATH, {}, false, "the driver lacks cuMem"},
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
  const auto go_on = [](uint64_t) { return true; };
  const auto segment = agent->Create(8 * kMiB);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const auto sum = agent->Upload(*segment, Pieces(), {&source}, false, go_on);
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
  EXPECT_TRUE(absl::IsDataLoss(agent->Verify(*segment, *sum, go_on)));
}

TEST_F(DeviceAgentTest, WhatCannotBeLoadedFailsWithItsReasonAndTheAgentStays) {
  Set("FAKECUDA_MEM_MB", "16");
  const auto agent = Agent(Options());
  EXPECT_THAT(Load(*agent, false, kMiB).message(), HasSubstr("the source ends before"));
  EXPECT_THAT(Load(*agent, true, kMiB).message(), HasSubstr("the source ends before"));
  const auto first = agent->Create(16 * kMiB);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = agent->Create(8 * kMiB);
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  const UniqueFd source = Source(kMiB);
  const auto go_on = [](uint64_t) { return true; };
  for (const DeviceCopy& bad : {DeviceCopy{0, 17 * kMiB, 0, 0}, DeviceCopy{0, 1, 0, 1},
                                DeviceCopy{16 * kMiB, 1, 0, 0}, DeviceCopy{0, 0, 0, 0}}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(agent->Upload(*first, {bad}, {&source}, false, go_on).status()));
  }
  EXPECT_TRUE(absl::IsCancelled(
      agent->Upload(*first, {{0, 8, 0, 0}}, {&source}, false, [](uint64_t) { return false; })
          .status()));
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentTest, AnAgentThatDiesOrLosesItsContextFailsOneLoad) {
  for (const char* what : {"kill", "stick"}) {
    for (const char* symbol :
         {"cuMemCreate:2", "cuMemExportToShareableHandle:2", "cuMemMap:3", "cuMemHostAlloc:1",
          "cuMemcpyHtoDAsync:2", "cuStreamSynchronize:1", "cuMemcpyDtoH:3"}) {
      SCOPED_TRACE(std::string(symbol) + " " + what);
      ::setenv("FAKECUDA_FAIL", (std::string(symbol) + ":" + what).c_str(), 1);
      const auto agent = Agent(Options());
      ASSERT_TRUE(agent->Report().ok());
      const absl::Status failed = Load(*agent, false);
      ::unsetenv("FAKECUDA_FAIL");
      EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
      EXPECT_THAT(failed.message(),
                  HasSubstr(*what == 'k' ? "has ended (signal 9)" : "ILLEGAL_ADDRESS (700)"));
      EXPECT_EQ(Load(*agent, false), absl::OkStatus());
      EXPECT_EQ(agent->incarnation(), 2);
      const auto memory = agent->Memory();
      ASSERT_TRUE(memory.ok()) << memory.status();
      EXPECT_EQ(memory->free_bytes, memory->total_bytes);
    }
  }
}

TEST_F(DeviceAgentTest, AnAgentThatHangsIsKilledAndTheNextOneServes) {
  ::setenv("FAKECUDA_FAIL", "cuStreamSynchronize:1:hang", 1);
  DeviceAgentOptions options = Options();
  options.stall = absl::Seconds(2);
  const auto agent = Agent(options);
  const absl::Status failed = Load(*agent, false);
  ::unsetenv("FAKECUDA_FAIL");
  EXPECT_TRUE(absl::IsDeadlineExceeded(failed)) << failed;
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
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
        Case{"cuMemcpyDtoH:3:kill", absl::StatusCode::kUnavailable, 2},
        Case{"cuMemcpyDtoH:3:1", absl::StatusCode::kDataLoss, 1},
        Case{"cuMemImportFromShareableHandle:3:1", absl::StatusCode::kDataLoss, 1},
        Case{"cuMemImportFromShareableHandle:3:stick", absl::StatusCode::kUnavailable, 2},
        Case{"cuMemImportFromShareableHandle:3:kill", absl::StatusCode::kUnavailable, 2},
        Case{"cuMemMap:3:2", absl::StatusCode::kResourceExhausted, 1}}) {
    SCOPED_TRACE(one.fail);
    ::setenv("FAKECUDA_FAIL", one.fail, 1);
    const auto agent = Agent(Options());
    const auto segment = agent->Create(8 * kMiB);
    ::unsetenv("FAKECUDA_FAIL");
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(agent->Check(*segment).code(), one.code);
    EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
    EXPECT_EQ(agent->incarnation(), one.processes);
  }
  const auto agent = Agent(Options());
  const auto segment = agent->Create(8 * kMiB);
  ASSERT_TRUE(segment.ok()) << segment.status();
  // A descriptor behind which nothing is, as after a reset.
  ASSERT_EQ(::ftruncate(segment->fd.get(), 0), 0);
  const absl::Status gone = agent->Check(*segment);
  EXPECT_TRUE(absl::IsDataLoss(gone)) << gone;
  EXPECT_THAT(gone.message(), HasSubstr("the segment is no longer there: import a descriptor"));
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentTest, AGpuThatIsNotSeenAnyMoreIsUnavailable) {
  const auto agent = Agent(Options());
  const auto segment = agent->Create(2 * kMiB);
  ASSERT_TRUE(segment.ok()) << segment.status();
  Set("FAKECUDA_DEVICES", "2");
  Set("CUDA_VISIBLE_DEVICES", "1");
  EXPECT_TRUE(absl::IsUnavailable(Agent(Options())->Check(*segment)));
  Set("CUDA_VISIBLE_DEVICES", "7");
  EXPECT_TRUE(absl::IsUnavailable(Agent(Options())->Check(*segment)));
}

TEST_F(DeviceAgentTest, LegacyMemoryIsLostWithItsAgent) {
  const auto agent = Agent(Options(FAKECUDA_OLD_PATH));
  const auto segment = agent->Create(8 * kMiB);
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
