// What hostile, broken and greedy clients get, and that others do not notice.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "daemon/publish/broker_fixture.h"
#include "daemon/publish/handle_broker.h"
#include "tests/fakes/hanging_fd.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using BrokerLimitsTest = BrokerFixture;

// The daemon's other threads open files too: counts of descriptors are compared with patience.
UniqueFd SomeFile() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

struct Hostile {
  const char* name;
  bool after_hello;
  std::function<Bytes()> frame;
};

class HostileFrameTest : public BrokerLimitsTest, public ::testing::WithParamInterface<Hostile> {};

TEST_P(HostileFrameTest, IsAnsweredWithAnErrorAndEndsItsConnectionAlone) {
  StartWithPlanner();
  TestClient good = ConnectAndAcquire();
  {
    TestClient bad = GetParam().after_hello ? Connect() : ConnectSilently();
    // Sent as it is, header and all.
    const Bytes frame = GetParam().frame();
    ASSERT_EQ(::send(bad.socket().get(), frame.data(), frame.size(), 0),
              static_cast<ssize_t>(frame.size()));
    // What follows is not read, and does not keep the answer from arriving.
    bad.Send(MakeFrame(abi::FrameType::kSubscribe, abi::Subscribe{}));
    const auto answer = bad.Receive();
    ASSERT_TRUE(answer.has_value());
    EXPECT_THAT(answer->ErrorText(), StartsWith("INVALID_ARGUMENT: malformed"));
    EXPECT_FALSE(bad.Receive().has_value());
  }
  EXPECT_EQ(Stats().violations, 1U);
  EXPECT_EQ(Leases(), 1U);
  good.Send(AcquireBytes({LabelRef("planner")}, 2));
  EXPECT_EQ(good.Receive()->type(), abi::FrameType::kGranted);
}

Bytes Patched(Bytes frame, size_t at, uint32_t value) {
  std::memcpy(frame.data() + at, &value, sizeof(value));
  return frame;
}

Bytes Cut(Bytes frame, size_t size) {
  frame.resize(size);
  return frame;
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileFrameTest,
    ::testing::Values(
        Hostile{"HalfAHeader", true, [] { return Cut(HelloBytes(), 7); }},
        Hostile{"HalfAFrame", true, [] { return Cut(AcquireBytes({LabelRef("a")}), 100); }},
        Hostile{"HonestHalf", true,
                [] {
                  return Patched(Cut(AcquireBytes({LabelRef("a")}), 100),
                                 offsetof(abi::FrameHeader, bytes), 100);
                }},
        Hostile{"WrongMagic", false, [] { return Patched(HelloBytes(), 0, 0xdeadbeef); }},
        Hostile{"HugeCount", true,
                [] {
                  return Patched(AcquireBytes({LabelRef("a")}), offsetof(abi::Acquire, count),
                                 0xffffffff);
                }},
        Hostile{"TooLong", true, [] { return Bytes(abi::kMaxFrameBytes + 1); }},
        Hostile{"UnknownType", true,
                [] { return MakeFrame(static_cast<abi::FrameType>(99), abi::Subscribe{}); }},
        Hostile{"ReplyType", true,
                [] { return MakeFrame(abi::FrameType::kGranted, abi::Granted{}); }},
        Hostile{"BadName", true, [] { return AcquireBytes({LabelRef("../etc")}); }},
        Hostile{"NoRequestId", true,
                [] { return MakeFrame(abi::FrameType::kSubscribe, abi::Subscribe{}, {}, 0); }},
        Hostile{"SecondHello", true, [] { return HelloBytes(); }},
        Hostile{"NoHello", false, [] { return AcquireBytes({LabelRef("planner")}); }},
        Hostile{"AnnouncedDescriptorsMissing", true,
                [] { return MakeFrame(abi::FrameType::kUpload, abi::Upload{}, {}, 1, 3); }}),
    [](const auto& parameter) { return parameter.param.name; });

