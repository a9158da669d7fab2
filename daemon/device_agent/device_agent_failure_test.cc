// A device agent that fails at any of its calls, dies, hangs, or loses its daemon.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "daemon/device_agent/device_agent_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSweepStep = 23;  // A process takes twenty times as long to start.
#else
constexpr int kSweepStep = 1;
#endif

class DeviceAgentFailureTest : public DeviceAgentTest {
 protected:
  void SetUp() override {
    DeviceAgentTest::SetUp();
    mark_ = ::testing::TempDir() + "fakecuda-mark-" + std::to_string(::getpid());
    Set("FAKECUDA_FAIL_MARK", mark_);
  }
  void TearDown() override {
    std::filesystem::remove(mark_);
    ::unsetenv("FAKECUDA_FAIL");
    DeviceAgentTest::TearDown();
  }
  // In processes that are started from now on.
  void Fail(const std::string& rule) {
    std::filesystem::remove(mark_);
    ::setenv("FAKECUDA_FAIL", rule.c_str(), 1);
  }
  DeviceAgentOptions Keeping(const char* milliseconds, const char* library = FAKECUDA_PATH) {
    DeviceAgentOptions options = Options(library);
    options.arguments = {library, milliseconds};
    return options;
  }
  bool Failed() const { return std::filesystem::exists(mark_); }
  static ptrdiff_t Descriptors() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  }
  DeviceAgentOptions SmallOptions() {
    DeviceAgentOptions options = Options();
    options.ring_bytes = kMiB / 4;
    options.threads = 1;
    return options;
  }
  absl::Status SmallLoad(DeviceAgent& agent, const UniqueFd& source) {
    const auto segment = agent.Create(2 * kMiB, GoOn);
    if (!segment.ok()) return segment.status();
    const auto sum =
        agent.Upload(*segment, {{0, 100'000, 3, 0}, {kMiB / 2, 7, 0, 0}}, {&source}, false, GoOn);
    if (!sum.ok()) return sum.status();
    if (const absl::Status good = agent.Verify(*segment, *sum, GoOn); !good.ok()) return good;
    if (const absl::Status good = agent.Check(*segment); !good.ok()) return good;
    return agent.Release(*segment);
  }

  std::string mark_;
};

TEST_F(DeviceAgentFailureTest, EveryCallOfALoadMayFailAndTheNextLoadIsServed) {
  const UniqueFd source = Source(kMiB / 4);
  Set("FAKECUDA_FAIL_ONCE", "1");
  for (const bool kill : {false, true}) {
    const ptrdiff_t descriptors = Descriptors();
    int call = 1 - kSweepStep;
    bool failed = true;
    while (failed && !HasFailure()) {
      call += kSweepStep;
      // Full, wrong, and what nobody knows, which counts as the end of the context.
      const std::string numbers[] = {"2", "1", "999"};
      const std::string what = kill ? "kill" : numbers[call % 3];
      SCOPED_TRACE("call " + std::to_string(call) + ": " + what);
      Fail("*:" + std::to_string(call) + ":" + what);
      const auto agent = Agent(SmallOptions());
      const absl::Status status = SmallLoad(*agent, source);
      ::unsetenv("FAKECUDA_FAIL");
      failed = Failed();
      if (!failed) {  // That process would fail later.
        EXPECT_EQ(status, absl::OkStatus());
        break;
      }
      if (kill) {
        // Of the look at the end, nothing is known then.
        EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsAborted(status)) << status;
        EXPECT_THAT(status.message(), HasSubstr("the device agent has ended (signal 9)"));
      } else if (!status.ok()) {
        // What the driver said, or that the device cannot hold a copy at all.
        EXPECT_THAT(status.message(),
                    ::testing::AnyOf(HasSubstr("(" + what + ")"), HasSubstr("did not take back")));
      }
      EXPECT_EQ(SmallLoad(*agent, source), absl::OkStatus());
      EXPECT_TRUE(!kill || agent->incarnation() == 2);
      const auto memory = agent->Memory();
      ASSERT_TRUE(memory.ok()) << memory.status();
      EXPECT_EQ(memory->free_bytes, memory->total_bytes);
    }
    EXPECT_EQ(Descriptors(), descriptors);
    EXPECT_GT(call, 60) << "the sweep ended before the upload";
  }
}

TEST_F(DeviceAgentFailureTest, AnAgentThatCannotGiveMemoryBackIsReplaced) {
  Fail("cuMemUnmap:3:1");  // The self-test does it twice.
  const auto agent = Agent(Options());
  ASSERT_TRUE(agent->Report().ok());
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
  EXPECT_TRUE(Failed());
  EXPECT_EQ(agent->incarnation(), 2);
}

TEST_F(DeviceAgentFailureTest, AnUploadThatIsUnderWayIsCancelledAndTheAgentStays) {
  const UniqueFd source = Source(4 * kMiB);
  // One that holds segments has the time to stop: they would go with it.
  for (const bool holds : {false, true}) {
    Fail("cuMemcpyHtoDAsync:1:slow");
    DeviceAgentOptions options = Options(holds ? FAKECUDA_OLD_PATH : FAKECUDA_PATH);
    if (!holds) options.cancel = absl::Seconds(30);
    const auto agent = Agent(options);
    const auto segment = agent->Create(8 * kMiB, GoOn);
    ASSERT_TRUE(segment.ok()) << segment.status();
    const auto sum =
        agent->Upload(*segment, Pieces(), {&source}, false, [&](uint64_t) { return !Failed(); });
    EXPECT_TRUE(absl::IsCancelled(sum.status())) << sum.status();
    EXPECT_THAT(sum.status().message(), HasSubstr("the upload was cancelled"));
    EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
    EXPECT_EQ(agent->Release(*segment), absl::OkStatus());
    EXPECT_EQ(Load(*agent, false), absl::OkStatus());
    EXPECT_EQ(agent->incarnation(), 1);
  }
}

TEST_F(DeviceAgentFailureTest, WhateverHangsIsCancelledSoon) {
  const UniqueFd source = Source(4 * kMiB);
  for (const char* rule : {"cuInit:1:hang", "cuMemCreate:2:hang", "cuMemcpyHtoDAsync:1:hang"}) {
    SCOPED_TRACE(rule);
    Fail(rule);
    DeviceAgentOptions options = Options();
    options.stall = absl::Seconds(60);
    const auto agent = Agent(options);
    const auto until_it_hangs = [&](uint64_t) { return !Failed(); };
    const auto start = std::chrono::steady_clock::now();
    const auto segment = agent->Create(8 * kMiB, until_it_hangs);
    absl::Status status = segment.status();
    if (status.ok()) {
      status = agent->Upload(*segment, Pieces(), {&source}, false, until_it_hangs).status();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, kPatience / 2);
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    ::unsetenv("FAKECUDA_FAIL");
    EXPECT_EQ(Load(*agent, false), absl::OkStatus());
    EXPECT_EQ(agent->incarnation(), 2);
  }
}

// What a second process was to find out is not known then: no other mode follows from it.
TEST_F(DeviceAgentFailureTest, ATryThatIsCancelledSaysNothingOfTheDevice) {
  Fail("cuIpcOpenMemHandle:1:hang");
  const auto agent = Agent(Options(FAKECUDA_OLD_PATH));
  const auto segment = agent->Create(2 * kMiB, [&](uint64_t) { return !Failed(); });
  EXPECT_TRUE(absl::IsCancelled(segment.status())) << segment.status();
  ::unsetenv("FAKECUDA_FAIL");
  const auto report = agent->Report();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->mode, "cuda_ipc");
}

