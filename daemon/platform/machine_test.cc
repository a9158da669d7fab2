// What is found out about a machine, and what is not waited for.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/machine_probe.h"
#include "daemon/platform/probed_machine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/handle/unique_fd.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAre;

bool Never() { return false; }
constexpr FactsNeeded kAll{true, true, true};

class MachineTest : public ::testing::Test {
 protected:
  MachineTest() {
    std::string pattern = ::testing::TempDir() + "/machine_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~MachineTest() override { fs::remove_all(folder_); }

  void Touch(const fs::path& path) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "x";
  }
  // A child that is a line of shell, whose stdout is the answer. Its last argument is the number of
  // the descriptor for it.
  static std::vector<std::string> Command(const std::string& line) {
    return {"/bin/sh", "-c", "for n; do :; done; exec >>/proc/self/fd/$n; " + line};
  }
  ProbedMachine Shell(const std::string& line, absl::Duration deadline = absl::Seconds(20)) {
    return ProbedMachine(clock_, Command(line), deadline);
  }
  std::string CountedLine() const {
    return absl::StrCat("echo x >>", (folder_ / "looks").string(),
                        "; echo tensorrt=10.3.0; echo compute_capability=8.7; ");
  }
  int Looks() const {
    std::ifstream in(folder_ / "looks");
    return static_cast<int>(std::count(std::istreambuf_iterator<char>(in), {}, '\n'));
  }

  fs::path folder_;
  SystemClock clock_;
};

TEST_F(MachineTest, ThePlatformIsThatOfTheKernel) {
  utsname name{};
  ASSERT_EQ(::uname(&name), 0);
  EXPECT_THAT(ProbePlatform().values, ElementsAre(absl::StrCat("linux-", name.machine)));
}

TEST_F(MachineTest, TensorRtIsReadFromTheRealNameOfItsLibrary) {
  const fs::path a = folder_ / "a";
  const fs::path b = folder_ / "b";
  Touch(a / "libnvinfer.so.10.3.0");
  fs::create_symlink("libnvinfer.so.10.3.0", a / "libnvinfer.so.10");
  fs::create_symlink("libnvinfer.so.10", a / "libnvinfer.so");
  Touch(a / "libnvinfer_plugin.so.9.9.9");
  fs::create_symlink("gone.so.7.7.7", a / "libnvinfer.so.7.7.7");
  fs::create_directories(b);
  fs::create_symlink(folder_ / "opt/libnvinfer.so.8.6.1", b / "libnvinfer.so.8");
  Touch(folder_ / "opt/libnvinfer.so.8.6.1");
  const MachineFact fact = ProbeTensorRt({a, b, folder_ / "missing"});
  EXPECT_THAT(fact.values, UnorderedElementsAre("10.3.0", "8.6.1"));
  EXPECT_THAT(fact.source, HasSubstr("a/libnvinfer.so.10.3.0"));

  Touch(folder_ / "c/libnvinfer.so.10");
  const MachineFact none = ProbeTensorRt({folder_ / "c"});
  EXPECT_FALSE(none.known());
  EXPECT_THAT(none.unknown, HasSubstr("libnvinfer.so.X.Y.Z"));
}

TEST_F(MachineTest, TheLinkersFoldersComeFromItsConfiguration) {
  fs::create_directories(folder_ / "conf.d");
  std::ofstream(folder_ / "ld.conf") << "# comment\n/one  # here\ninclude conf.d/*.conf\n\n";
  std::ofstream(folder_ / "conf.d/x.conf") << "/two\ninclude ../ld.conf\n";  // A loop.
  ASSERT_EQ(::setenv("LD_LIBRARY_PATH", "/zero:relative:/zero2", 1), 0);
  const auto folders = LinkerFolders(folder_ / "ld.conf");
  ::unsetenv("LD_LIBRARY_PATH");
  ASSERT_GE(folders.size(), 4u);
  EXPECT_EQ(folders[0], "/zero");
  EXPECT_EQ(folders[1], "/zero2");
  EXPECT_THAT(folders, IsSupersetOf({"/one", "/two", "/usr/lib", "/lib64"}));
  EXPECT_LT(folders.size(), 64u);
}