TEST_F(BrokerLimitsTest, DescriptorsThatNobodyAskedForAreClosed) {
  StartWithPlanner();
  ConnectAndAcquire().Close();
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 0; }));
  const UniqueFd file = SomeFile();
  const size_t before = OpenFds();
  for (int i = 0; i < 20; ++i) {
    TestClient client = Connect();
    abi::Release release{};
    const bool announced = i % 2 == 0;
    client.Send(MakeFrame(abi::FrameType::kRelease, release, {}, 1, announced ? 3 : 0),
                {&file, &file, &file});
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
    EXPECT_FALSE(client.Receive().has_value());
  }
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 0; }));
  EXPECT_TRUE(Eventually([&] { return OpenFds() <= before; }));
}

// The control thread serves others, of whatever uid, while a descriptor that somebody sent hangs in
// its close. The daemon has the last one each time: the sender has closed its own.
TEST_F(BrokerLimitsTest, ADescriptorThatIsSlowToCloseHoldsUpNobody) {
  BrokerOptions options;
  options.max_connections_per_uid = 3;
  StartWithPlanner(options);
  TestClient good = ConnectAndAcquire();
  uint32_t request = 1;
  const auto served = [&] {
    good.Send(AcquireBytes({LabelRef("planner")}, ++request));
    return good.Receive()->type() == abi::FrameType::kGranted;
  };
  std::vector<UniqueFd> peers;
  const auto hanging = [&] {
    Hanging made = MakeHanging();
    peers.push_back(std::move(made.peer));
    return std::move(made.fd);
  };
  // Closes its own before the daemon can: the last one to close is the one that waits.
  const auto send = [&](TestClient& client, const Bytes& frame) {
    UniqueFd fd = hanging();
    OnLoop([&] {
      client.Send(frame, {&fd});
      fd.Reset();
    });
  };
  const abi::Release release{};
  {  // With a frame that may carry none.
    TestClient client = Connect();
    send(client, MakeFrame(abi::FrameType::kRelease, release, {}, 1, 1));
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
    EXPECT_FALSE(client.Receive().has_value());
    EXPECT_TRUE(served());
  }
  {  // With a frame that lies about it.
    TestClient client = Connect();
    send(client, MakeFrame(abi::FrameType::kRelease, release, {}, 1, 0));
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
    EXPECT_TRUE(served());
  }
  {  // With an upload that nobody asked for.
    TestClient client = Connect();
    send(client, MakeFrame(abi::FrameType::kUpload, abi::Upload{}, {}, 3, 1));
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("PERMISSION_DENIED"));
    EXPECT_TRUE(served());
  }
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 1; }));
  {  // Unread in the socket of a session that ends: nobody reads behind a frame that is refused.
    TestClient client = Connect();
    UniqueFd fd = hanging();
    OnLoop([&] {
      client.Send(Bytes(7));
      client.Send(MakeFrame(abi::FrameType::kRelease, release, {}, 1, 1), {&fd});
      fd.Reset();
    });
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
    EXPECT_TRUE(served());
  }
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 1; }));
  {  // From one that gets no connection at all.
    const TestClient second = Connect();
    const TestClient third = Connect();
    TestClient client = [&] {
      std::optional<TestClient> made;
      UniqueFd fd = hanging();
      OnLoop([&] {
        made.emplace(ConnectSilently());
        made->Send(MakeFrame(abi::FrameType::kRelease, release, {}, 1, 1), {&fd});
        fd.Reset();
      });
      return *std::move(made);
    }();
    EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("RESOURCE_EXHAUSTED"));
    EXPECT_FALSE(client.Receive().has_value());
    EXPECT_TRUE(served());
  }
  // They really hang, until their peers are gone.
  EXPECT_GE(closer_.waiting(::getuid()), peers.size());
  peers.clear();
  EXPECT_TRUE(Eventually([&] { return closer_.waiting() == 0; }));
}

