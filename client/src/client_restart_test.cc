// The C API when the daemon goes and comes back, and when the process forks.
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "client/src/testing/client_fixture.h"

#if defined(__SANITIZE_THREAD__)
#define MH_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MH_UNDER_TSAN 1
#endif
#endif

namespace modelhost::testing {
namespace {

using ::testing::HasSubstr;

uint32_t Connected(const ClientPtr& client) {
  mh_client_view view = MH_CLIENT_VIEW_INIT;
  EXPECT_EQ(mh_client_state(client.get(), &view), MH_OK);
  return view.connected;
}

TEST_F(ClientTest, BytesStayWhileTheDaemonIsGone) {
  StartUsual();
  const ClientPtr client = Connect(100);
  const HandlePtr handle = Acquired(client, "planner");
  server_->Stop();
  EXPECT_TRUE(FakeServer::Eventually([&] { return Connected(client) == 0; }));
  EXPECT_EQ(ValueOf(handle.get()), 7);
  EXPECT_EQ(mh_superseded(handle.get()), 0);
  HandlePtr other;
  EXPECT_EQ(Acquire(client, "planner", &other), MH_UNAVAILABLE);
  EXPECT_THAT(error_.message, HasSubstr(dir_ + "/handles.sock"));
}

TEST_F(ClientTest, TheBackgroundThreadComesBackAndDeclaresTheLeases) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr planner = Acquired(client, "planner");
  const HandlePtr fixed = Acquired(client, "detector@2");
  server_->Stop();
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
  EXPECT_EQ(server_->redeclares(), 2U);
  EXPECT_THAT(server_->declared_labels(), ::testing::UnorderedElementsAre("stable", ""));
  mh_client_view view = MH_CLIENT_VIEW_INIT;
  ASSERT_EQ(mh_client_state(client.get(), &view), MH_OK);
  EXPECT_EQ(view.epoch, 2U);
  EXPECT_EQ(view.reconnects, 1U);
  // The label is found in the new page, where it has another slot.
  EXPECT_EQ(mh_superseded(planner.get()), 0);
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(mh_superseded(planner.get()), 1);
  EXPECT_EQ(ValueOf(planner.get()), 7);
  // The lease is a real one: files can be fetched by it.
  mh_file_view file = MH_FILE_VIEW_INIT;
  file.error = &error_;
  EXPECT_EQ(mh_file(planner.get(), "tokenizer.json", &file), MH_OK) << error_.message;
}

// It would take a version and a label for a broken frame, and end the connection.
TEST_F(ClientTest, AnOlderDaemonIsNotToldTheLabelOfADeclaredLease) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr planner = Acquired(client, "planner");
  server_->Stop();
  Faults faults;
  faults.abi_max = 1;
  server_->SetFaults(faults);
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  EXPECT_THAT(server_->declared_labels(), ::testing::ElementsAre(""));
}

TEST_F(ClientTest, ALabelThatMovedWhileTheDaemonWasAwayIsSeen) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  server_->Stop();
  server_->SetLabel("planner", "stable", 8);
  EXPECT_EQ(mh_superseded(handle.get()), 0);
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return mh_superseded(handle.get()) == 1; }));
}

TEST_F(ClientTest, ALeaseThatIsReleasedWhileTheDaemonIsAwayIsNotDeclared) {
  StartUsual();
  const ClientPtr client = Connect();
  HandlePtr released = Acquired(client, "planner");
  const HandlePtr kept = Acquired(client, "detector");
  server_->Stop();
  released.reset();
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  EXPECT_EQ(server_->redeclares(), 1U);
}

TEST_F(ClientTest, AVersionThatIsGoneAfterTheRestartStaysReadable) {
  StartUsual();
  const ClientPtr client = Connect(2000);
  const HandlePtr handle = Acquired(client, "planner");
  server_->Stop();
  Faults faults;
  faults.redeclare_not_found = true;
  server_->SetFaults(faults);
  server_->Start();
  mh_file_view file = MH_FILE_VIEW_INIT;
  file.error = &error_;
  EXPECT_EQ(mh_file(handle.get(), "tokenizer.json", &file), MH_FAILED_PRECONDITION);
  EXPECT_THAT(error_.message, HasSubstr("no longer has this version"));
  EXPECT_EQ(ValueOf(handle.get()), 7);
}

// The grant and the end of the connection are there to be read at once. The daemon that comes next
// numbers its leases anew: one that kept the old number would be another's.
TEST_F(ClientTest, ALeaseThatWasGrantedLastOfAllIsDeclaredToTheNextDaemon) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr other = Acquired(client, "detector");
  mh_live* made = nullptr;
  ASSERT_EQ(mh_follow(client.get(), "planner", nullptr, &made, &error_), MH_OK) << error_.message;
  const LivePtr live(made);
  Faults faults;
  faults.hang_up_after_grant = true;
  server_->SetFaults(faults);
  server_->SetLabel("planner", "stable", 8);
  ASSERT_TRUE(
      FakeServer::Eventually([&] { return mh_handle_version(mh_live_adopt(live.get())) == 8; }));
  // Both leases are there again, and the one on version 7 is not.
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 2; }));
  mh_file_view file = MH_FILE_VIEW_INIT;
  file.error = &error_;
  ASSERT_EQ(mh_file(mh_live_current(live.get()), "tokenizer.json", &file), MH_OK) << error_.message;
  EXPECT_EQ(std::string(static_cast<const char*>(file.data), file.nbytes), "{\"version\": 8}");
}

