// The C API against a daemon that is absent, silent, broken or hostile.
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "client/src/testing/client_fixture.h"

namespace modelhost::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

class FaultsTest : public ClientTest {
 protected:
  // Acquires a sound version with `faults` and again without: the client must have stayed usable
  // and every lease must have come back.
  mh_status AcquireWith(const Faults& faults, const char* ref = "sharded",
                        uint64_t deadline_ms = 2000) {
    server_->Add(MakeVersion("sharded", 1, 6, 4, 5, 3));
    server_->SetLabel("sharded", "stable", 1);
    server_->Start();
    const ClientPtr client = Connect();
    server_->SetFaults(faults);
    HandlePtr handle;
    const mh_status status = Acquire(client, ref, &handle, false, deadline_ms);
    text_ = error_.message;
    server_->SetFaults({});
    EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == (handle ? 1 : 0); }));
    const HandlePtr again = Acquired(client, ref);
    EXPECT_EQ(ValueOf(again.get()), 5);
    return status;
  }
  std::string text_;
};

TEST_F(FaultsTest, AMissingDaemonIsUnavailableAndTheSocketIsNamed) {
  const auto before = steady_clock::now();
  EXPECT_EQ(TryConnect(120), nullptr);
  EXPECT_GE(steady_clock::now() - before, milliseconds(120));
  EXPECT_EQ(error_.status, MH_UNAVAILABLE);
  EXPECT_THAT(error_.message, HasSubstr(dir_ + "/handles.sock"));
}

TEST_F(FaultsTest, AStaleSocketIsUnavailableAndNamed) {
  server_->Start();
  server_->Stop();
  EXPECT_EQ(TryConnect(50), nullptr);
  EXPECT_EQ(error_.status, MH_UNAVAILABLE);
  EXPECT_THAT(error_.message, HasSubstr(dir_ + "/handles.sock"));
}

TEST_F(FaultsTest, ADaemonThatComesInTimeIsFound) {
  std::thread late([&] {
    // lint: allow(sleep) nothing tells that the client is already trying, and either way it passes.
    std::this_thread::sleep_for(milliseconds(50));
    StartUsual();
  });
  const ClientPtr client = Connect(10'000);
  late.join();
  EXPECT_EQ(ValueOf(Acquired(client, "planner").get()), 7);
}

TEST_F(FaultsTest, ASocketThatMayNotBeOpenedIsPermissionDenied) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may open any socket";
  server_->Start();
  ASSERT_EQ(::chmod((dir_ + "/handles.sock").c_str(), 0), 0);
  EXPECT_EQ(TryConnect(5000), nullptr);
  EXPECT_EQ(error_.status, MH_PERMISSION_DENIED);
}

TEST_F(FaultsTest, ADaemonThatRefusesSaysWhy) {
  server_->Start();
  Faults faults;
  faults.refuse_connections = true;
  server_->SetFaults(faults);
  for (int i = 0; i < 50; ++i) {  // Before our hello, and after it.
    ASSERT_EQ(TryConnect(5000), nullptr);
    ASSERT_EQ(error_.status, MH_PERMISSION_DENIED) << error_.message;
    ASSERT_THAT(error_.message, HasSubstr("no group that may read"));
  }
}

TEST_F(FaultsTest, ADaemonThatSaysNothingTimesOut) {
  server_->Start();
  Faults faults;
  faults.silent_hello = true;
  server_->SetFaults(faults);
  EXPECT_EQ(TryConnect(80), nullptr);
  EXPECT_EQ(error_.status, MH_DEADLINE_EXCEEDED);
  EXPECT_THAT(error_.message, HasSubstr("does not answer"));
}

TEST_F(FaultsTest, ASilentAcquireTimesOut) {
  Faults faults;
  faults.silent_acquire = true;
  EXPECT_EQ(AcquireWith(faults, "sharded", 60), MH_DEADLINE_EXCEEDED);
}

TEST_F(FaultsTest, AnUnsealedIndexIsRefused) {
  Faults faults;
  faults.unsealed_index = true;
  EXPECT_EQ(AcquireWith(faults), MH_DATA_LOSS);
  EXPECT_THAT(text_, HasSubstr("seals are missing"));
}

