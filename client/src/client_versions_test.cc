// The library against daemons of other versions, and programs that were built with other headers.
#include <cstddef>
#include <string>

#include "client/src/testing/client_fixture.h"

namespace modelhost::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kOurs = abi::kFrameAbi;
constexpr uint32_t kOldest = abi::kFrameAbiMin;

std::string Range(uint32_t from, uint32_t to) {
  return std::to_string(from) + " to " + std::to_string(to);
}

TEST_F(ClientTest, ADaemonThatSpeaksANewerProtocolTooIsFine) {
  StartUsual();
  server_->SetFaults({.abi_min = kOurs, .abi_max = kOurs + 1});
  const ClientPtr client = Connect();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(ValueOf(Acquired(client, "planner").get()), 7);
}

TEST_F(ClientTest, ADaemonThatSpeaksAnOlderProtocolTooIsFine) {
  StartUsual();
  server_->SetFaults({.abi_min = kOldest - 1, .abi_max = kOldest});
  const ClientPtr client = Connect();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(ValueOf(Acquired(client, "planner").get()), 7);
}

// At once, not at the deadline: waiting helps nobody.
TEST_F(ClientTest, ADaemonThatSpeaksOnlyANewerProtocolIsNamed) {
  StartUsual();
  server_->SetFaults({.abi_min = kOurs + 1, .abi_max = kOurs + 2});
  EXPECT_EQ(TryConnect(3'600'000), nullptr);
  EXPECT_EQ(error_.status, MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message, HasSubstr("this client speaks " + Range(kOldest, kOurs) +
                                        ", this daemon speaks " + Range(kOurs + 1, kOurs + 2)));
  EXPECT_THAT(error_.message, HasSubstr("update libmodelhost"));
}

TEST_F(ClientTest, ADaemonThatSpeaksOnlyAnOlderProtocolIsNamed) {
  StartUsual();
  server_->SetFaults({.abi_min = 0, .abi_max = kOldest - 1});
  EXPECT_EQ(TryConnect(3'600'000), nullptr);
  EXPECT_EQ(error_.status, MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message, HasSubstr("update modelhostd"));
}

TEST_F(ClientTest, AnAnswerInAnAbiThatWasNotOfferedIsNamed) {
  StartUsual();
  server_->SetFaults({.answer_abi = kOurs + 6});
  EXPECT_EQ(TryConnect(5000), nullptr);
  EXPECT_EQ(error_.status, MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message, HasSubstr("answered in ABI " + std::to_string(kOurs + 6)));
}

TEST_F(ClientTest, APageOfAnotherAbiIsNamed) {
  server_->SetFaults({.page_abi = abi::kCatalogueAbi + 1});
  StartUsual();
  EXPECT_EQ(TryConnect(5000), nullptr);
  EXPECT_EQ(error_.status, MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message,
              HasSubstr("catalogue page: ABI 2, this library reads 1 (update libmodelhost)"));
}

TEST_F(ClientTest, AnIndexOfAnotherAbiIsNamedAndTheSessionGoesOn) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr before = Acquired(client, "planner");
  server_->SetFaults({.index_abi = abi::kIndexAbi + 1});
  HandlePtr handle;
  EXPECT_EQ(Acquire(client, "detector", &handle), MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message, HasSubstr("ABI 2, this library reads 1 (update libmodelhost)"));
  EXPECT_EQ(handle, nullptr);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  server_->SetFaults({});
  EXPECT_EQ(ValueOf(Acquired(client, "detector").get()), 1);
  EXPECT_EQ(ValueOf(before.get()), 7);
}

// A newer daemon has news of kinds that did not exist when this library was made.
TEST_F(ClientTest, EventsOfUnknownKindsAreIgnored) {
  StartUsual();
  const ClientPtr client = Connect();
  ASSERT_GE(mh_event_fd(client.get()), 0);
  const HandlePtr handle = Acquired(client, "planner");
  server_->SendEvent(static_cast<abi::EventKind>(99), 0);
  server_->SetLabel("planner", "stable", 8);
  EXPECT_TRUE(FakeServer::Eventually([&] { return mh_superseded(handle.get()) == 1; }));
  EXPECT_EQ(ValueOf(Acquired(client, "planner").get()), 8);
  EXPECT_EQ(server_->connections(), 1U);
}