TEST_F(BrokerLimitsTest, WhoseDescriptorsCannotBeClosedGetsNoMoreConnections) {
  BrokerOptions options;
  options.max_unclosed_per_uid = 8;
  StartWithPlanner(options);
  Hanging hanging = MakeHanging();
  closer_.Close(::getuid(), std::move(hanging.fd));
  TestClient client = Connect();
  const UniqueFd file = SomeFile();
  abi::Upload upload{};
  std::string text;
  for (uint32_t i = 1; i < 20 && !text.starts_with("RESOURCE_EXHAUSTED"); ++i) {
    client.Send(MakeFrame(abi::FrameType::kUpload, upload, {}, i, 1), {&file});
    const auto answer = client.Receive();
    ASSERT_TRUE(answer.has_value());
    text = answer->ErrorText();
  }
  EXPECT_THAT(text, HasSubstr("cannot be closed"));
  EXPECT_FALSE(client.Receive().has_value());
  TestClient refused = ConnectSilently();
  EXPECT_THAT(refused.Receive()->ErrorText(), HasSubstr("cannot be closed"));
  hanging.peer.Reset();
  EXPECT_TRUE(Eventually([&] { return closer_.waiting() == 0; }));
  Connect();
}

TEST_F(BrokerLimitsTest, AnUploadWithoutATicketIsRefusedAndItsDescriptorsClosed) {
  StartWithPlanner();
  TestClient client = ConnectAndAcquire();
  const UniqueFd file = SomeFile();
  const size_t before = OpenFds();
  abi::Upload upload{};
  upload.last = 1;
  for (uint32_t i = 3; i < 13; ++i) {
    client.Send(MakeFrame(abi::FrameType::kUpload, upload, {}, i, 2), {&file, &file});
    const auto answer = client.Receive();
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->header.request_id, i);
    EXPECT_THAT(answer->ErrorText(), StartsWith("PERMISSION_DENIED"));
  }
  EXPECT_TRUE(Eventually([&] { return OpenFds() <= before; }));
  client.Send(AcquireBytes({LabelRef("planner")}, 4));  // The connection goes on.
  EXPECT_EQ(client.Receive()->type(), abi::FrameType::kGranted);
}

TEST_F(BrokerLimitsTest, AnotherProtocolVersionIsToldBothRanges) {
  StartWithPlanner();
  TestClient client = ConnectSilently();
  client.Send(HelloBytes(50, 60));
  const auto answer = client.Receive();
  ASSERT_TRUE(answer.has_value());
  EXPECT_THAT(answer->ErrorText(), StartsWith("FAILED_PRECONDITION"));
  EXPECT_THAT(answer->ErrorText(), HasSubstr("50 to 60"));
  EXPECT_FALSE(client.Receive().has_value());
}

TEST_F(BrokerLimitsTest, WhoMayNotReadIsToldSo) {
  if (::getuid() != 0) GTEST_SKIP() << "needs a second uid";
  StartWithPlanner();
  std::filesystem::permissions(dir_, std::filesystem::perms(0711));
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(1);
    const auto socket = ConnectSeqpacket(socket_path_);
    if (!socket.ok()) ::_exit(2);
    (void)SendFrame(*socket, HelloBytes(), {}, {});
    Bytes buffer(abi::kMaxFrameBytes);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto frame = ReceiveFrame(*socket, buffer, ReceiveWait::kUntilDeadline, deadline);
    if (!frame.ok() || frame->header.type != static_cast<uint16_t>(abi::FrameType::kError)) {
      ::_exit(3);
    }
    abi::Error error{};
    std::memcpy(&error, buffer.data(), sizeof(error));
    const auto end = ReceiveFrame(*socket, buffer, ReceiveWait::kUntilDeadline, deadline);
    ::_exit(error.code == static_cast<uint32_t>(Code::kPermissionDenied) && !end.ok() ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(Stats().refused_access, 1U);
  EXPECT_EQ(Stats().accepted, 0U);
}

// What a client of another uid is told about `model`: 0 for a grant, else the code of the error.
int AskAsStranger(const std::string& socket_path, const std::string& model) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(101);
    const auto socket = ConnectSeqpacket(socket_path);
    if (!socket.ok()) ::_exit(102);
    (void)SendFrame(*socket, HelloBytes(), {}, {});
    (void)SendFrame(*socket, AcquireBytes({LabelRef(model)}, 2, 0), {}, {});
    Bytes buffer(abi::kMaxFrameBytes);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const auto wanted : {abi::FrameType::kHelloReply, abi::FrameType::kGranted}) {
      const auto frame = ReceiveFrame(*socket, buffer, ReceiveWait::kUntilDeadline, deadline);
      if (!frame.ok()) ::_exit(103);
      if (frame->header.type == static_cast<uint16_t>(wanted)) continue;
      abi::Error error{};
      std::memcpy(&error, buffer.data(), sizeof(error));
      ::_exit(wanted == abi::FrameType::kHelloReply ? 104 : static_cast<int>(error.code));
    }
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WEXITSTATUS(status);
}

