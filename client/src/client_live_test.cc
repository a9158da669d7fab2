// Following labels: what is adopted, when, and what happens to the version before.
#include <poll.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "client/src/testing/client_fixture.h"

namespace modelhost::testing {
namespace {

class LiveTest : public ClientTest {
 protected:
  LivePtr Follow(const ClientPtr& client, const char* ref) {
    mh_live* live = nullptr;
    EXPECT_EQ(mh_follow(client.get(), ref, nullptr, &live, &error_), MH_OK) << error_.message;
    return LivePtr(live);
  }
  // Adopts until the version is `version`.
  static bool AdoptsVersion(const LivePtr& live, uint64_t version) {
    return FakeServer::Eventually(
        [&] { return mh_handle_version(mh_live_adopt(live.get())) == version; });
  }
};

TEST_F(LiveTest, TheNextVersionIsTakenOnlyWhenTheCallerAdopts) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  const mh_handle* first = mh_live_adopt(live.get());
  EXPECT_EQ(mh_handle_version(first), 7U);
  server_->SetLabel("planner", "stable", 8);
  // Both versions are attached, and the old one is what we see.
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
  EXPECT_EQ(mh_live_current(live.get()), first);
  EXPECT_EQ(ValueOf(mh_live_current(live.get())), 7);
  EXPECT_EQ(mh_superseded(first), 1);
  ASSERT_TRUE(AdoptsVersion(live, 8));
  EXPECT_EQ(ValueOf(mh_live_current(live.get())), 8);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  EXPECT_EQ(mh_live_status(live.get(), &error_), MH_OK);
}

TEST_F(LiveTest, TheEventDescriptorSaysThatThereIsSomethingToAdopt) {
  StartUsual();
  const ClientPtr client = Connect();
  pollfd entry{mh_event_fd(client.get()), POLLIN, 0};
  const LivePtr live = Follow(client, "planner");
  ASSERT_EQ(::poll(&entry, 1, 10'000), 1);
  mh_clear_events(client.get());
  server_->SetLabel("planner", "stable", 8);
  // An executor: sleep, clear, look.
  uint64_t version = 7;
  while (version == 7 && ::poll(&entry, 1, 10'000) == 1) {
    mh_clear_events(client.get());
    version = mh_handle_version(mh_live_adopt(live.get()));
  }
  EXPECT_EQ(version, 8U);
}

TEST_F(LiveTest, ALabelThatThePageHasNoRoomForIsFollowedByAsking) {
  server_->FillPage();
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  server_->SetLabel("planner", "stable", 8);
  ASSERT_TRUE(AdoptsVersion(live, 8));
  // Also when it moved while nobody could tell.
  server_->Stop();
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  ASSERT_TRUE(AdoptsVersion(live, 7));
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  // What is asked in vain is no newer set.
  const uint64_t before = server_->acquires();
  server_->SendEvent(abi::EventKind::kLookAtPage, 0);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->acquires() > before; }));
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  const mh_handle* same = mh_live_current(live.get());
  EXPECT_EQ(mh_live_adopt(live.get()), same);
  uint64_t version = 0;
  EXPECT_EQ(mh_resolve(client.get(), "planner", &version, nullptr, &error_), MH_NOT_FOUND);
  EXPECT_THAT(error_.message, ::testing::HasSubstr("page, which is full"));
}

TEST_F(LiveTest, ARetainedVersionOutlivesItsAdoption) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  const HandlePtr kept(mh_retain(mh_live_current(live.get())));
  server_->SetLabel("planner", "stable", 8);
  ASSERT_TRUE(AdoptsVersion(live, 8));
  EXPECT_EQ(ValueOf(kept.get()), 7);
  EXPECT_EQ(server_->leases(), 2U);
}

TEST_F(LiveTest, VersionsThatWereNeverAdoptedAreGivenBack) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  for (int i = 0; i < 5; ++i) {
    const uint64_t before = server_->acquires();
    server_->SetLabel("planner", "stable", i % 2 == 0 ? 8 : 7);
    ASSERT_TRUE(FakeServer::Eventually([&] { return server_->acquires() > before; }));
  }
  ASSERT_TRUE(AdoptsVersion(live, 8));
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
}

TEST_F(LiveTest, ARemovedLabelChangesNothing) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  server_->SetLabel("planner", "stable", 0);
  EXPECT_TRUE(FakeServer::Eventually([&] { return mh_live_status(live.get(), &error_) != MH_OK; }));
  EXPECT_EQ(error_.status, MH_NOT_FOUND);
  EXPECT_EQ(ValueOf(mh_live_adopt(live.get())), 7);
  server_->SetLabel("planner", "stable", 8);
  EXPECT_TRUE(AdoptsVersion(live, 8));
  EXPECT_EQ(mh_live_status(live.get(), &error_), MH_OK);
}