// An upgrade under a running client that cannot follow: what it has stays good.
TEST_F(ClientTest, AfterAnUpgradeBeyondItAClientKeepsItsBytesAndIsToldWhy) {
  StartUsual();
  const ClientPtr client = Connect(2000);
  const HandlePtr handle = Acquired(client, "planner");
  server_->Stop();
  server_->SetFaults({.abi_min = kOurs + 1, .abi_max = kOurs + 1});
  server_->Start();
  HandlePtr other;
  EXPECT_EQ(Acquire(client, "detector", &other), MH_UNIMPLEMENTED);
  EXPECT_THAT(error_.message, HasSubstr("update libmodelhost"));
  EXPECT_EQ(ValueOf(handle.get()), 7);
  // And a downgrade brings it back.
  server_->Stop();
  server_->SetFaults({});
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  EXPECT_EQ(Acquire(client, "detector", &other), MH_OK) << error_.message;
}

// --- The C ABI: structs begin with their size.

// As a program built against a later header.
template <typename T>
struct Later {
  T known;
  uint64_t later[4] = {};
};

TEST_F(ClientTest, OptionsOfALaterHeaderAreFineWhileTheRestIsZero) {
  StartUsual();
  Later<mh_options> options{MH_OPTIONS_INIT};
  options.known.size = sizeof(options);
  options.known.runtime_dir = dir_.c_str();
  const ClientPtr client(mh_connect(&options.known, &error_));
  ASSERT_NE(client, nullptr) << error_.message;
  options.later[3] = 1;
  EXPECT_EQ(mh_connect(&options.known, &error_), nullptr);
  EXPECT_EQ(error_.status, MH_INVALID_ARGUMENT);

  Later<mh_acquire_options> acquire{MH_ACQUIRE_OPTIONS_INIT};
  acquire.known.size = sizeof(acquire);
  mh_handle* made = nullptr;
  EXPECT_EQ(mh_acquire(client.get(), "planner", &acquire.known, &made, &error_), MH_OK)
      << error_.message;
  const HandlePtr handle(made);
  acquire.later[0] = 1;
  made = nullptr;
  EXPECT_EQ(mh_acquire(client.get(), "planner", &acquire.known, &made, &error_),
            MH_INVALID_ARGUMENT);
  EXPECT_EQ(made, nullptr);
}

TEST_F(ClientTest, ViewsOfALaterHeaderAreFilledAsFarAsWeKnow) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  Later<mh_tensor_view> view{MH_TENSOR_VIEW_INIT};
  view.known.size = sizeof(view);
  view.later[0] = 77;
  ASSERT_EQ(mh_tensor_at(handle.get(), 0, &view.known), MH_OK);
  EXPECT_EQ(view.known.size, sizeof(view));  // The caller's, untouched.
  EXPECT_EQ(view.later[0], 77U);
  EXPECT_NE(view.known.data, nullptr);
}

// As a program built against an earlier header: a struct that ends before its last field.
TEST_F(ClientTest, ShorterStructsAreTakenDownToTheFirstVersion) {
  StartUsual();
  mh_options options = MH_OPTIONS_INIT;
  options.runtime_dir = dir_.c_str();
  options.deadline_ms = 5000;
  for (size_t size = 0; size < offsetof(mh_options, interrupted); size += 4) {
    options.size = size;
    const ClientPtr client(mh_connect(&options, &error_));
    // The first version ends there: no shorter one was ever given out.
    EXPECT_EQ(client, nullptr) << size;
    EXPECT_EQ(error_.status, MH_INVALID_ARGUMENT) << size;
  }
  // What the caller does not have is not looked at.
  options.interrupted = [](void*) { return 1; };
  options.size = offsetof(mh_options, interrupted);
  server_->SetReady("planner", 8, false);
  const ClientPtr earlier(mh_connect(&options, &error_));
  ASSERT_NE(earlier, nullptr) << error_.message;
  HandlePtr none;
  EXPECT_EQ(Acquire(earlier, "planner@8", &none, /*wait=*/true, 300), MH_DEADLINE_EXCEEDED);
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  mh_tensor_view view = MH_TENSOR_VIEW_INIT;
  view.size = sizeof(view) - 8;
  view.data = &view;
  EXPECT_EQ(mh_tensor_at(handle.get(), 0, &view), MH_INVALID_ARGUMENT);
  EXPECT_EQ(view.data, &view);  // Nothing was written.
}

}  // namespace
}  // namespace modelhost::testing
