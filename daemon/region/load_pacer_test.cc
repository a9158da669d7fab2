#include "daemon/region/load_pacer.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <thread>

#include "daemon/platform/linux_os.h"
#include "daemon/region/loader_test_fixture.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

constexpr absl::Duration kNone = absl::ZeroDuration();

TEST(RestAfterTest, OneCoreIsLeftAlone) {
  const absl::Duration worked = absl::Milliseconds(4);
  for (int cores = 1; cores <= 16; ++cores) {
    for (int workers = 1; workers <= 24; ++workers) {
      const absl::Duration rest = RestAfter(worked, workers, cores);
      const double used = workers * absl::FDivDuration(worked, worked + rest);
      const double allowed = cores > 1 ? cores - 1 : 0.5;
      // What rests longest is bounded, so a great many workers may use a little more.
      if (rest < LoadPacer::kLongestRest) {
        EXPECT_LE(used, allowed + 1e-6) << workers << " workers, " << cores << " cores";
      }
      EXPECT_EQ(rest == kNone, workers <= allowed) << workers << " workers, " << cores << " cores";
    }
  }
}

TEST(RestAfterTest, NoWorkNoRestAndNoRestWithoutEnd) {
  EXPECT_EQ(RestAfter(kNone, 8, 2), kNone);
  EXPECT_EQ(RestAfter(absl::Hours(1), 8, 2), LoadPacer::kLongestRest);
}

TEST(RestForRateTest, AllPiecesTogetherKeepTheRate) {
  absl::Duration free_at;
  const absl::Duration now = absl::Seconds(50);
  // Four workers at the same moment: each waits for those before it.
  for (int i = 1; i <= 4; ++i) {
    EXPECT_EQ(RestForRate(1 << 20, 1 << 20, now, free_at), absl::Seconds(i));
  }
  // What was not used is not saved up.
  EXPECT_EQ(RestForRate(1 << 20, 1 << 20, now + absl::Hours(1), free_at), absl::Seconds(1));
}

class LoadPacerTest : public testing::Test {
 protected:
  // Uses this thread's core until its own clock has gone on by `time`.
  void Work(absl::Duration time) {
    const absl::Duration end = os_.ThreadCpuTime() + time;
    while (os_.ThreadCpuTime() < end) {
    }
  }
  // How long Rest took.
  absl::Duration Rest(LoadPacer::Worker& worker, uint64_t bytes) {
    const absl::Duration start = clock_.Monotonic();
    worker.Rest(bytes, cancel_);
    return clock_.Monotonic() - start;
  }

  LinuxOs os_;
  SystemClock clock_;
  CancelToken cancel_;
};

TEST_F(LoadPacerTest, WithAClientAWorkerOfAMachineWithOneCoreRestsAsLongAsItWorked) {
  LoadPacer pacer(os_, clock_, {}, 1);
  LoadPacer::Worker worker(pacer);
  pacer.SetClients(1);
  Work(absl::Milliseconds(30));
  EXPECT_GE(Rest(worker, 1), absl::Milliseconds(30));
}

TEST_F(LoadPacerTest, NobodyRestsWithoutAClientOrWhenItIsOff) {
  ManualClock still;  // On this clock a rest never ends by itself.
  LoadPacer unused(os_, still, {}, 1);
  LoadPacer off(os_, still, {LoadPace::Kind::kOff, 0}, 1);
  off.SetClients(9);
  for (LoadPacer* pacer : {&unused, &off}) {
    LoadPacer::Worker worker(*pacer);
    Work(absl::Milliseconds(5));
    worker.Rest(1, cancel_);
  }
}

TEST_F(LoadPacerTest, ARateHoldsWithoutClientsAndOverAllWorkers) {
  LoadPacer pacer(os_, clock_, {LoadPace::Kind::kRate, 1000}, 8);
  const absl::Duration start = clock_.Monotonic();
  std::thread other([&] {
    LoadPacer::Worker worker(pacer);
    worker.Rest(50, cancel_);
  });
  LoadPacer::Worker worker(pacer);
  worker.Rest(50, cancel_);
  other.join();
  EXPECT_GE(clock_.Monotonic() - start, absl::Milliseconds(100));
}

TEST_F(LoadPacerTest, ARestEndsWhenTheLoadIsCancelled) {
  LoadPacer pacer(os_, clock_, {LoadPace::Kind::kRate, 1}, 2);  // A rest of an hour.
  LoadPacer::Worker worker(pacer);
  std::thread other([&] { cancel_.Cancel(); });
  worker.Rest(3600, cancel_);
  other.join();
}

TEST_F(LoadPacerTest, ARestEndsWhenTheLastClientLeaves) {
  ManualClock still;  // On this clock a rest never ends by itself.
  LoadPacer pacer(os_, still, {}, 1);
  pacer.SetClients(1);
  LoadPacer::Worker worker(pacer);
  Work(absl::Milliseconds(5));
  std::thread other([&] { pacer.SetClients(0); });
  worker.Rest(1, cancel_);
  other.join();
}

class PacedLoaderTest : public LoaderTest {
 protected:
  // How long `work` takes on a loader that passes 10 MiB a second.
  template <typename Work>
  absl::Duration Paced(Work work) {
    loader_ = MakeLoader({.pace = {LoadPace::Kind::kRate, uint64_t{10} << 20}});
    const absl::Duration start = clock_.Monotonic();
    EXPECT_TRUE(work().ok());
    return clock_.Monotonic() - start;
  }
};

TEST_F(PacedLoaderTest, LoadsCopiesAndVerificationsKeepThePace) {
  MakeVersion(1, {{"a.safetensors", Weights(uint64_t{1} << 20, 1)}});
  const absl::Duration least = absl::Milliseconds(100);
  EXPECT_GE(Paced([&] { return Load(1, Residency::kPinned).status(); }), least);
  EXPECT_GE(Paced([&] { return Load(1, Residency::kSealed).status(); }), least);
  EXPECT_GE(Paced([&] { return loader_->Verify(Request(1, Residency::kPinned)); }), least);
}

TEST_F(PacedLoaderTest, MakingTheManifestOfWhatHasNoneKeepsThePace) {
  MakeVersion(1, {{"a.safetensors", Weights(uint64_t{1} << 20, 1)}});
  ASSERT_EQ(::chmod(PathOf(1, "").c_str(), 0755), 0);
  ASSERT_EQ(::unlink(PathOf(1, "manifest.json").c_str()), 0);
  const absl::Duration least = absl::Milliseconds(100);
  // What was hashed need not be read again, so this is all the pace there is.
  EXPECT_GE(Paced([&] { return Load(1, Residency::kMapped).status(); }), least);
}

TEST_F(PacedLoaderTest, ALoadThatIsCancelledWhileItRestsEndsAndLeavesNothing) {
  MakeVersion(1, {{"a.safetensors", Weights(uint64_t{1} << 20, 1)}});
  loader_ = MakeLoader({.pace = {LoadPace::Kind::kRate, 1}});  // Twelve days.
  LoadRequest request = Request(1, Residency::kPinned);
  request.cancel = std::make_shared<CancelToken>();
  // A worker asks for the first time when it begins, and then before each rest.
  os_.Before("ThreadCpuTime", [&] {
    if (os_.calls("ThreadCpuTime") > 2) request.cancel->Cancel();
  });
  EXPECT_EQ(loader_->Load(request).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(host_->reserved(), 0U);
}

}  // namespace
}  // namespace modelhost