TEST_F(ClientTest, TheEventDescriptorTellsThatTheDaemonCameBackAndOfWhatFollows) {
  StartUsual();
  const ClientPtr client = Connect();
  const int fd = mh_event_fd(client.get());
  pollfd entry{fd, POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 10'000), 1);
  mh_clear_events(client.get());
  server_->Stop();
  ASSERT_EQ(::poll(&entry, 1, 10'000), 1);
  server_->Start();
  // Subscribed again, though there is no lease at all.
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->connections() == 1; }));
  uint64_t version = 0;
  EXPECT_TRUE(FakeServer::Eventually([&] {
    server_->SetLabel("planner", "stable", 8);
    mh_clear_events(client.get());
    return ::poll(&entry, 1, 100) == 1 &&
           mh_resolve(client.get(), "planner", &version, nullptr, nullptr) == MH_OK && version == 8;
  }));
}

// The daemon dies again and again in the middle of calls. A call may fail, with an error that says
// so; nothing may mix or crash, and in the end all is well.
TEST_F(ClientTest, CallsSurviveADaemonThatIsKilledAmongThem) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr held = Acquired(client, "planner@8");
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        mh_handle* handle = nullptr;
        mh_error error{};
        mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
        options.deadline_ms = 2000;
        const mh_status status = mh_acquire(client.get(), "planner", &options, &handle, &error);
        if (status == MH_OK) {
          ++good;
          if (ValueOf(handle) != 7) ++wrong;
        } else if (status != MH_UNAVAILABLE && status != MH_DEADLINE_EXCEEDED) {
          ++wrong;
        }
        mh_release(handle);
      }
    });
  }
  for (int i = 0; i < 15; ++i) {
    const int before = good;
    EXPECT_TRUE(FakeServer::Eventually([&] { return good > before + 5; }));
    server_->Stop();
    server_->Start();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(ValueOf(held.get()), 8);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
}

#ifndef MH_UNDER_TSAN

// Runs `body` in a forked child; its result is the child's exit code.
template <typename Body>
int InChild(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

TEST_F(ClientTest, AForkedChildReadsOnButHasNoSession) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  EXPECT_EQ(InChild([&] {
              if (ValueOf(handle.get()) != 7) return 1;
              if (mh_superseded(handle.get()) != 0) return 2;
              mh_handle* other = nullptr;
              mh_error error{};
              if (mh_acquire(client.get(), "planner", nullptr, &other, &error) !=
                  MH_FAILED_PRECONDITION) {
                return 3;
              }
              if (std::string(error.message).find("stays with the parent") == std::string::npos) {
                return 4;
              }
              mh_file_view file = MH_FILE_VIEW_INIT;
              if (mh_file(handle.get(), "tokenizer.json", &file) != MH_FAILED_PRECONDITION)
                return 5;
              if (mh_event_fd(client.get()) != -1) return 6;
              mh_release(mh_retain(handle.get()));
              mh_release(const_cast<mh_handle*>(handle.get()));
              mh_disconnect(client.get());
              return 0;
            }),
            0);
  EXPECT_EQ(server_->leases(), 1U);  // What the child released was its own copy.
  EXPECT_EQ(ValueOf(Acquired(client, "planner").get()), 7);
}

TEST_F(ClientTest, AChildThatLivesOnDoesNotKeepTheLease) {
  StartUsual();
  ClientPtr client = Connect();
  HandlePtr handle = Acquired(client, "planner");
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(ends[1]);
    char byte = 0;
    (void)!::read(ends[0], &byte, 1);  // Until the parent says so, or is gone.
    ::_exit(ValueOf(handle.get()) == 7 ? 0 : 1);
  }
  ::close(ends[0]);
  handle.reset();
  client.reset();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->connections() == 0; }));
  ::close(ends[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

TEST_F(ClientTest, AChildMayConnectForItself) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  EXPECT_EQ(InChild([&] {
              mh_options options = MH_OPTIONS_INIT;
              options.runtime_dir = dir_.c_str();
              mh_client* own = mh_connect(&options, nullptr);
              if (own == nullptr) return 1;
              mh_live* live = nullptr;
              if (mh_follow(own, "planner", nullptr, &live, nullptr) != MH_OK) return 2;
              if (ValueOf(mh_live_adopt(live)) != 7) return 3;
              mh_live_release(live);
              mh_disconnect(own);
              return 0;
            }),
            0);
}

// Threads are anywhere in the library when others fork; no child may hang, and no session may end.
TEST_F(ClientTest, ForkingAmongCallsNeitherHangsNorHurts) {
  StartUsual();
  const ClientPtr client = Connect();
  const HandlePtr handle = Acquired(client, "planner");
  ASSERT_GE(mh_event_fd(client.get()), 0);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        const ClientPtr own = t == 0 ? Connect() : nullptr;
        mh_handle* other = nullptr;
        if (mh_acquire(t == 0 ? own.get() : client.get(), "detector", nullptr, &other, nullptr) !=
            MH_OK) {
          ++wrong;
        }
        mh_release(other);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(InChild([&] {
                mh_handle* other = nullptr;
                const bool refused = mh_acquire(client.get(), "planner", nullptr, &other,
                                                nullptr) == MH_FAILED_PRECONDITION;
                return refused && ValueOf(handle.get()) == 7 ? 0 : 1;
              }),
              0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->connections() == 1; }));
}

#endif  // MH_UNDER_TSAN

}  // namespace
}  // namespace modelhost::testing
