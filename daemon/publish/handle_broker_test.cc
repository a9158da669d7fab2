// The native path from end to end: a real manager behind it, raw frames in front of it.
#include "daemon/publish/handle_broker.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/publish/broker_fixture.h"
#include "proto/abi/version_index.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using ::testing::StartsWith;

using HandleBrokerTest = BrokerFixture;

TEST_F(HandleBrokerTest, HelloGivesThePageAndAcquireTheBytes) {
  StartWithPlanner();
  TestClient client = ConnectSilently();
  client.Send(HelloBytes(0, 9));
  const auto hello = client.Receive();
  ASSERT_TRUE(hello.has_value());
  const auto reply = hello->As<abi::HelloReply>();
  EXPECT_EQ(reply.abi, abi::kFrameAbi);
  EXPECT_EQ(reply.epoch, 77U);
  ASSERT_EQ(hello->fds.size(), 1U);
  const auto page = ReadOnlyMapping::MapOneWriter(hello->fds[0], reply.page_bytes);
  ASSERT_TRUE(page.ok()) << page.error().text;

  client.Send(AcquireBytes({LabelRef("planner")}, 5));
  const auto frame = client.Receive();
  ASSERT_TRUE(frame.has_value());
  ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
  const auto granted = frame->As<abi::Granted>();
  EXPECT_EQ(granted.header.request_id, 5U);
  EXPECT_EQ(granted.version, 7U);
  EXPECT_EQ(granted.generation, 12U);
  EXPECT_STREQ(granted.model, "planner");
  EXPECT_STREQ(granted.label, "stable");
  EXPECT_EQ(granted.regions, 1U);  // config.json is fetched when asked for.
  ASSERT_EQ(frame->fds.size(), 2U);

  const auto& header = *reinterpret_cast<const abi::CatalogueHeader*>(page->bytes().data());
  ASSERT_LT(granted.slot, header.slot_count.load());
  const auto* slots =
      reinterpret_cast<const abi::CatalogueSlot*>(page->bytes().data() + header.header_bytes);
  EXPECT_EQ(slots[granted.slot].generation.load(), 12U);
  EXPECT_EQ(slots[granted.slot].version.load(), 7U);

  const auto index = ReadOnlyMapping::MapSealed(frame->fds[0], granted.index_bytes);
  ASSERT_TRUE(index.ok()) << index.error().text;
  const auto& index_header = *reinterpret_cast<const abi::IndexHeader*>(index->bytes().data());
  ASSERT_TRUE(abi::IndexFits(index_header, granted.index_bytes));
  const auto& tensor = *reinterpret_cast<const abi::TensorEntry*>(index->bytes().data() +
                                                                  index_header.tensors.offset);
  const abi::RegionRef region = frame->Refs<abi::Granted>().at(0);
  EXPECT_EQ(region.region, tensor.region);
  const auto bytes = ReadOnlyMapping::MapFile(frame->fds[1], region.bytes);
  ASSERT_TRUE(bytes.ok()) << bytes.error().text;
  EXPECT_EQ(
      std::string_view(reinterpret_cast<const char*>(bytes->bytes().data()) + tensor.region_offset,
                       tensor.nbytes),
      "seven");
}

TEST_F(HandleBrokerTest, ThreeHundredRegionsComeInSeveralFrames) {
  std::map<std::string, std::string> files;
  for (int i = 0; i < 300; ++i) {
    files[absl::StrCat("part", i, ".safetensors")] =
        Safetensors(absl::StrCat("w", i), absl::StrCat("values of ", i));
  }
  AddVersion("large", 1, files);
  SetLabel("large", "stable", 1, 1);
  StartDaemon();
  TestClient client = Connect();
  client.Send(AcquireBytes({LabelRef("large")}));
  auto frame = client.Receive();
  ASSERT_TRUE(frame.has_value());
  ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
  const auto granted = frame->As<abi::Granted>();
  EXPECT_EQ(granted.regions, 300U);
  EXPECT_EQ(frame->fds.size(), 64U);
  std::vector<abi::RegionRef> refs = frame->Refs<abi::Granted>();
  EXPECT_EQ(refs.size(), 63U);
  std::vector<UniqueFd> fds = std::move(frame->fds);
  fds.erase(fds.begin());
  while (refs.size() < granted.regions) {
    frame = client.Receive();
    ASSERT_TRUE(frame.has_value());
    ASSERT_EQ(frame->type(), abi::FrameType::kRegionFds);
    const auto more = frame->As<abi::RegionFds>();
    EXPECT_EQ(more.lease_id, granted.lease_id);
    ASSERT_EQ(more.count, frame->fds.size());
    ASSERT_GT(more.count, 0U);
    for (const abi::RegionRef& ref : frame->Refs<abi::RegionFds>()) refs.push_back(ref);
    std::move(frame->fds.begin(), frame->fds.end(), std::back_inserter(fds));
  }
  ASSERT_EQ(refs.size(), 300U);
  std::set<uint32_t> numbers;
  for (size_t i = 0; i < refs.size(); ++i) {
    numbers.insert(refs[i].region);
    struct stat info {};
    ASSERT_EQ(::fstat(fds[i].get(), &info), 0);
    EXPECT_EQ(static_cast<uint64_t>(info.st_size), refs[i].bytes);
  }
  EXPECT_EQ(numbers.size(), 300U);
  EXPECT_FALSE(client.ReceiveNow().has_value());
}

