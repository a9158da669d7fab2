// The C API against a daemon that behaves.
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "client/src/testing/client_fixture.h"

namespace modelhost::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Api, EveryStatusHasItsCanonicalName) {
  EXPECT_STREQ(mh_status_name(MH_OK), "OK");
  EXPECT_STREQ(mh_status_name(MH_DATA_LOSS), "DATA_LOSS");
  EXPECT_STREQ(mh_status_name(MH_UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_STREQ(mh_status_name(static_cast<mh_status>(99)), "UNKNOWN");
  EXPECT_EQ(mh_abi_version(), MH_ABI_VERSION);
}

TEST_F(ClientTest, AnAcquiredVersionSaysWhatItIs) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  EXPECT_STREQ(mh_handle_model(handle.get()), "planner");
  EXPECT_STREQ(mh_handle_label(handle.get()), "stable");
  EXPECT_EQ(mh_handle_version(handle.get()), 7U);
  EXPECT_EQ(mh_handle_generation(handle.get()), 1U);
  EXPECT_STREQ(mh_handle_format(handle.get()), "safetensors");
  EXPECT_EQ(std::string(mh_handle_digest(handle.get())).substr(0, 6), "070707");
  EXPECT_EQ(std::strlen(mh_handle_digest(handle.get())), 64U);
  EXPECT_EQ(mh_tensor_count(handle.get()), 10U);
  EXPECT_EQ(ValueOf(handle.get()), 7);
  const HandlePtr fixed = Acquired(client, "planner@8");
  EXPECT_STREQ(mh_handle_label(fixed.get()), "");
  EXPECT_EQ(ValueOf(fixed.get()), 8);
}

TEST_F(ClientTest, ATensorViewHasShapeTypeAndPlace) {
  FakeVersion version = MakeVersion("m", 1, 1, 24, 1.5F);
  version.tensors[0].shape = {2, 3, 4};
  FakeTensor strided = version.tensors[0];
  strided.name = "transposed";
  strided.shape = {3, 2};
  strided.strides = {1, 3};
  version.tensors.push_back(strided);
  FakeTensor unmappable = version.tensors[0];
  unmappable.name = "packed";
  unmappable.reason = "compressed in its file";
  version.tensors.push_back(unmappable);
  server_->Add(version);
  server_->SetLabel("m", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "m");

  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  ASSERT_EQ(mh_tensor(handle.get(), "tensor.0", &view), MH_OK);
  EXPECT_STREQ(view.name, "tensor.0");
  EXPECT_STREQ(view.component, "main");
  EXPECT_STREQ(view.file, "model-10000.safetensors");
  EXPECT_STREQ(view.dtype, "F32");
  EXPECT_THAT(std::vector<int64_t>(view.shape, view.shape + view.rank), ElementsAre(2, 3, 4));
  EXPECT_EQ(view.strides, nullptr);
  EXPECT_EQ(view.nbytes, 96U);
  EXPECT_EQ(view.block_elements, 1U);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % view.alignment, 0U);
  EXPECT_EQ(view.device_data, nullptr);
  EXPECT_EQ(static_cast<const float*>(view.data)[23], 1.5F);

  ASSERT_EQ(mh_tensor(handle.get(), "transposed", &view), MH_OK);
  ASSERT_NE(view.strides, nullptr);
  EXPECT_THAT(std::vector<int64_t>(view.strides, view.strides + view.rank), ElementsAre(1, 3));

  ASSERT_EQ(mh_tensor(handle.get(), "packed", &view), MH_OK);
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.flags & MH_TENSOR_MAPPABLE, 0U);
  EXPECT_STREQ(view.reason, "compressed in its file");
}