TEST_F(BrokerLimitsTest, WhoMayReadOneModelAloneMayConnectAndReadsThatOne) {
  if (::getuid() != 0) GTEST_SKIP() << "needs a second uid";
  model_policies_["planner"].read_groups = {"65534"};
  AddVersion("detector", 1, {{"model.safetensors", Safetensors("w", "one")}});
  SetLabel("detector", "stable", 1, 1);
  StartWithPlanner();
  std::filesystem::permissions(dir_, std::filesystem::perms(0711));
  TestClient own = Connect();
  own.Send(AcquireBytes({LabelRef("planner"), LabelRef("detector")}));
  EXPECT_EQ(own.Receive()->type(), abi::FrameType::kGranted);
  EXPECT_EQ(AskAsStranger(socket_path_, "planner"), 0);
  EXPECT_EQ(AskAsStranger(socket_path_, "detector"), static_cast<int>(Code::kPermissionDenied));
}

TEST_F(BrokerLimitsTest, WhoSaysNothingIsClosedInTime) {
  BrokerOptions options;
  options.hello_timeout = absl::Milliseconds(200);
  StartWithPlanner(options);
  TestClient good = ConnectAndAcquire();
  std::vector<TestClient> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(ConnectSilently());
  // Others are served meanwhile.
  good.Send(AcquireBytes({LabelRef("planner")}, 2));
  EXPECT_EQ(good.Receive()->type(), abi::FrameType::kGranted);
  for (TestClient& client : silent) EXPECT_FALSE(client.Receive().has_value());
  EXPECT_EQ(Stats().hello_timeouts, 100U);
  good.Send(AcquireBytes({LabelRef("planner")}, 3));
  EXPECT_EQ(good.Receive()->type(), abi::FrameType::kGranted);
}

TEST_F(BrokerLimitsTest, ConnectionsOfOneUserAreLimited) {
  BrokerOptions options;
  options.max_connections_per_uid = 2;
  StartWithPlanner(options);
  TestClient first = Connect();
  const TestClient second = Connect();
  TestClient third = ConnectSilently();
  third.Send(HelloBytes());
  EXPECT_THAT(third.Receive()->ErrorText(), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_FALSE(third.Receive().has_value());
  EXPECT_EQ(Stats().refused_full, 1U);
  first.Close();
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 1; }));
  Connect();
}

TEST_F(BrokerLimitsTest, TheLastPlacesAreForUsersWithFewConnections) {
  BrokerOptions options;
  options.max_connections = 4;
  options.reserved_connections = 2;
  options.few_connections = 2;
  StartWithPlanner(options);
  std::vector<TestClient> connected;
  for (int i = 0; i < 2; ++i) connected.push_back(Connect());
  TestClient third = ConnectSilently();  // Two places are left, and not for this user.
  EXPECT_THAT(third.Receive()->ErrorText(), StartsWith("RESOURCE_EXHAUSTED"));
  EXPECT_EQ(Stats().refused_full, 1U);
}

TEST_F(BrokerLimitsTest, AUserWithFewConnectionsGetsOneOfTheLastPlaces) {
  BrokerOptions options;
  options.max_connections = 4;
  options.reserved_connections = 2;
  options.few_connections = 4;
  StartWithPlanner(options);
  std::vector<TestClient> connected;
  for (int i = 0; i < 4; ++i) connected.push_back(Connect());
  TestClient fifth = ConnectSilently();
  EXPECT_THAT(fifth.Receive()->ErrorText(), StartsWith("RESOURCE_EXHAUSTED"));
}