TEST_F(FaultsTest, AnUnsealedRegionIsRefused) {
  Faults faults;
  faults.unsealed_region = true;
  EXPECT_EQ(AcquireWith(faults), MH_DATA_LOSS);
  EXPECT_THAT(text_, HasSubstr("model-10000.safetensors"));
}

TEST_F(FaultsTest, TheIndexOfAnotherVersionIsRefused) {
  Faults faults;
  faults.other_index = true;
  EXPECT_EQ(AcquireWith(faults), MH_DATA_LOSS);
}

TEST_F(FaultsTest, BytesThatAreNoIndexAreRefused) {
  Faults faults;
  faults.broken_index = true;
  EXPECT_EQ(AcquireWith(faults), MH_DATA_LOSS);
  EXPECT_THAT(text_, HasSubstr("bad magic"));
}

TEST_F(FaultsTest, AnIndexOfAnotherSizeIsRefused) {
  Faults faults;
  faults.index_bytes_extra = 4096;
  EXPECT_EQ(AcquireWith(faults), MH_DATA_LOSS);
}

TEST_F(FaultsTest, ARegionOfAnotherSizeIsRefused) {
  Faults faults;
  faults.region_bytes_extra = -8;
  EXPECT_EQ(AcquireWith(faults), MH_INTERNAL);
}

TEST_F(FaultsTest, AMissingRegionIsAnError) {
  Faults faults;
  faults.drop_region = true;
  EXPECT_EQ(AcquireWith(faults), MH_INTERNAL);
  EXPECT_THAT(text_, HasSubstr("did not come"));
}

TEST_F(FaultsTest, ARegionThatComesTwiceIsAnError) {
  Faults faults;
  faults.repeat_region = true;
  EXPECT_EQ(AcquireWith(faults), MH_INTERNAL);
}

TEST_F(FaultsTest, MissingDescriptorsAreAnError) {
  Faults faults;
  faults.too_few_fds = true;
  EXPECT_EQ(AcquireWith(faults), MH_INTERNAL);
}

TEST_F(FaultsTest, CountsThatNeverComeTrueTimeOut) {
  Faults faults;
  faults.huge_count = true;
  EXPECT_EQ(AcquireWith(faults, "sharded", 60), MH_DEADLINE_EXCEEDED);
}

TEST_F(FaultsTest, HalfAFrameIsAnError) {
  Faults faults;
  faults.garbage_reply = true;
  EXPECT_EQ(AcquireWith(faults), MH_INVALID_ARGUMENT);
  EXPECT_THAT(text_, HasSubstr("malformed"));
}

TEST_F(FaultsTest, AGrantOfSomethingElseIsAnError) {
  Faults faults;
  faults.wrong_model = true;
  EXPECT_NE(AcquireWith(faults), MH_OK);
}

TEST_F(FaultsTest, AConnectionThatEndsInACallIsMadeAgain) {
  Faults faults;
  faults.hang_up_on_acquire = true;
  EXPECT_EQ(AcquireWith(faults), MH_OK) << text_;
}

TEST_F(FaultsTest, ATruncatedFileIsDataLossThatNamesIt) {
  FakeVersion version = MakeVersion("m", 1, 2, 4, 1);
  version.files[0].kind = abi::RegionKind::kFile;
  server_->Add(version);
  server_->SetLabel("m", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  HandlePtr before = Acquired(client, "m");
  ASSERT_EQ(ValueOf(before.get()), 1);
  server_->TruncateFile("m", 1, 0, 8);
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "m", &handle), MH_DATA_LOSS);
  EXPECT_THAT(error_.message, HasSubstr("m@1: model-10000.safetensors"));
}