TEST_F(ClientTest, ANameInTwoComponentsNeedsItsComponent) {
  FakeVersion version = MakeVersion("m", 1, 2, 4, 1);
  version.tensors[0].name = version.tensors[1].name = "weight";
  version.tensors[0].component = "text/encoder";
  version.tensors[1].component = "vision";
  FakeTensor slashed = version.tensors[0];
  slashed.name = "only/here";
  version.tensors.push_back(slashed);
  server_->Add(version);
  server_->SetLabel("m", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "m");
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.error = &error_;
  EXPECT_EQ(mh_tensor(handle.get(), "weight", &view), MH_INVALID_ARGUMENT);
  EXPECT_THAT(error_.message, HasSubstr("text/encoder/weight or vision/weight"));
  ASSERT_EQ(mh_tensor(handle.get(), "vision/weight", &view), MH_OK) << error_.message;
  EXPECT_STREQ(view.component, "vision");
  ASSERT_EQ(mh_tensor(handle.get(), "text/encoder/weight", &view), MH_OK);
  EXPECT_STREQ(view.component, "text/encoder");
  EXPECT_EQ(mh_tensor(handle.get(), "only/here", &view), MH_OK);
  EXPECT_EQ(mh_tensor(handle.get(), "vision/only/here", &view), MH_NOT_FOUND);
  EXPECT_EQ(mh_component_count(handle.get()), 2U);
  const char* name = nullptr;
  const char* format = nullptr;
  ASSERT_EQ(mh_component_at(handle.get(), 1, &name, &format), MH_OK);
  EXPECT_STREQ(name, "vision");
  EXPECT_EQ(mh_component_at(handle.get(), 2, &name, &format), MH_OUT_OF_RANGE);
}

TEST_F(ClientTest, AMissingNameComesWithNearOnes) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  mh_tensor_view tensor = MH_TENSOR_VIEW_INIT;
  EXPECT_EQ(mh_tensor(handle.get(), "tenser.3", &tensor), MH_NOT_FOUND);
  tensor.error = &error_;
  EXPECT_EQ(mh_tensor(handle.get(), "tenser.3", &tensor), MH_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("planner@7: tensor 'tenser.3'"));
  EXPECT_THAT(error_.message, HasSubstr("did you mean tensor.3"));
  EXPECT_EQ(mh_tensor(handle.get(), "nothing like it", &tensor), MH_NOT_FOUND);
  EXPECT_THAT(error_.message, Not(HasSubstr("did you mean")));
  mh_file_view file = MH_FILE_VIEW_INIT;
  file.error = &error_;
  EXPECT_EQ(mh_file(handle.get(), "tokeniser.json", &file), MH_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("did you mean tokenizer.json"));
}

TEST_F(ClientTest, AFileIsBytesAndAPath) {
  FakeVersion version = MakeVersion("m", 3, 2, 8, 3);
  version.files[1].kind = abi::RegionKind::kFile;
  server_->Add(version);
  server_->SetLabel("m", "stable", 3);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "m");
  ASSERT_EQ(mh_file_count(handle.get()), 2U);
  mh_file_view view = MH_FILE_VIEW_INIT;
  ASSERT_EQ(mh_file_at(handle.get(), 1, &view), MH_OK);
  EXPECT_STREQ(view.path, "tokenizer.json");
  EXPECT_STREQ(view.role, "sidecar");
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.fd, -1);
  ASSERT_EQ(mh_file(handle.get(), "tokenizer.json", &view), MH_OK);
  EXPECT_EQ(std::string(static_cast<const char*>(view.data), view.nbytes), "{\"version\": 3}");
  std::ifstream in(view.fd_path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), "{\"version\": 3}");
  // Once fetched it costs the daemon nothing.
  ASSERT_EQ(mh_file(handle.get(), "tokenizer.json", &view), MH_OK);
  EXPECT_EQ(server_->fetches(), 1U);
  // A weights file is mapped already; its path is fetched.
  ASSERT_EQ(mh_file(handle.get(), "model-10000.safetensors", &view), MH_OK);
  mh_tensor_view tensor = MH_TENSOR_VIEW_INIT;
  ASSERT_EQ(mh_tensor_at(handle.get(), 0, &tensor), MH_OK);
  EXPECT_EQ(tensor.data, view.data);
  ASSERT_NE(view.fd_path, nullptr);
  char first[4];
  EXPECT_EQ(::pread(view.fd, first, sizeof(first), 0), 4);
}