TEST_F(BrokerLimitsTest, DescriptorsInFlightOfAllUsersAreLimited) {
  BrokerOptions options;
  options.max_in_flight_fds = 64;  // One user may have 64 of them: less would fit no frame.
  options.send_timeout = absl::Milliseconds(300);
  StartWithPlanner(options);
  ConnectAndAcquire().Close();
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 0; }));
  TestClient hog = Connect();
  for (uint32_t i = 0; i < 32; ++i) hog.Send(AcquireBytes({LabelRef("planner")}, i + 1));
  ASSERT_TRUE(Eventually([&] { return manager_->Leases().size() == 32; }));
  TestClient other = ConnectSilently();
  other.Send(HelloBytes());
  EXPECT_EQ(other.Receive()->type(), abi::FrameType::kHelloReply);
  EXPECT_GE(Stats().slow, 1U);
}

TEST_F(BrokerLimitsTest, OutOfDescriptorsDelaysAcceptingAndNoMore) {
  std::atomic<int> told = 0;
  BrokerOptions options;
  options.on_accept_pause = [&](const absl::Status& why) {
    EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
    ++told;
  };
  StartWithPlanner(options);
  ConnectAndAcquire().Close();
  const UniqueFd probe(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  TestClient client = [&] {
    // The daemon's thread is kept busy until the limit is low: connecting takes a descriptor of the
    // client's, accepting one of the daemon's.
    std::optional<TestClient> made;
    OnLoop([&] {
      made.emplace(ConnectSilently());
      rlimit none = limit;
      none.rlim_cur = 0;
      ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    });
    return *std::move(made);
  }();
  client.Send(HelloBytes());
  EXPECT_TRUE(Eventually([&] { return broker_->stats().accept_pauses >= 1; }));
  EXPECT_GE(told, 1);
  EXPECT_FALSE(client.ReceiveNow().has_value());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto reply = client.Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->type(), abi::FrameType::kHelloReply);
}

TEST_F(BrokerLimitsTest, DescriptorsInFlightOfOneUserAreLimited) {
  BrokerOptions options;
  options.max_in_flight_fds_per_uid = 64;
  StartWithPlanner(options);
  ConnectAndAcquire().Close();
  TestClient client = Connect();
  // Each grant carries two descriptors; 32 of them fill the limit, and reading makes room.
  for (uint32_t i = 0; i < 100; ++i) client.Send(AcquireBytes({LabelRef("planner")}, i + 1));
  ASSERT_TRUE(Eventually([&] { return manager_->Leases().size() >= 33; }));
  for (int turn = 0; turn < 100; ++turn) ASSERT_EQ(Leases(), 33U);  // It does not go on.
  uint32_t waiting = 0;
  std::vector<UniqueFd> kept;
  for (; waiting < 100; ++waiting) {
    auto frame = client.Receive();
    ASSERT_TRUE(frame.has_value());
    ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
    ASSERT_EQ(frame->header.request_id, waiting + 1);
  }
  EXPECT_EQ(Stats().slow, 0U);
}

TEST_F(BrokerLimitsTest, WhoHoldsUpOthersByNotReadingIsClosed) {
  BrokerOptions options;
  options.max_in_flight_fds_per_uid = 64;
  options.send_timeout = absl::Milliseconds(300);
  StartWithPlanner(options);
  ConnectAndAcquire().Close();
  ASSERT_TRUE(Eventually([&] { return broker_->connections() == 0; }));
  TestClient hog = Connect();
  for (uint32_t i = 0; i < 32; ++i) hog.Send(AcquireBytes({LabelRef("planner")}, i + 1));
  ASSERT_TRUE(Eventually([&] { return manager_->Leases().size() == 32; }));
  TestClient other = ConnectSilently();
  other.Send(HelloBytes());  // Even the page is a descriptor in flight.
  const auto reply = other.Receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->type(), abi::FrameType::kHelloReply);
  other.Send(AcquireBytes({LabelRef("planner")}));
  EXPECT_EQ(other.Receive()->type(), abi::FrameType::kGranted);
  EXPECT_GE(Stats().slow, 1U);
  EXPECT_EQ(Leases(), 1U);
}

}  // namespace
}  // namespace modelhost