Bytes DeviceAcquireBytes(uint32_t flags) {
  Bytes frame = AcquireBytes({LabelRef("planner")}, 1, flags | abi::kAcquireWait);
  abi::DeviceWant want{};
  const std::string gpu = "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca427";
  gpu.copy(want.gpu, sizeof(want.gpu) - 1);
  frame.insert(frame.end(), AsBytes(want).begin(), AsBytes(want).end());
  const auto size = static_cast<uint32_t>(frame.size());
  std::memcpy(frame.data() + offsetof(abi::FrameHeader, bytes), &size, sizeof(size));
  return frame;
}

TEST_F(HandleBrokerTest, WhoWantsDeviceMemoryIfThereIsAnyIsToldThatThereIsNone) {
  StartWithPlanner();
  TestClient client = Connect();
  client.Send(DeviceAcquireBytes(abi::kAcquireDeviceIfAny));
  const auto granted = client.Receive();
  ASSERT_TRUE(granted.has_value());
  ASSERT_EQ(granted->type(), abi::FrameType::kGranted) << granted->ErrorText();
  EXPECT_EQ(granted->As<abi::Granted>().device, 1U);
  const auto device = client.Receive();
  ASSERT_TRUE(device.has_value());
  ASSERT_EQ(device->type(), abi::FrameType::kDeviceFds);
  EXPECT_EQ(device->As<abi::DeviceFds>().lease_id, granted->As<abi::Granted>().lease_id);
  EXPECT_EQ(device->As<abi::DeviceFds>().mode, static_cast<uint32_t>(abi::DeviceMode::kNone));
  EXPECT_EQ(device->As<abi::DeviceFds>().total, 0U);
}

TEST_F(HandleBrokerTest, AClientOfAnOlderProtocolCannotAskForDeviceMemory) {
  StartWithPlanner();
  TestClient client = ConnectSilently();
  client.Send(HelloBytes(1, abi::kFrameAbiDevice - 1));
  const auto hello = client.Receive();
  ASSERT_TRUE(hello.has_value());
  EXPECT_EQ(hello->As<abi::HelloReply>().abi, abi::kFrameAbiDevice - 1);
  client.Send(DeviceAcquireBytes(abi::kAcquireDevice));
  const auto refused = client.Receive();
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->ErrorText(), StartsWith("INVALID_ARGUMENT: malformed session"));
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_EQ(Stats().violations, 1U);
}

TEST_F(HandleBrokerTest, ASetIsGrantedWholeOrNotAtAll) {
  AddVersion("detector", 3, {{"model.safetensors", Safetensors("d", "det")}});
  SetLabel("detector", "stable", 3, 4);
  StartWithPlanner();
  TestClient client = Connect();
  client.Send(AcquireBytes({LabelRef("planner"), LabelRef("detector")}, 1));
  for (uint32_t i = 0; i < 2; ++i) {
    const auto frame = client.Receive();
    ASSERT_TRUE(frame.has_value());
    const auto granted = frame->As<abi::Granted>();
    EXPECT_EQ(granted.number, i);
    EXPECT_EQ(granted.count, 2U);
    EXPECT_STREQ(granted.model, i == 0 ? "planner" : "detector");
  }
  EXPECT_EQ(Leases(), 2U);
  client.Send(AcquireBytes({LabelRef("planner"), LabelRef("detecter")}, 2, /*flags=*/0));
  const auto refused = client.Receive();
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->header.request_id, 2U);
  EXPECT_THAT(refused->ErrorText(), StartsWith("NOT_FOUND"));
  EXPECT_EQ(Leases(), 2U);
}