// Whatever happened before, the background thread sleeps when there is nothing to do.
TEST_F(LiveTest, AnIdleClientCostsNoTime) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  server_->SetLabel("planner", "stable", 0);
  ASSERT_TRUE(FakeServer::Eventually([&] { return mh_live_status(live.get(), &error_) != MH_OK; }));
  server_->SetLabel("planner", "stable", 8);
  ASSERT_TRUE(AdoptsVersion(live, 8));
  server_->Stop();
  server_->Start();
  ASSERT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  const auto cpu_ms = [] {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
  };
  // A thread that spins uses more in a second than this, however busy the machine is.
  long least = 1000;
  for (int i = 0; i < 5 && least > 20; ++i) {
    const long before = cpu_ms();
    (void)::poll(nullptr, 0, 200);
    least = std::min(least, cpu_ms() - before);
  }
  EXPECT_LE(least, 20);
}

TEST_F(LiveTest, AFixedVersionIsFollowedNowhere) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner@7");
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(mh_handle_version(mh_live_adopt(live.get())), 7U);
  EXPECT_EQ(server_->acquires(), 1U);
}

TEST_F(LiveTest, FollowingGoesOnAfterARestart) {
  StartUsual();
  const ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  server_->Stop();
  server_->SetLabel("planner", "stable", 8);
  server_->Start();
  ASSERT_TRUE(AdoptsVersion(live, 8));
  EXPECT_EQ(ValueOf(mh_live_current(live.get())), 8);
}

TEST_F(LiveTest, ReleasingGivesEverythingBackAlsoWhatWasPrepared) {
  StartUsual();
  const ClientPtr client = Connect();
  LivePtr live = Follow(client, "planner");
  server_->SetLabel("planner", "stable", 8);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
  live.reset();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(LiveTest, ALiveModelOutlivesItsClient) {
  StartUsual();
  ClientPtr client = Connect();
  const LivePtr live = Follow(client, "planner");
  client.reset();
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(ValueOf(mh_live_adopt(live.get())), 7);
}

TEST_F(LiveTest, ASetIsAdoptedTogetherAndKeepsWhatDidNotChange) {
  StartUsual();
  const ClientPtr client = Connect();
  const char* refs[] = {"planner", "detector"};
  mh_live_set* made = nullptr;
  ASSERT_EQ(mh_follow_set(client.get(), refs, 2, nullptr, &made, &error_), MH_OK) << error_.message;
  const LiveSetPtr live(made);
  const mh_handle* first[2];
  EXPECT_EQ(mh_live_set_adopt(live.get(), first, 2), 0);
  server_->SetLabel("planner", "stable", 8);
  const mh_handle* second[2];
  ASSERT_TRUE(
      FakeServer::Eventually([&] { return mh_live_set_adopt(live.get(), second, 2) == 1; }));
  EXPECT_EQ(ValueOf(second[0]), 8);
  EXPECT_EQ(second[1], first[1]);  // At the same addresses.
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
  EXPECT_EQ(mh_live_set_status(live.get(), &error_), MH_OK);
}

// Two labels always move together; a set must never show one without the other.
TEST_F(LiveTest, ASetIsNeverMixed) {
  StartUsual();
  const ClientPtr client = Connect();
  const char* refs[] = {"planner", "detector"};
  mh_live_set* made = nullptr;
  ASSERT_EQ(mh_follow_set(client.get(), refs, 2, nullptr, &made, &error_), MH_OK);
  const LiveSetPtr live(made);
  std::atomic<bool> stop{false};
  std::thread mover([&] {
    for (int i = 0; !stop; ++i) {
      const bool newer = i % 2 == 0;
      server_->SetLabels(
          {{{"planner", "stable"}, newer ? 8U : 7U}, {{"detector", "stable"}, newer ? 2U : 1U}});
      std::this_thread::yield();
    }
  });
  int adopted = 0;
  EXPECT_TRUE(FakeServer::Eventually([&] {
    const mh_handle* handles[2];
    adopted += mh_live_set_adopt(live.get(), handles, 2);
    const float planner = ValueOf(handles[0]);
    EXPECT_EQ(ValueOf(handles[1]), planner - 6);
    return adopted >= 20;
  }));
  stop = true;
  mover.join();
}

}  // namespace
}  // namespace modelhost::testing