TEST_F(MachineTest, TheDriverSaysWhatGpusThereAre) {
  MachineFacts without;
  ProbeCuda(without);
  if (!without.cuda_driver.known()) {  // On a machine without a driver.
    EXPECT_THAT(without.compute_capability.unknown, HasSubstr("no CUDA driver: libcuda.so.1"));
  }
  // Found by its soname from now on.
  ASSERT_NE(::dlopen(FAKE_CUDA_DRIVER_PATH, RTLD_NOW), nullptr) << ::dlerror();
  ::setenv("FAKE_CUDA_DRIVER", "12040", 1);
  MachineFacts no_gpu;
  ProbeCuda(no_gpu);
  EXPECT_THAT(no_gpu.cuda_driver.values, ElementsAre("12.4"));
  EXPECT_THAT(no_gpu.compute_capability.unknown, HasSubstr("cuInit answers 100"));
  ::setenv("FAKE_CUDA_GPUS", "8.7,8.9,8.7", 1);
  MachineFacts facts;
  ProbeCuda(facts);
  EXPECT_THAT(facts.compute_capability.values, ElementsAre("8.7", "8.9"));
}

TEST_F(MachineTest, FactsSurviveTheirText) {
  MachineFacts facts;
  facts.platform.values = {"linux-x86_64"};
  facts.tensorrt = {{"10.3.0", "8.6.1"}, "/a\nb=c", ""};
  facts.compute_capability.unknown = "no GPU = none";
  std::string strange;
  const MachineFacts parsed = ParseFacts(FormatFacts(facts), &strange);
  EXPECT_EQ(strange, "");
  EXPECT_THAT(parsed.tensorrt.values, ElementsAre("10.3.0", "8.6.1"));
  EXPECT_EQ(parsed.tensorrt.source, "/a b=c");
  EXPECT_EQ(parsed.compute_capability.unknown, "no GPU = none");
  EXPECT_FALSE(parsed.cuda_driver.known());
  const MachineFacts noisy = ParseFacts("NOTE: a driver\ntensorrt=9.9.9\ncolour=red\n", &strange);
  EXPECT_THAT(noisy.tensorrt.values, ElementsAre("9.9.9"));
  EXPECT_EQ(strange, "NOTE: a driver");
}

TEST_F(MachineTest, AChildIsAskedOnceForAll) {
  ProbedMachine machine = Shell(CountedLine() + "echo cuda_driver=12.4");
  for (int i = 0; i < 3; ++i) {
    auto facts = machine.Facts(kAll, Never);
    ASSERT_TRUE(facts.ok()) << facts.status();
    EXPECT_THAT(facts->tensorrt.values, ElementsAre("10.3.0"));
    EXPECT_THAT(facts->cuda_driver.values, ElementsAre("12.4"));
    EXPECT_TRUE(facts->platform.known());
  }
  EXPECT_EQ(Looks(), 1);
  machine.Forget();
  ASSERT_TRUE(machine.Facts(kAll, Never).ok());
  EXPECT_EQ(Looks(), 2);
}

TEST_F(MachineTest, WhatTheOperatorSaysIsNotLookedFor) {
  ProbedMachine machine = Shell(CountedLine());
  MachineFacts said;
  said.platform.values = {"linux-riscv64"};
  said.tensorrt.values = {"9.9.9"};
  machine.SetOverrides(said);
  auto facts = machine.Facts({}, Never);
  ASSERT_TRUE(facts.ok());
  EXPECT_THAT(facts->platform.values, ElementsAre("linux-riscv64"));
  EXPECT_EQ(Looks(), 0);
  facts = machine.Facts({.tensorrt = true}, Never);
  EXPECT_THAT(facts->tensorrt.values, ElementsAre("9.9.9"));
  EXPECT_EQ(Looks(), 0);  // All that is needed was said.
  facts = machine.Facts(kAll, Never);
  EXPECT_THAT(facts->tensorrt.values, ElementsAre("9.9.9"));
  EXPECT_THAT(facts->compute_capability.values, ElementsAre("8.7"));
  EXPECT_EQ(Looks(), 1);
  said.compute_capability.values = {"8.7"};
  said.cuda_driver.values = {"12.0"};
  machine.SetOverrides(said);
  machine.Forget();
  ASSERT_TRUE(machine.Facts(kAll, Never).ok());
  EXPECT_EQ(Looks(), 1);
}