TEST_F(DeviceAgentFailureTest, TheEndOfTheDaemonIsTheEndOfEveryCall) {
  for (const char* library : {FAKECUDA_PATH, FAKECUDA_OLD_PATH}) {
    SCOPED_TRACE(library);
    Fail("cuMemcpyHtoDAsync:1:hang");
    std::atomic<bool> ended{false};
    DeviceAgentOptions options = Options(library);
    options.stall = absl::Seconds(60);
    options.ended = &ended;
    const auto agent = Agent(options);
    absl::Status status;
    std::thread load([&] { status = Load(*agent, false); });
    const auto start = std::chrono::steady_clock::now();
    while (!Failed() && std::chrono::steady_clock::now() - start < kPatience / 2) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(Failed());
    ended = true;
    load.join();
    EXPECT_LT(std::chrono::steady_clock::now() - start, kPatience * 3 / 4);
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    ::unsetenv("FAKECUDA_FAIL");
    EXPECT_TRUE(absl::IsCancelled(agent->Report().status()));
    EXPECT_TRUE(absl::IsCancelled(agent->Create(2 * kMiB, nullptr).status()));
    EXPECT_EQ(agent->incarnation(), 1);
  }
}

TEST_F(DeviceAgentFailureTest, ADriverThatFailsWithoutAContextIsAskedInAnotherProcess) {
  Fail("cuDevicePrimaryCtxRetain:2+:100");
  const auto agent = Agent(Keeping("50"));
  ASSERT_TRUE(agent->Report().ok());
  const auto until = std::chrono::steady_clock::now() + kPatience;
  absl::Status status;
  while (status.ok() && std::chrono::steady_clock::now() < until) status = agent->Memory().status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("(100)"));
  ::unsetenv("FAKECUDA_FAIL");
  EXPECT_TRUE(agent->Memory().ok());
  EXPECT_EQ(agent->incarnation(), 2);
}