TEST_F(HandleBrokerTest, ALeaseEndsWhenReleasedOrWithItsConnection) {
  StartWithPlanner();
  uint64_t lease = 0;
  TestClient client = ConnectAndAcquire(&lease);
  TestClient other = ConnectAndAcquire();
  EXPECT_EQ(Leases(), 2U);
  abi::Release release{};
  release.lease_id = lease;
  other.Send(MakeFrame(abi::FrameType::kRelease, release));  // Not its own: nothing happens.
  client.Send(MakeFrame(abi::FrameType::kRelease, release));
  EXPECT_TRUE(Eventually([&] { return manager_->Leases().size() == 1; }));
  EXPECT_NE(OnLoop([&] { return manager_->Leases()[0].id; }), lease);
  other.Close();
  EXPECT_TRUE(Eventually([&] { return manager_->Leases().empty(); }));
  EXPECT_TRUE(Eventually([&] { return manager_->Sessions().size() == 1; }));
}

TEST_F(HandleBrokerTest, ALeaseEndsWithItsKilledProcess) {
  StartWithPlanner();
  ConnectAndAcquire().Close();  // The version is READY from here on.
  std::array<int, 2> pipe_fds{};
  ASSERT_EQ(::pipe2(pipe_fds.data(), O_CLOEXEC), 0);
  const UniqueFd told(pipe_fds[0]);
  const UniqueFd teller(pipe_fds[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    // Only what needs no lock that another thread of the parent may have held.
    const auto socket = ConnectSeqpacket(socket_path_);
    if (!socket.ok()) ::_exit(1);
    Bytes buffer(abi::kMaxFrameBytes);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const Bytes& request : {HelloBytes(), AcquireBytes({LabelRef("planner")})}) {
      if (!SendFrame(*socket, request, {}, {}).ok() ||
          !ReceiveFrame(*socket, buffer, ReceiveWait::kUntilDeadline, deadline).ok()) {
        ::_exit(2);
      }
    }
    if (::write(teller.get(), "x", 1) != 1) ::_exit(3);
    while (true) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(told.get(), &byte, 1), 1);
  EXPECT_TRUE(Eventually([&] {
    const auto sessions = manager_->Sessions();
    return manager_->Leases().size() == 1 && sessions.size() == 1 && sessions[0].peer.pid == child;
  }));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(Eventually([&] { return manager_->Leases().empty(); }));
}

TEST_F(HandleBrokerTest, FilesAreFetchedThroughADescriptorOfTheirOwn) {
  StartWithPlanner();
  uint64_t lease = 0;
  TestClient client = ConnectAndAcquire(&lease);
  abi::Fetch fetch{};
  fetch.lease_id = lease;
  const auto version =
      OnLoop([&] { return *manager_->Leased(manager_->Leases()[0].session, lease); });
  ASSERT_EQ(version->manifest->files[0].path, "config.json");
  fetch.region = version->file_regions[0];
  std::vector<UniqueFd> fds;
  for (int i = 0; i < 2; ++i) {
    client.Send(MakeFrame(abi::FrameType::kFetch, fetch));
    auto frame = client.Receive();
    ASSERT_TRUE(frame.has_value());
    ASSERT_EQ(frame->type(), abi::FrameType::kRegionFds) << frame->ErrorText();
    ASSERT_EQ(frame->fds.size(), 1U);
    fds.push_back(std::move(frame->fds[0]));
  }
  char buffer[16] = {};
  EXPECT_EQ(::read(fds[0].get(), buffer, sizeof(buffer)), 8);
  EXPECT_STREQ(buffer, "{\"n\": 7}");
  EXPECT_EQ(::lseek(fds[1].get(), 0, SEEK_CUR), 0);
  EXPECT_EQ(::fcntl(fds[0].get(), F_GETFL) & O_ACCMODE, O_RDONLY);

  fetch.region = 999;
  client.Send(MakeFrame(abi::FrameType::kFetch, fetch));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
  TestClient thief = Connect();
  fetch.region = 0;
  thief.Send(MakeFrame(abi::FrameType::kFetch, fetch));
  EXPECT_THAT(thief.Receive()->ErrorText(), StartsWith("NOT_FOUND"));
}