TEST_F(MachineTest, WhatIsNotKnownIsLookedForAgainLater) {
  ManualClock clock;
  ProbedMachine machine(clock, Command(CountedLine()));
  auto facts = machine.Facts(kAll, Never);
  ASSERT_TRUE(facts.ok());
  EXPECT_THAT(facts->cuda_driver.unknown, HasSubstr("does not say"));
  ASSERT_TRUE(machine.Facts(kAll, Never).ok());
  EXPECT_EQ(Looks(), 1);
  clock.Advance(ProbedMachine::kRetry);
  ASSERT_TRUE(machine.Facts(kAll, Never).ok());
  EXPECT_EQ(Looks(), 2);
}

TEST_F(MachineTest, AChildThatCrashesLeavesWhatItSaidAndAReason) {
  ProbedMachine machine = Shell("echo tensorrt=10.3.0; printf compute_cap; kill -SEGV $$");
  auto facts = machine.Facts(kAll, Never);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->tensorrt.values, ElementsAre("10.3.0"));
  EXPECT_FALSE(facts->compute_capability.known());
  EXPECT_THAT(facts->compute_capability.unknown, HasSubstr("signal 11"));
  ProbedMachine missing(clock_, {"/nonexistent/program"});
  EXPECT_THAT(missing.Facts(kAll, Never)->tensorrt.unknown, HasSubstr("/nonexistent/program"));
  ProbedMachine liar = Shell("echo colour=red");
  EXPECT_THAT(liar.Facts(kAll, Never)->tensorrt.unknown, HasSubstr("colour=red"));
}

TEST_F(MachineTest, AChildThatHangsIsNotWaitedFor) {
  ProbedMachine machine = Shell("echo tensorrt=10.3.0; exec sleep 1000", absl::Milliseconds(200));
  auto facts = machine.Facts(kAll, Never);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->tensorrt.values, ElementsAre("10.3.0"));
  EXPECT_THAT(facts->compute_capability.unknown, HasSubstr("no answer within 200ms"));

  ProbedMachine flood = Shell("exec yes");
  EXPECT_THAT(flood.Facts(kAll, Never)->tensorrt.unknown, HasSubstr("more than there is to say"));
}

TEST_F(MachineTest, ADriverIsNotAskedForWhatTheLinkerKnows) {
  ProbedMachine machine =
      Shell("case \"$0\" in --no-driver) ;; *) exec sleep 1000;; esac; echo tensorrt=10.3.0",
            absl::Milliseconds(300));
  EXPECT_THAT(machine.Facts({.tensorrt = true}, Never)->tensorrt.values, ElementsAre("10.3.0"));
  const auto facts = machine.Facts({.cuda_driver = true}, Never);
  EXPECT_THAT(facts->cuda_driver.unknown, HasSubstr("no answer within"));
  // What the driver spoiled is not what was found without it.
  EXPECT_FALSE(facts->cuda_driver.known());
}

TEST_F(MachineTest, NoiseOfADriverCostsNothing) {
  // Its own stdout and stderr are not the answer, and a strange line in that is passed over.
  ProbedMachine machine(clock_,
                        {"/bin/sh", "-c",
                         "for n; do :; done; echo NOTE: hello; echo tensorrt=0.0.0; echo x >&2; "
                         "{ echo colour=red; echo tensorrt=10.3.0; } >>/proc/self/fd/$n"});
  const auto facts = machine.Facts(kAll, Never);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_THAT(facts->tensorrt.values, ElementsAre("10.3.0"));
  EXPECT_THAT(facts->cuda_driver.unknown, HasSubstr("colour=red"));
}