TEST_F(DeviceAgentFailureTest, AReportIsNotThatOfADeadProcess) {
  Fail("cuMemGetInfo:1:kill");
  const auto agent = Agent(Options());
  ASSERT_TRUE(agent->Report().ok());
  ::setenv("FAKECUDA_FAIL", "cuInit:1:100", 1);
  EXPECT_TRUE(absl::IsUnavailable(agent->Report().status()));
  EXPECT_TRUE(Failed());
  ::unsetenv("FAKECUDA_FAIL");
  EXPECT_TRUE(agent->Report().ok());
  EXPECT_EQ(agent->incarnation(), 3);
}

TEST_F(DeviceAgentFailureTest, AnotherModeIsNotTakenWithoutARestart) {
  Fail("cuMemGetInfo:1:kill");
  const auto agent = Agent(Options());
  ASSERT_TRUE(agent->Report().ok());
  ::unsetenv("FAKECUDA_FAIL");
  EXPECT_TRUE(absl::IsUnavailable(agent->Memory().status()));
  Set("FAKECUDA_ATTR_103", "0");
  for (const absl::Status& status : {agent->Create(2 * kMiB, GoOn).status(),
                                     agent->Report().status(), agent->Memory().status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("it was vmm_fd with granularity 2097152"));
    EXPECT_THAT(status.message(), HasSubstr("finds cuda_ipc with granularity 0"));
  }
  ::unsetenv("FAKECUDA_ATTR_103");
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
}

// It is booked only while it is used, and looking at a copy is no use.
TEST_F(DeviceAgentFailureTest, ThePinnedRingGoesWhateverElseIsAsked) {
  const UniqueFd source = Source(4 * kMiB);
  for (const char* library : {FAKECUDA_PATH, FAKECUDA_OLD_PATH}) {
    SCOPED_TRACE(library);
    Fail("cuMemFreeHost:1:0");  // Told, and as ever.
    const auto agent = Agent(Keeping("300", library));
    const auto segment = agent->Create(8 * kMiB, GoOn);
    ASSERT_TRUE(segment.ok()) << segment.status();
    ASSERT_TRUE(agent->Upload(*segment, Pieces(), {&source}, false, GoOn).ok());
    const auto until = std::chrono::steady_clock::now() + kPatience / 3;
    while (!Failed() && std::chrono::steady_clock::now() < until) {
      ASSERT_EQ(agent->Check(*segment), absl::OkStatus());
      ASSERT_TRUE(agent->Memory().ok());
    }
    EXPECT_TRUE(Failed());
    EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
    EXPECT_EQ(agent->incarnation(), 1);
    EXPECT_EQ(agent->Release(*segment), absl::OkStatus());
  }
}