TEST_F(HandleBrokerTest, ARedeclaredLeaseComesWithoutDescriptors) {
  StartWithPlanner();
  TestClient client = Connect();
  client.Send(
      AcquireBytes({VersionRef("planner", 7)}, 1, abi::kAcquireWait | abi::kAcquireRedeclare));
  const auto frame = client.Receive();
  ASSERT_TRUE(frame.has_value());
  ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
  EXPECT_TRUE(frame->fds.empty());
  EXPECT_EQ(frame->As<abi::Granted>().regions, 0U);
  EXPECT_EQ(frame->As<abi::Granted>().slot, abi::kNoSlot);
  EXPECT_EQ(Leases(), 1U);
}

TEST_F(HandleBrokerTest, ARedeclaredLeaseKeepsTheLabelThatItWasAskedForUnder) {
  StartWithPlanner();
  TestClient client = Connect();
  abi::Ref declared = VersionRef("planner", 7);
  std::memcpy(declared.label, "stable", 6);
  client.Send(AcquireBytes({declared}, 1, abi::kAcquireWait | abi::kAcquireRedeclare));
  ASSERT_EQ(client.Receive()->type(), abi::FrameType::kGranted);
  const auto leases = OnLoop([&] { return manager_->Leases(); });
  ASSERT_EQ(leases.size(), 1U);
  EXPECT_EQ(leases[0].label, "stable");
  // Only there: who asks for bytes says either.
  client.Send(AcquireBytes({declared}, 2));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("INVALID_ARGUMENT"));
}