// The page of a truncated file: mh_copy reports what a load would raise SIGBUS for.
TEST_F(FaultsTest, CopyReportsAPageThatIsGone) {
  FakeVersion version = MakeVersion("m", 1, 1, 8192, 1);
  version.files[0].kind = abi::RegionKind::kFile;
  server_->Add(version);
  server_->SetLabel("m", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "m");
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  ASSERT_EQ(mh_tensor_at(handle.get(), 0, &view), MH_OK);
  server_->TruncateFile("m", 1, 0, 4096);
  std::vector<char> buffer(view.nbytes);
  EXPECT_EQ(mh_copy(buffer.data(), view.data, 4096), MH_OK);
  EXPECT_EQ(mh_copy(buffer.data(), view.data, view.nbytes), MH_DATA_LOSS);
}

// --- Calls that are to end before their deadline

// Counts how often a call asks whether it was interrupted, and says what it is told to.
struct Interrupter {
  std::atomic<int> asked{0};
  std::atomic<int> answer{0};

  static int Ask(void* context) {
    auto* self = static_cast<Interrupter*>(context);
    ++self->asked;
    return self->answer;
  }
  // The call of another thread waits.
  bool Waits() {
    return FakeServer::Eventually([&] { return asked > 0; });
  }
};

class EndingTest : public ClientTest {
 protected:
  static constexpr uint64_t kHourMs = 3'600'000;

  void SetUp() override {
    StartUsual();
    server_->SetReady("planner", 8, false);
  }
  mh_client* Connect() {
    mh_options options = MH_OPTIONS_INIT;
    options.runtime_dir = dir_.c_str();
    options.deadline_ms = kHourMs;
    options.interrupted = &Interrupter::Ask;
    options.context = &interrupter_;
    return mh_connect(&options, &error_);
  }
  Interrupter interrupter_;
};

TEST_F(EndingTest, CloseEndsACallOfAnotherThreadAndAllLeasesAtOnce) {
  const ClientPtr client(Connect());
  const HandlePtr kept = Acquired(client, "planner@7");
  HandlePtr handle;
  mh_status status = MH_OK;
  std::thread waiter(
      [&] { status = Acquire(client, "planner@8", &handle, /*wait=*/true, kHourMs); });
  ASSERT_TRUE(interrupter_.Waits());
  mh_close(client.get());
  waiter.join();
  EXPECT_EQ(status, MH_FAILED_PRECONDITION);
  EXPECT_THAT(error_.message, HasSubstr("planner@8: the client was disconnected"));
  EXPECT_EQ(handle, nullptr);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
  server_->SetReady("planner", 8, true);
  EXPECT_EQ(Acquire(client, "planner@8", &handle), MH_FAILED_PRECONDITION);
  EXPECT_EQ(ValueOf(kept.get()), 7);
  mh_close(client.get());
  mh_close(nullptr);
}

TEST_F(EndingTest, CloseWakesWhoeverPollsTheEvents) {
  const ClientPtr client(Connect());
  pollfd events{mh_event_fd(client.get()), POLLIN, 0};
  mh_clear_events(client.get());
  mh_close(client.get());
  EXPECT_EQ(::poll(&events, 1, 10'000), 1);
  mh_clear_events(client.get());
  EXPECT_EQ(::poll(&events, 1, 0), 0);
  EXPECT_EQ(mh_event_fd(client.get()), -1);
}

TEST_F(EndingTest, CloseEndsACallThatWaitsForADaemonToComeBack) {
  const ClientPtr client(Connect());
  server_->Stop();
  HandlePtr handle;
  mh_status status = MH_OK;
  std::thread waiter([&] { status = Acquire(client, "planner@7", &handle, false, kHourMs); });
  ASSERT_TRUE(interrupter_.Waits());
  mh_close(client.get());
  waiter.join();
  EXPECT_EQ(status, MH_FAILED_PRECONDITION);
}

TEST_F(EndingTest, AnInterruptedCallIsCancelledAndTheClientGoesOn) {
  const ClientPtr client(Connect());
  interrupter_.answer = 1;
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "planner@8", &handle, /*wait=*/true, kHourMs), MH_CANCELLED);
  EXPECT_THAT(error_.message, HasSubstr("planner@8: interrupted"));
  // What the daemon grants to nobody any more is given back.
  server_->SetReady("planner", 8, true);
  EXPECT_EQ(ValueOf(Acquired(client, "planner@8").get()), 8);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(EndingTest, WhatComesForOthersDoesNotPutOffTheQuestion) {
  const ClientPtr client(Connect());
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      mh_handle* handle = nullptr;
      mh_acquire(client.get(), "planner@7", nullptr, &handle, nullptr);
      mh_release(handle);
    }
  });
  interrupter_.asked = 0;
  HandlePtr handle;
  std::thread waiter([&] { Acquire(client, "planner@8", &handle, /*wait=*/true, kHourMs); });
  EXPECT_TRUE(interrupter_.Waits());
  stop = true;
  other.join();
  mh_close(client.get());
  waiter.join();
}