TEST_F(DeviceAgentFailureTest, LooksAtACopyDoNotKeepAContext) {
  Fail("cuDevicePrimaryCtxRelease:1:0");
  const auto agent = Agent(Keeping("300"));
  const auto segment = agent->Create(8 * kMiB, GoOn);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const auto until = std::chrono::steady_clock::now() + kPatience / 3;
  while (!Failed() && std::chrono::steady_clock::now() < until) {
    ASSERT_EQ(agent->Check(*segment), absl::OkStatus());
  }
  EXPECT_TRUE(Failed());
  EXPECT_EQ(agent->Check(*segment), absl::OkStatus());
  EXPECT_EQ(agent->incarnation(), 1);
}

TEST_F(DeviceAgentFailureTest, ASourceThatIsWrittenToMeanwhileIsDataLoss) {
  const UniqueFd source = Source(4 * kMiB);
  for (const bool direct : {false, true}) {
    SCOPED_TRACE(direct);
    Fail("cuMemcpyHtoDAsync:1:slow,cuMemcpyHtoDAsync:2:slow");
    DeviceAgentOptions options = Options();
    options.threads = 1;
    const auto agent = Agent(options);
    const auto segment = agent->Create(8 * kMiB, GoOn);
    ASSERT_TRUE(segment.ok()) << segment.status();
    bool written = false;
    const auto sum = agent->Upload(*segment, Pieces(), {&source}, direct, [&](uint64_t) {
      // The first piece is on its way for a second: the source is open.
      if (Failed() && !std::exchange(written, true)) {
        EXPECT_EQ(::pwrite(source.get(), "x", 1, 4 * kMiB - 1), 1);
      }
      return true;
    });
    EXPECT_TRUE(absl::IsDataLoss(sum.status())) << sum.status();
    EXPECT_THAT(sum.status().message(), HasSubstr("was written to while it was read"));
    EXPECT_EQ(Load(*agent, direct), absl::OkStatus());
  }
}

// However the daemon ends, the agent ends with it: also while a call of the driver hangs.
TEST_F(DeviceAgentFailureTest, AnAgentEndsWithTheDaemonThatIsKilled) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  for (const char* rule :
       {"cuInit:1:hang", "cuMemcpyHtoDAsync:2:hang", "cuStreamSynchronize:1:hang",
        "cuMemcpyDtoH:3:hang", "cuMemcpyHtoDAsync:2+:slow"}) {
    SCOPED_TRACE(rule);
    Fail(rule);
    const pid_t daemon = ::fork();
    if (daemon == 0) {
      (void)Load(*Agent(Options()), false);
      std::_Exit(9);
    }
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!Failed() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    ASSERT_TRUE(Failed());
    ::kill(daemon, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(daemon, &status, 0), daemon);
    ASSERT_TRUE(WIFSIGNALED(status));
    // What is left of it is a child of this process now.
    pid_t ended = 0;
    while (ended == 0 && std::chrono::steady_clock::now() < until) {
      ended = ::waitpid(-1, &status, WNOHANG);
      std::this_thread::yield();
    }
    EXPECT_GT(ended, 0) << "the agent outlives its daemon";
    EXPECT_TRUE(WIFEXITED(status)) << status;
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST_F(DeviceAgentFailureTest, AnAgentThatDiesOrLosesItsContextFailsOneLoad) {
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

TEST_F(DeviceAgentFailureTest, AnAgentThatHangsIsKilledAndTheNextOneServes) {
  ::setenv("FAKECUDA_FAIL", "cuStreamSynchronize:1:hang", 1);
  DeviceAgentOptions options = Options();
  options.stall = absl::Seconds(2);
  const auto agent = Agent(options);
  const absl::Status failed = Load(*agent, false);
  ::unsetenv("FAKECUDA_FAIL");
  EXPECT_TRUE(absl::IsDeadlineExceeded(failed)) << failed;
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
}

}  // namespace
}  // namespace modelhost