// The client has the bytes and asks whether they are still a version: there is nothing to wait for.
TEST_F(HandleBrokerTest, ARedeclaredVersionThatIsGoneIsNotWaitedFor) {
  StartWithPlanner();
  TestClient client = ConnectAndAcquire();  // The store has been read.
  client.Send(AcquireBytes({VersionRef("planner", 99)}, 2,
                           abi::kAcquireWait | abi::kAcquireRedeclare, 120'000));
  client.Send(AcquireBytes({VersionRef("nobody", 1)}, 3, abi::kAcquireWait | abi::kAcquireRedeclare,
                           120'000));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("NOT_FOUND"));
  EXPECT_THAT(client.Receive()->ErrorText(), StartsWith("NOT_FOUND"));
}

TEST_F(HandleBrokerTest, ASessionIsAnnouncedBeforeItsFirstLease) {
  class Recorder final : public Observer {
   public:
    void OnSession(const Session& session, bool began, const std::string& /*why*/) override {
      if (began) known_.insert(session.id);
    }
    void OnLease(const Lease& lease, LeaseChange /*change*/) override {
      if (!known_.contains(lease.session)) ++strangers_;
      ++leases_;
    }
    std::set<SessionId> known_;
    int strangers_ = 0;
    int leases_ = 0;
  };
  static Recorder recorder;  // Outlives the daemon, as observers do.
  observer_ = &recorder;
  StartWithPlanner();
  ConnectAndAcquire().Close();
  std::optional<TestClient> client;
  OnLoop([&] {  // Both requests are there when the daemon accepts.
    client.emplace(ConnectSilently());
    client->Send(HelloBytes());
    client->Send(AcquireBytes({LabelRef("planner")}));
  });
  EXPECT_EQ(client->Receive()->type(), abi::FrameType::kHelloReply);
  EXPECT_EQ(client->Receive()->type(), abi::FrameType::kGranted);
  OnLoop([&] {
    EXPECT_GE(recorder.leases_, 2);
    EXPECT_EQ(recorder.strangers_, 0);
  });
}

TEST_F(HandleBrokerTest, ManyRequestsAtOnceAreAnsweredInOrder) {
  StartWithPlanner();
  TestClient client = ConnectAndAcquire();
  // More replies than a socket holds, and no reading until all are sent: the daemon must stop
  // reading, not fail.
  constexpr uint32_t kRequests = 2000;
  uint32_t sent = 0;
  uint32_t received = 0;
  while (received < kRequests) {
    if (sent < kRequests &&
        SendFrame(client.socket(), AcquireBytes({LabelRef("planner")}, sent + 2), {}, {}).ok()) {
      ++sent;
      continue;
    }
    const auto frame = client.Receive();
    ASSERT_TRUE(frame.has_value());
    ASSERT_EQ(frame->type(), abi::FrameType::kGranted) << frame->ErrorText();
    ASSERT_EQ(frame->header.request_id, received + 2);
    ++received;
  }
  EXPECT_EQ(Leases(), kRequests + 1);
  EXPECT_EQ(Stats().slow, 0U);
}

TEST_F(HandleBrokerTest, ASubscriberHearsOfMovesAndOfTheEnd) {
  StartWithPlanner();
  uint64_t lease = 0;
  TestClient client = ConnectAndAcquire(&lease);
  TestClient deaf = ConnectAndAcquire();
  client.Send(MakeFrame(abi::FrameType::kSubscribe, abi::Subscribe{}, {}, 9));
  EXPECT_EQ(client.Receive()->type(), abi::FrameType::kAck);

  SwapRequest swap;
  swap.targets = {{"planner", 8}};
  ASSERT_TRUE(OnLoop([&] { return manager_->Swap(swap, 0); }).ok());
  const auto moved = client.Receive()->As<abi::Event>();
  EXPECT_EQ(moved.header.request_id, 0U);
  EXPECT_EQ(moved.kind, static_cast<uint32_t>(abi::EventKind::kLabelMoved));
  EXPECT_EQ(moved.version, 8U);
  EXPECT_EQ(moved.generation, 13U);
  EXPECT_EQ(moved.slot, OnLoop([&] { return catalogue_->SlotOf("planner", "stable"); }));

  ASSERT_TRUE(OnLoop([&] {
                return manager_->Unload({"planner", 7}, absl::Hours(1), false, 0);
              }).ok());
  const auto draining = client.Receive()->As<abi::Event>();
  EXPECT_EQ(draining.kind, static_cast<uint32_t>(abi::EventKind::kDraining));
  EXPECT_EQ(draining.lease_id, lease);

  OnLoop([&] { broker_->Stop(); });
  EXPECT_EQ(client.Receive()->As<abi::Event>().kind,
            static_cast<uint32_t>(abi::EventKind::kClosing));
  EXPECT_FALSE(client.Receive().has_value());
  EXPECT_FALSE(deaf.Receive().has_value());  // It did not ask for events.
  EXPECT_EQ(Leases(), 0U);
  EXPECT_EQ(OnLoop([&] { return broker_->connections(); }), 0U);
}

TEST_F(HandleBrokerTest, EventsForASlowReaderBecomeOne) {
  StartWithPlanner();
  TestClient client = Connect();
  client.Send(MakeFrame(abi::FrameType::kSubscribe, abi::Subscribe{}));
  EXPECT_EQ(client.Receive()->type(), abi::FrameType::kAck);
  constexpr uint64_t kMoves = 5000;
  const auto move = [&](uint64_t i) {
    const LabelChange change{"planner", "stable", 7, 7, 12 + i};
    broker_->OnLabelsMoved({&change, 1}, absl::ZeroDuration());
  };
  OnLoop([&] {
    for (uint64_t i = 1; i <= kMoves; ++i) move(i);
  });
  EXPECT_GT(Stats().coalesced_events, 0U);
  uint64_t moves = 0;
  while (true) {
    const auto event = client.Receive();
    ASSERT_TRUE(event.has_value());
    if (event->As<abi::Event>().kind == static_cast<uint32_t>(abi::EventKind::kLookAtPage)) break;
    ASSERT_EQ(event->As<abi::Event>().generation, 12 + ++moves);
  }
  EXPECT_EQ(moves + Stats().coalesced_events, kMoves);
  // It has caught up: the next one comes by itself.
  OnLoop([&] { move(kMoves + 1); });
  EXPECT_EQ(client.Receive()->As<abi::Event>().generation, 12 + kMoves + 1);
  EXPECT_EQ(Stats().slow, 0U);
}

TEST_F(HandleBrokerTest, AnUploadWithItsTicketBecomesAVersion) {
  StartWithPlanner();
  TestClient client = Connect();
  const std::string bytes = Safetensors("w", "nine");
  const UniqueFd file(::memfd_create("source", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  PublishRequest request;
  request.model = "planner";
  request.version = 9;
  request.files = {{"model.safetensors", bytes.size()}};
  const auto ticket = OnLoop(
      [&] { return manager_->PublishFromDescriptors(request, manager_->Sessions().front().peer); });
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  abi::Upload upload{};
  std::ranges::copy(ticket->ticket, upload.ticket);
  upload.last = 1;
  client.Send(MakeFrame(abi::FrameType::kUpload, upload, {}, 3, 1), {&file});
  const auto answer = client.Receive();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->type(), abi::FrameType::kAck) << answer->ErrorText();
  EXPECT_TRUE(Eventually([&] {
    const auto operation = manager_->GetOperation(ticket->operation);
    return operation.ok() && operation->state == OperationState::kSucceeded;
  }));
}

}  // namespace
}  // namespace modelhost