TEST_F(EndingTest, ConnectingToASilentOrMissingDaemonCanBeInterrupted) {
  interrupter_.answer = 1;
  Faults faults;
  faults.silent_hello = true;
  server_->SetFaults(faults);
  EXPECT_EQ(Connect(), nullptr);
  EXPECT_EQ(error_.status, MH_CANCELLED);
  server_->Stop();
  EXPECT_EQ(Connect(), nullptr);
  EXPECT_EQ(error_.status, MH_CANCELLED);
}

TEST_F(EndingTest, AHandleThatIsReleasedLaterIsUnmappedAndGivenBackByTheThread) {
  const ClientPtr client(Connect());
  mh_handle* handle = Acquired(client, "planner@7").release();
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  ASSERT_EQ(mh_tensor_at(handle, 0, &view), MH_OK);
  const auto page = reinterpret_cast<uintptr_t>(view.data) & ~uintptr_t{4095};
  mh_handle* again = mh_retain(handle);
  mh_release_later(handle);
  EXPECT_EQ(ValueOf(again), 7);
  mh_release_later(again);
  mh_release_later(nullptr);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
  EXPECT_EQ(::msync(reinterpret_cast<void*>(page), 1, MS_ASYNC), -1);
  EXPECT_EQ(errno, ENOMEM);  // Nothing is mapped there.
}

class LowLimitTest : public FaultsTest {
 protected:
  LowLimitTest() { ::getrlimit(RLIMIT_NOFILE, &before_); }
  ~LowLimitTest() override { ::setrlimit(RLIMIT_NOFILE, &before_); }
  // Leaves room for `spare` more descriptors.
  void Squeeze(rlim_t spare) {
    // The lowest free number; all descriptors of this process are below it, more or less.
    const int next = ::dup(0);
    ::close(next);
    rlimit low = before_;
    low.rlim_cur = static_cast<rlim_t>(next) + spare;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  }
  rlimit before_{};
};

TEST_F(LowLimitTest, TooFewDescriptorsNameTheLimitAndTheClientComesBack) {
  server_->Add(MakeVersion("sharded", 1, 300, 4, 5, 300));
  server_->SetLabel("sharded", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr kept = Acquired(client, "sharded");
  Squeeze(8);
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "sharded", &handle), MH_RESOURCE_EXHAUSTED);
  EXPECT_THAT(error_.message, HasSubstr("RLIMIT_NOFILE"));
  EXPECT_EQ(ValueOf(kept.get()), 5);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0);
  handle = Acquired(client, "sharded");
  EXPECT_EQ(ValueOf(handle.get()), 5);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
}

TEST_F(LowLimitTest, NoDescriptorForASocketNamesTheLimit) {
  server_->Start();
  mh_options options = MH_OPTIONS_INIT;
  options.runtime_dir = dir_.c_str();
  mh_error error{};
  Squeeze(0);
  // No more than this one call: sanitizers need descriptors too.
  mh_client* client = mh_connect(&options, &error);
  ::setrlimit(RLIMIT_NOFILE, &before_);
  EXPECT_EQ(client, nullptr);
  EXPECT_EQ(error.status, MH_RESOURCE_EXHAUSTED);
  EXPECT_THAT(error.message, HasSubstr("RLIMIT_NOFILE"));
}

}  // namespace
}  // namespace modelhost::testing
