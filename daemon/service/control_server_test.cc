#include "daemon/service/control_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/service/control_server_test_fixture.h"
#include "modelhost/v1/error_info.pb.h"

namespace modelhost {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST_F(ControlServerTest, StatusTellsOfTheDaemon) {
  v1::GetStatusResponse status;
  ASSERT_TRUE(GetStatus(*stub_, &status).ok());
  EXPECT_EQ(status.version(), "1.2.3");
  EXPECT_EQ(status.pid(), ::getpid());
  EXPECT_EQ(status.epoch(), 7U);
  EXPECT_EQ(status.models(), 1U);
  EXPECT_EQ(status.device_mode(), "host_only");
  EXPECT_THAT(status.pools(), SizeIs(2));
}

TEST_F(ControlServerTest, ALoadIsToldStepByStepAndDescribedAfterwards) {
  const Told load = Load(1);
  ASSERT_TRUE(load.status.ok()) << load.status.error_message();
  EXPECT_THAT(load.steps.front().id(), HasSubstr("op-"));
  EXPECT_EQ(load.last().state(), v1::SUCCEEDED);
  EXPECT_EQ(load.last().kind(), v1::LOAD);
  EXPECT_EQ(load.last().requested_by_uid(), ::geteuid());

  grpc::ClientContext context;
  Deadline(context);
  v1::GetVersionRequest request;
  request.set_model("planner");
  request.set_version(1);
  v1::Version version;
  ASSERT_TRUE(stub_->GetVersion(&context, request, &version).ok());
  EXPECT_EQ(version.phase(), v1::READY);
  EXPECT_EQ(version.format(), "safetensors");
  EXPECT_EQ(version.tensor_count(), 1U);
  ASSERT_THAT(version.files(), SizeIs(1));
  EXPECT_EQ(version.files(0).path(), "model.safetensors");
  ASSERT_THAT(version.regions(), SizeIs(1));
  EXPECT_GT(version.regions(0).resident_bytes(), 0U);
  EXPECT_GT(version.last_load().phases_size(), 0);
  EXPECT_GT(version.events_size(), 0);
}

TEST_F(ControlServerTest, ASwapMovesTheLabelAndHealthFollows) {
  EXPECT_EQ(Health("model/planner"), 2);
  const Told swap = Swap(1);
  ASSERT_TRUE(swap.status.ok()) << swap.status.error_message();
  ASSERT_EQ(swap.last().state(), v1::SUCCEEDED) << swap.last().failure().message();
  ASSERT_THAT(swap.last().result().changes(), SizeIs(1));
  EXPECT_EQ(swap.last().result().changes(0).to(), 1U);
  EXPECT_EQ(Health("model/planner"), 1);
  EXPECT_EQ(Health("modelhost.liveness"), 1);
  EXPECT_EQ(Health(""), 1);
  EXPECT_EQ(Health("model/none"), -5);  // NOT_FOUND

  EXPECT_TRUE(Swap(1).last().result().unchanged());
}

TEST_F(ControlServerTest, ErrorsSayWhatTheyAreAbout) {
  const Told load = Load(9);
  EXPECT_EQ(load.status.error_code(), grpc::StatusCode::NOT_FOUND);
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(load.status.error_details()));
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(details.details(0).value()));
  EXPECT_EQ(info.domain(), "modelhost");
  EXPECT_EQ(info.metadata().at("model"), "planner");
  EXPECT_EQ(info.metadata().at("version"), "9");
  EXPECT_EQ(info.metadata().at("verb"), "Load");
}