TEST_F(ClientTest, MetadataIsFoundByKey) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  size_t length = 0;
  EXPECT_STREQ(mh_metadata(handle.get(), "note", &length), "made for a test");
  EXPECT_EQ(length, 15U);
  EXPECT_EQ(mh_metadata(handle.get(), "nope", nullptr), nullptr);
  ASSERT_EQ(mh_metadata_count(handle.get()), 2U);
  const char* key = nullptr;
  const char* value = nullptr;
  ASSERT_EQ(mh_metadata_at(handle.get(), 0, &key, &value), MH_OK);
  EXPECT_STREQ(key, "format");
  EXPECT_STREQ(value, "pt");
}

TEST_F(ClientTest, TenThousandTensorsAreAllFound) {
  server_->Add(MakeVersion("big", 1, 10'000, 1, 1));
  server_->SetLabel("big", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "big");
  for (int i = 0; i < 10'000; ++i) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    const std::string name = "tensor." + std::to_string(i);
    ASSERT_EQ(mh_tensor(handle.get(), name.c_str(), &view), MH_OK) << name;
    ASSERT_EQ(view.name, name);
  }
}

TEST_F(ClientTest, ThreeHundredShardsComeInSeveralFrames) {
  server_->Add(MakeVersion("sharded", 1, 600, 4, 9, 300));
  server_->SetLabel("sharded", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "sharded");
  EXPECT_EQ(ValueOf(handle.get()), 9);
}

// Descriptors are mapped and closed frame by frame, so that fewer than there are shards will do.
TEST_F(ClientTest, ThreeHundredShardsNeedNoThreeHundredDescriptors) {
  server_->Add(MakeVersion("sharded", 1, 600, 4, 9, 300));
  server_->SetLabel("sharded", "stable", 1);
  server_->Start();
  const ClientPtr client = Connect();
  const int next = ::dup(0);
  ::close(next);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(next) + abi::kMaxFdsPerFrame + 16;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const HandlePtr handle = Acquired(client, "sharded");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  const int after = ::dup(0);
  ::close(after);
  EXPECT_LE(after, next + 3);  // The background thread's two, and nothing of the regions.
  EXPECT_EQ(ValueOf(handle.get()), 9);
}

TEST_F(ClientTest, ASetIsAllOrNothing) {
  StartUsual();
  const ClientPtr client = Connect();
  const char* good[] = {"planner", "detector"};
  mh_handle* handles[2] = {};
  ASSERT_EQ(mh_acquire_set(client.get(), good, 2, nullptr, handles, &error_), MH_OK);
  EXPECT_EQ(mh_handle_version(handles[0]), 7U);
  EXPECT_EQ(mh_handle_version(handles[1]), 1U);
  mh_release(handles[0]);
  mh_release(handles[1]);
  const char* bad[] = {"planner", "nobody"};
  mh_handle* untouched[2] = {};
  EXPECT_EQ(mh_acquire_set(client.get(), bad, 2, nullptr, untouched, &error_), MH_NOT_FOUND);
  EXPECT_THAT(error_.message, HasSubstr("nobody"));
  EXPECT_EQ(untouched[0], nullptr);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(ClientTest, ReleasingGivesTheLeaseBackAndRetainingKeepsIt) {
  StartUsual();
  const ClientPtr client = Connect();
  HandlePtr handle = Acquired(client, "planner");
  EXPECT_EQ(server_->leases(), 1U);
  mh_handle* second = mh_retain(handle.get());
  handle.reset();
  EXPECT_EQ(ValueOf(second), 7);
  EXPECT_EQ(server_->leases(), 1U);
  mh_release(second);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(ClientTest, DisconnectingEndsTheLeasesAndLeavesTheBytes) {
  StartUsual();
  ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  client.reset();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->connections() == 0; }));
  EXPECT_EQ(ValueOf(handle.get()), 7);
  EXPECT_EQ(mh_superseded(handle.get()), 0);
  mh_file_view file = MH_FILE_VIEW_INIT;
  file.error = &error_;
  EXPECT_EQ(mh_file(handle.get(), "tokenizer.json", &file), MH_FAILED_PRECONDITION);
  EXPECT_THAT(error_.message, HasSubstr("disconnected"));
}

TEST_F(ClientTest, SupersededFollowsItsOwnLabelAndNoOther) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr planner = Acquired(client, "planner");
  const HandlePtr detector = Acquired(client, "detector");
  const HandlePtr fixed = Acquired(client, "planner@7");
  EXPECT_EQ(mh_superseded(planner.get()), 0);
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(mh_superseded(planner.get()), 1);
  EXPECT_EQ(mh_superseded(detector.get()), 0);
  EXPECT_EQ(mh_superseded(fixed.get()), 0);
  EXPECT_EQ(ValueOf(planner.get()), 7);
}