TEST_F(MachineTest, WhatIsKnownIsToldWithoutALookAndOutlivesAReload) {
  ProbedMachine machine = Shell(CountedLine());
  EXPECT_TRUE(machine.Known()->platform.known());
  EXPECT_FALSE(machine.Known()->tensorrt.known());
  EXPECT_EQ(Looks(), 0);
  ASSERT_TRUE(machine.Facts(kAll, Never).ok());
  const auto known = machine.Known();
  EXPECT_THAT(known->tensorrt.values, ElementsAre("10.3.0"));
  EXPECT_EQ(machine.Known(), known);
  machine.Forget();
  EXPECT_EQ(machine.Known(), known);
  MachineFacts said;
  said.tensorrt.values = {"9.9.9"};
  machine.SetOverrides(said);
  EXPECT_NE(machine.Known(), known);
  EXPECT_THAT(machine.Known()->tensorrt.values, ElementsAre("9.9.9"));
}

// What a driver that keeps a killed process does, done by a tracer: only that one can take it away.
TEST_F(MachineTest, WhileAChildHangsNoOtherOneIsStarted) {
  const fs::path pid_file = folder_ / "pid";
  ASSERT_EQ(::mkfifo(pid_file.c_str(), 0600), 0);
  ProbedMachine machine =
      Shell(CountedLine() + "echo $$ >" + pid_file.string() + "; exec sleep 1000",
            absl::Milliseconds(700));
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  UniqueFd let_go(ends[1]);
  const UniqueFd kept(ends[0]);
  const pid_t tracer = ::fork();
  ASSERT_GE(tracer, 0);
  if (tracer == 0) {
    ::close(let_go.get());
    ::alarm(60);
    char text[16] = {};
    const int from = ::open(pid_file.c_str(), O_RDONLY);
    if (::read(from, text, sizeof text - 1) <= 0) ::_exit(1);
    int pid = 0;
    if (!absl::SimpleAtoi(text, &pid)) ::_exit(1);
    if (::ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) != 0) ::_exit(77);
    (void)!::read(kept.get(), text, 1);  // Until the test lets go.
    ::_exit(0);
  }
  const absl::Time begin = absl::Now();
  EXPECT_THAT(machine.Facts({.cuda_driver = true}, Never)->cuda_driver.unknown,
              HasSubstr("no answer within"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  int how = 0;
  if (::waitpid(tracer, &how, WNOHANG) == tracer) {
    ASSERT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 77);
    GTEST_SKIP() << "a process may not be traced here";
  }
  machine.Forget();
  EXPECT_THAT(machine.Facts({.cuda_driver = true}, Never)->cuda_driver.unknown,
              HasSubstr("an earlier one still hangs"));
  EXPECT_EQ(Looks(), 1);
  // What no driver is needed for is found all the same, and stays found.
  EXPECT_TRUE(machine.Facts({.tensorrt = true}, Never)->tensorrt.known());
  EXPECT_EQ(Looks(), 2);
  EXPECT_THAT(machine.Facts({.cuda_driver = true}, Never)->cuda_driver.unknown,
              HasSubstr("an earlier one still hangs"));
  EXPECT_TRUE(machine.Known()->tensorrt.known());
  let_go.Reset();
  ASSERT_EQ(::waitpid(tracer, &how, 0), tracer);
  // Taken away by whoever asks next.
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (::waitid(P_ALL, 0, nullptr, WEXITED | WNOHANG | WNOWAIT) == 0 && absl::Now() < end) {
    machine.Forget();
    std::this_thread::yield();
  }
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(MachineTest, ACancelledLookEndsAndLeavesNoTrace) {
  ProbedMachine machine = Shell("exec sleep 1000");
  std::atomic<int> asked = 0;
  const auto facts = machine.Facts(kAll, [&] { return ++asked > 2; });
  EXPECT_TRUE(absl::IsCancelled(facts.status())) << facts.status();
  // The next one is not told of it.
  EXPECT_TRUE(absl::IsCancelled(machine.Facts(kAll, [] { return true; }).status()));
}

}  // namespace
}  // namespace modelhost
