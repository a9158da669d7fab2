// A device agent that fails at any of its calls, dies, hangs, or loses its daemon.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

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
    const auto segment = agent.Create(2 * kMiB);
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
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
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
  Fail("cuMemcpyHtoDAsync:1:slow");
  const auto agent = Agent(Options());
  const UniqueFd source = Source(4 * kMiB);
  const auto segment = agent->Create(8 * kMiB);
  ASSERT_TRUE(segment.ok()) << segment.status();
  int asked = 0;
  const auto sum =
      agent->Upload(*segment, Pieces(), {&source}, false, [&](uint64_t) { return ++asked <= 2; });
  EXPECT_TRUE(absl::IsCancelled(sum.status())) << sum.status();
  EXPECT_THAT(sum.status().message(), HasSubstr("the upload was cancelled"));
  EXPECT_EQ(Load(*agent, false), absl::OkStatus());
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
    const auto segment = agent->Create(8 * kMiB);
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