TEST_F(ClientTest, ResolveReadsThePage) {
  StartUsual();
  const ClientPtr client = Connect();
  uint64_t version = 0;
  uint64_t generation = 0;
  ASSERT_EQ(mh_resolve(client.get(), "planner", &version, &generation, &error_), MH_OK);
  EXPECT_EQ(version, 7U);
  server_->SetLabel("planner", "stable", 8);
  ASSERT_EQ(mh_resolve(client.get(), "planner", &version, &generation, &error_), MH_OK);
  EXPECT_EQ(version, 8U);
  EXPECT_EQ(generation, 2U);
  EXPECT_EQ(mh_resolve(client.get(), "planner:canary", &version, nullptr, &error_), MH_NOT_FOUND);
  server_->SetLabel("planner", "stable", 0);
  EXPECT_EQ(mh_resolve(client.get(), "planner", &version, nullptr, &error_), MH_NOT_FOUND);
}

TEST_F(ClientTest, WaitingAcquiresWhenTheVersionIsReady) {
  StartUsual();
  server_->SetReady("planner", 7, false);
  const ClientPtr client = Connect();
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "planner", &handle), MH_FAILED_PRECONDITION);
  EXPECT_THAT(error_.message, HasSubstr("not READY"));
  EXPECT_EQ(Acquire(client, "planner", &handle, /*wait=*/true, 50), MH_DEADLINE_EXCEEDED);
  std::thread loader([&] { server_->SetReady("planner", 7, true); });
  EXPECT_EQ(Acquire(client, "planner", &handle, /*wait=*/true, 10'000), MH_OK) << error_.message;
  loader.join();
  // What the call that gave up was granted late goes back.
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
}

// One thread waits for a model that is not there; the others' calls go on at once.
TEST_F(ClientTest, AWaitingCallDoesNotHoldUpOthers) {
  StartUsual();
  server_->SetReady("detector", 1, false);
  const ClientPtr client = Connect();
  std::atomic<mh_status> waited{MH_UNKNOWN};
  std::thread waiter([&] {
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.wait = 1;
    options.deadline_ms = 20'000;
    mh_handle* handle = nullptr;
    waited = mh_acquire(client.get(), "detector", &options, &handle, nullptr);
    mh_release(handle);
  });
  for (int i = 0; i < 200; ++i) {
    const HandlePtr handle = Acquired(client, "planner");
    ASSERT_EQ(ValueOf(handle.get()), 7);
  }
  EXPECT_EQ(waited.load(), MH_UNKNOWN);
  server_->SetReady("detector", 1, true);
  waiter.join();
  EXPECT_EQ(waited.load(), MH_OK);
}

TEST_F(ClientTest, ManyThreadsShareAClientAndAHandle) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr shared = Acquired(client, "planner");
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        mh_tensor_view tensor = MH_TENSOR_VIEW_INIT;
        mh_file_view file = MH_FILE_VIEW_INIT;
        mh_handle* own = nullptr;
        const char* ref = t % 2 == 0 ? "detector" : "planner@8";
        const bool good = mh_tensor(shared.get(), "tensor.5", &tensor) == MH_OK &&
                          *static_cast<const float*>(tensor.data) == 7 &&
                          mh_file(shared.get(), "tokenizer.json", &file) == MH_OK &&
                          mh_superseded(shared.get()) == 0 &&
                          mh_acquire(client.get(), ref, nullptr, &own, nullptr) == MH_OK &&
                          ValueOf(own) == (t % 2 == 0 ? 1 : 8);
        if (!good) ++failures;
        mh_release(own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
}

TEST_F(ClientTest, TheEventDescriptorTellsOfALabelThatMoved) {
  StartUsual();
  const ClientPtr client = Connect();
  const int fd = mh_event_fd(client.get());
  ASSERT_GE(fd, 0);
  EXPECT_EQ(mh_event_fd(client.get()), fd);
  pollfd entry{fd, POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 10'000), 1);  // It begins by asking to look.
  mh_clear_events(client.get());
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
  mh_clear_events(client.get());
  server_->SendEvent(abi::EventKind::kDraining, 1);
  EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
}

TEST_F(ClientTest, EventsBetweenRepliesDisturbNoCall) {
  StartUsual();
  const ClientPtr client = Connect();
  ASSERT_GE(mh_event_fd(client.get()), 0);
  Faults faults;
  faults.events_between = true;
  server_->SetFaults(faults);
  for (int i = 0; i < 300; ++i) {
    const HandlePtr handle = Acquired(client, "planner");
    ASSERT_EQ(ValueOf(handle.get()), 7);
  }
}

TEST_F(ClientTest, BadArgumentsAreErrors) {
  StartUsual();
  const ClientPtr client = Connect();
  HandlePtr handle;
  for (const char* ref : {"", "Planner", "planner@", "planner@0", "planner@07", "planner@x",
                          "planner:", "planner:a:b", "planner@7:x", "../etc"}) {
    EXPECT_EQ(Acquire(client, ref, &handle), MH_INVALID_ARGUMENT) << ref;
    EXPECT_THAT(error_.message, HasSubstr("reference '")) << ref;
  }
  mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
  options.size = 3;
  mh_handle* made = nullptr;
  EXPECT_EQ(mh_acquire(client.get(), "planner", &options, &made, &error_), MH_INVALID_ARGUMENT);
  std::vector<const char*> many(33, "planner");
  std::vector<mh_handle*> handles(33);
  EXPECT_EQ(mh_acquire_set(client.get(), many.data(), 33, nullptr, handles.data(), &error_),
            MH_INVALID_ARGUMENT);
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.size = 8;
  const HandlePtr good = Acquired(client, "planner");
  EXPECT_EQ(mh_tensor(good.get(), "tensor.0", &view), MH_INVALID_ARGUMENT);
}

// A program built against a later header: its options are longer.
TEST_F(ClientTest, LongerOptionsAreFineWhileWhatWeDoNotKnowIsZero) {
  StartUsual();
  struct {
    mh_options known = MH_OPTIONS_INIT;
    uint64_t later = 0;
  } options;
  options.known.size = sizeof(options);
  options.known.runtime_dir = dir_.c_str();
  const ClientPtr client(mh_connect(&options.known, &error_));
  EXPECT_NE(client, nullptr) << error_.message;
  options.later = 1;
  EXPECT_EQ(mh_connect(&options.known, &error_), nullptr);
  EXPECT_EQ(error_.status, MH_INVALID_ARGUMENT);
}

TEST_F(ClientTest, TheStateNamesSocketEpochAndLeases) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  mh_client_view view = MH_CLIENT_VIEW_INIT;
  ASSERT_EQ(mh_client_state(client.get(), &view), MH_OK);
  EXPECT_EQ(std::string(view.socket), dir_ + "/handles.sock");
  EXPECT_EQ(view.epoch, 1U);
  EXPECT_EQ(view.connected, 1U);
  EXPECT_EQ(view.leases, 1U);
  EXPECT_EQ(view.reconnects, 0U);
}

TEST_F(ClientTest, CopyTakesWhatIsThere) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  ASSERT_EQ(mh_tensor(handle.get(), "tensor.3", &view), MH_OK);
  float values[16] = {};
  ASSERT_EQ(mh_copy(values, view.data, sizeof(values)), MH_OK);
  EXPECT_EQ(values[15], 7);
  EXPECT_EQ(mh_copy(nullptr, nullptr, 0), MH_OK);
  EXPECT_EQ(mh_copy(nullptr, view.data, 4), MH_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace modelhost::testing