TEST_F(ControlServerTest, MalformedRequestsAreRefused) {
  EXPECT_EQ(Load(0).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load(1, "../x").status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Load(1, std::string(100'000, 'a')).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  grpc::ClientContext context;
  Deadline(context);
  EXPECT_EQ(Drain(stub_->Swap(&context, {})).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ControlServerTest, AReaderMayLookButNotCommand) {
  Pretend(12345, {4242});
  const auto reader = Connect();
  v1::GetStatusResponse status;
  EXPECT_TRUE(GetStatus(*reader, &status).ok());

  const Told load = LoadBy(*reader, 1);
  EXPECT_EQ(load.status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  for (const char* part : {"Load", "12345", "operators"}) {
    EXPECT_THAT(load.status.error_message(), HasSubstr(part));
  }
  EXPECT_THAT(RunAndWait(*loop_, [&] { return refusals_.seen; }), Contains("Load by 12345"));
}

TEST_F(ControlServerTest, AnOperatorOfTheGroupMayCommand) {
  Pretend(12345, {4343});
  EXPECT_TRUE(LoadBy(*Connect(), 1).status.ok());
}

TEST_F(ControlServerTest, AStrangerMayDoNothingAndIsToldWhy) {
  Pretend(12345);
  v1::GetStatusResponse status;
  const grpc::Status refused = GetStatus(*Connect(), &status);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("readers or operators"));
  // Others are who they are: credentials belong to the connection.
  EXPECT_TRUE(GetStatus(*stub_, &status).ok());
}

TEST_F(ControlServerTest, EveryConnectionKeepsItsOwnCredentials) {
  for (int i = 0; i < 40; ++i) {
    Pretend(12345, {4242});
    EXPECT_EQ(LoadBy(*Connect(), 1).status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    Pretend(::geteuid());
    EXPECT_TRUE(LoadBy(*Connect(), 1).status.ok());
  }
}

TEST_F(ControlServerTest, ALostStreamDoesNotCancelTheOperation) {
  // A publish whose descriptors never come: it runs until somebody ends it.
  grpc::ClientContext publish_context;
  Deadline(publish_context);
  v1::PublishResponse ticket;
  auto writer = stub_->Publish(&publish_context, &ticket);
  v1::PublishRequest request;
  request.mutable_begin()->set_model("planner");
  request.mutable_begin()->set_version(3);
  request.mutable_begin()->set_descriptors_follow(true);
  v1::PublishFile* file = request.mutable_begin()->add_files();
  file->set_path("model.safetensors");
  file->set_bytes(10);
  writer->Write(request);
  writer->WritesDone();
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_THAT(ticket.ticket(), SizeIs(16));

  v1::GetOperationRequest watched;
  watched.set_id(ticket.operation_id());
  grpc::ClientContext lost;
  Deadline(lost);
  auto reader = stub_->WatchOperation(&lost, watched);
  v1::OperationEvent event;
  ASSERT_TRUE(reader->Read(&event));
  lost.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(Operation(ticket.operation_id()).state(), v1::RUNNING);

  // A second watcher sees it being cancelled by somebody else.
  grpc::ClientContext second;
  Deadline(second);
  auto again = stub_->WatchOperation(&second, watched);
  ASSERT_TRUE(again->Read(&event));
  grpc::ClientContext cancel;
  Deadline(cancel);
  v1::Operation operation;
  ASSERT_TRUE(stub_->CancelOperation(&cancel, watched, &operation).ok());
  const Told rest = Drain(std::move(again));
  EXPECT_TRUE(rest.status.ok());
  EXPECT_EQ(rest.last().state(), v1::CANCELLED);
}

TEST_F(ControlServerTest, AWatcherSeesAllModelsAndThenChanges) {
  grpc::ClientContext context;
  Deadline(context);
  auto reader = stub_->WatchModels(&context, {});
  v1::Model model;
  ASSERT_TRUE(reader->Read(&model));
  EXPECT_EQ(model.name(), "planner");
  EXPECT_THAT(model.labels(), SizeIs(0));
  ASSERT_EQ(Swap(2).last().state(), v1::SUCCEEDED);
  do {
    ASSERT_TRUE(reader->Read(&model)) << "no message with the label came";
  } while (model.labels().empty());
  EXPECT_EQ(model.labels(0).version(), 2U);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ControlServerTest, LabelsAreSetComparedAndRemoved) {
  ASSERT_TRUE(Load(1).status.ok());
  v1::SetLabelRequest request;
  request.set_model("planner");
  request.set_label("canary");
  request.set_version(1);
  request.set_if_current(2);
  v1::LabelChange change;
  {
    grpc::ClientContext context;
    Deadline(context);
    EXPECT_FALSE(stub_->SetLabel(&context, request, &change).ok());
  }
  request.set_if_current(0);
  {
    grpc::ClientContext context;
    Deadline(context);
    ASSERT_TRUE(stub_->SetLabel(&context, request, &change).ok());
    EXPECT_EQ(change.to(), 1U);
  }
  grpc::ClientContext context;
  Deadline(context);
  v1::RemoveLabelRequest remove;
  remove.set_model("planner");
  remove.set_label("canary");
  ASSERT_TRUE(stub_->RemoveLabel(&context, remove, &change).ok());
  EXPECT_EQ(change.from(), 1U);
  EXPECT_EQ(change.to(), 0U);
}

TEST_F(ControlServerTest, LeasesAreListedWithTheirHoldersAndEvicted) {
  ASSERT_TRUE(Load(1).status.ok());
  const auto grants = RunAndWait(*loop_, [&] {
    Peer peer;
    peer.uid = ::geteuid();
    peer.pid = 77;
    peer.comm = "node\xff";
    const SessionId session = manager_->BeginSession(peer, "native");
    AcquireRef ref;
    ref.model = "planner";
    ref.version = 1;
    return manager_->Acquire(session, std::span(&ref, 1));
  });
  ASSERT_TRUE(grants.ok()) << grants.status();
  v1::ListLeasesResponse leases;
  {
    grpc::ClientContext context;
    Deadline(context);
    v1::ListLeasesRequest request;
    request.set_stale_only(true);
    ASSERT_TRUE(stub_->ListLeases(&context, request, &leases).ok());
  }
  ASSERT_THAT(leases.leases(), SizeIs(1));
  EXPECT_EQ(leases.leases(0).pid(), 77);
  EXPECT_TRUE(leases.leases(0).stale());

  v1::EvictLeaseRequest evict;
  evict.set_lease(leases.leases(0).id());
  v1::Lease evicted;
  grpc::ClientContext context;
  Deadline(context);
  ASSERT_TRUE(stub_->EvictLease(&context, evict, &evicted).ok());
  EXPECT_EQ(evicted.pid(), 77);
  grpc::ClientContext list;
  Deadline(list);
  v1::ListClientsResponse clients;
  ASSERT_TRUE(stub_->ListClients(&list, {}, &clients).ok());
  ASSERT_THAT(clients.clients(), SizeIs(1));
  EXPECT_THAT(clients.clients(0).leases(), SizeIs(0));
}

// --- Limits and the end

TEST_F(ControlServerTest, GarbageOnTheSocketHurtsNobody) {
  for (const std::string& garbage : {std::string("GET / HTTP/1.0\r\n\r\n"), std::string(5000, '\0'),
                                     std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff")}) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    SocketPath().copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_GT(::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
    v1::GetStatusResponse status;
    EXPECT_TRUE(GetStatus(*stub_, &status).ok());
  }
}

TEST_F(ControlServerTest, AStrangersConnectionsAreFew) {
  Pretend(12345);
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < 9; ++i) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    SocketPath().copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    sockets.push_back(std::move(socket));
  }
  // The ninth is closed: end of file. The others have been sent gRPC's settings.
  char byte = 0;
  EXPECT_EQ(::recv(sockets[8].get(), &byte, 1, 0), 0);
  EXPECT_EQ(::recv(sockets[7].get(), &byte, 1, 0), 1);
}

TEST_F(ControlServerTest, ShutdownEndsStreamsAndSaysSo) {
  grpc::ClientContext context;
  Deadline(context);
  auto reader = stub_->WatchModels(&context, {});
  v1::Model model;
  ASSERT_TRUE(reader->Read(&model));
  server_->Shutdown(absl::Seconds(10));
  while (reader->Read(&model)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace modelhost
