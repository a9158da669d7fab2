// The whole of control.sock on real parts: a real listener, gRPC over it, the real manager, a real
// store in a temporary directory. What a test waits for is an event with a deadline, never a time.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/platform/unix_listener.h"
#include "daemon/service/control_server.h"
#include "tests/fakes/fixed_machine.h"
#include "tests/fakes/hand_index.h"
#include "tests/fakes/model_files.h"

namespace modelhost {

class NoPage : public LabelPublisher {
 public:
  void Publish(std::span<const LabelChange>) override {}
  uint32_t SlotOf(const std::string&, const std::string&) override { return 3; }
};

class Refusals : public Observer {
 public:
  void OnRefused(const Peer& peer, const std::string& what, RefusedFor) override {
    seen.push_back(absl::StrCat(what, " by ", peer.uid));
  }
  std::vector<std::string> seen;  // Control thread.
};

// A configuration that says what the test tells it to.
class ScriptedConfig : public ConfigControl {
 public:
  ConfigView Effective() const override { return view; }
  void Reload(ReloadDone done) override { done(report); }
  ConfigView view;  // Control thread, both.
  absl::StatusOr<ReloadReport> report = ReloadReport{};
};

class ControlServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "control_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    std::filesystem::create_directories(base_ / "state");
    for (uint64_t version : {1, 2}) {
      WriteVersion(base_ / "store", "planner", version,
                   {{"model.safetensors",
                     SafetensorsBytes({{"w", std::vector<float>(1000, float(version))}})}});
    }
    loop_ = *EventLoop::Create(clock_);
    store_ = *Store::Open(os_, base_ / "store", base_ / "state", ::geteuid());
    state_dir_ = *os_.OpenDir(base_ / "state");
    verified_ = VerifiedFiles::Load(os_, state_dir_);
    publisher_ = std::make_unique<Publisher>(*store_, verified_.get());
    LoaderOptions loader_options;
    loader_options.memlock = MemlockPolicy::kOff;
    loader_ = std::make_unique<Loader>(os_, clock_, *store_, *verified_, chunks_, regions_, host_,
                                       memlock_, indexer_, index_, machine_, loader_options);
    std::vector<std::string> unknown;
    access_ = AccessPolicy::Make({"4242"}, {"4343"}, ::geteuid(), &unknown);
    ManagerOptions options;
    options.memlock = MemlockPolicy::kOff;
    options.own_uid = ::geteuid();
    pool_ = std::make_unique<ThreadPool>("work", 3);
    manager_ = std::make_unique<ModelManager>(
        ModelManager::Deps{os_, clock_, *loop_, *pool_, *pool_, *store_, *publisher_, *loader_,
                           *verified_, host_, memlock_, page_, state_dir_, *access_, machine_},
        options, LabelFile{.epoch = 7, .labels = {}});
    for (Observer* observer :
         std::initializer_list<Observer*>{&health_, &watcher_, &workers_, &refusals_}) {
      manager_->AddObserver(observer);
    }
    ServerInfo info;
    info.version = "1.2.3";
    info.pid = ::getpid();
    info.read_groups = {"readers"};
    info.admin_groups = {"operators"};
    server_ = std::make_unique<ControlServer>(
        ControlServer::Deps{*manager_, *loop_, clock_, *access_, *publisher_, health_, watcher_,
                            config_, workers_},
        info, ControlServer::Interceptors{}, call_options_);
    ASSERT_TRUE(server_->Start().ok());
    listener_.emplace(*UnixListener::Bind(SocketPath(), SocketType::kStream, 0600));
    loop_->Watch(listener_->fd().get(), EPOLLIN, [this](uint32_t) { Accept(); });
    thread_ = std::thread([this] { loop_->Run(); });
    manager_->Start();
    stub_ = Connect();
    // The first scan is over when a rescan, which comes after it, is.
    grpc::ClientContext context;
    Deadline(context);
    v1::RescanResponse scanned;
    ASSERT_TRUE(stub_->Rescan(&context, {}, &scanned).ok());
    ASSERT_EQ(scanned.versions(), 2U);
  }

  void TearDown() override {
    if (!thread_.joinable()) return;
    server_->Shutdown(absl::ZeroDuration());
    loop_->Post([this] { manager_->Stop([this] { loop_->Quit(); }); });
    thread_.join();
    server_.reset();
    manager_.reset();
    pool_.reset();
    ASSERT_TRUE(os_.RemoveTreeAt(*os_.OpenDir(base_.parent_path()), base_.filename()).ok());
  }

  std::string SocketPath() const { return base_ / "control.sock"; }

  void Accept() {
    while (true) {
      auto socket = listener_->Accept();
      if (!socket.ok()) return;
      auto peer = PeerOf(*socket);
      ASSERT_TRUE(peer.ok()) << peer.status();
      if (pretend_.has_value()) *peer = *pretend_;
      server_->AddConnection(*socket, *peer);
    }
  }

  // Connections made from now on are taken for this peer's.
  void Pretend(uint32_t uid, std::vector<uint32_t> groups = {}) {
    RunAndWait(*loop_, [&] {
      pretend_.emplace();
      pretend_->uid = uid;
      pretend_->gid = uid;
      pretend_->groups = groups;
    });
  }

  // On a connection of its own.
  std::unique_ptr<v1::Control::Stub> Connect() { return v1::Control::NewStub(Channel()); }
  std::shared_ptr<grpc::Channel> Channel() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("unix:" + SocketPath(), grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  static void Deadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }

  struct Told {
    grpc::Status status;
    std::vector<v1::Operation> steps;
    const v1::Operation& last() const { return steps.back(); }
  };
  template <typename Reader>
  static Told Drain(Reader reader) {
    Told told;
    v1::OperationEvent event;
    while (reader->Read(&event)) told.steps.push_back(event.operation());
    told.status = reader->Finish();
    return told;
  }
  Told Load(uint64_t version, const std::string& model = "planner") {
    return LoadBy(*stub_, version, model);
  }
  static Told LoadBy(v1::Control::Stub& stub, uint64_t version,
                     const std::string& model = "planner") {
    grpc::ClientContext context;
    Deadline(context);
    v1::LoadRequest request;
    request.set_model(model);
    request.set_version(version);
    return Drain(stub.Load(&context, request));
  }
  Told Swap(uint64_t version) {
    grpc::ClientContext context;
    Deadline(context);
    v1::SwapRequest request;
    v1::SwapTarget* target = request.add_targets();
    target->set_model("planner");
    target->set_version(version);
    return Drain(stub_->Swap(&context, request));
  }
  static grpc::Status GetStatus(v1::Control::Stub& stub, v1::GetStatusResponse* response) {
    grpc::ClientContext context;
    Deadline(context);
    return stub.GetStatus(&context, {}, response);
  }
  v1::Operation Operation(const std::string& id) {
    grpc::ClientContext context;
    Deadline(context);
    v1::GetOperationRequest request;
    request.set_id(id);
    v1::Operation operation;
    EXPECT_TRUE(stub_->GetOperation(&context, request, &operation).ok());
    return operation;
  }
  // "SERVING" is 1, "NOT_SERVING" 2; by hand, since Debian has no health.proto.
  int Health(const std::string& service) {
    grpc::GenericStub stub(Channel());
    grpc::ClientContext context;
    Deadline(context);
    grpc::Slice slice(
        absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service));
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::CompletionQueue queue;
    auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    if (!status.ok()) return -static_cast<int>(status.error_code());
    grpc::Slice answer;
    EXPECT_TRUE(response.DumpToSingleSlice(&answer).ok());
    return answer.size() == 2 ? answer.begin()[1] : 0;
  }
  std::vector<std::string> Incoming() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(base_ / "store/incoming")) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  CallGuard::Options call_options_;  // Before SetUp.
  std::filesystem::path base_;
  LinuxOs os_;
  SystemClock clock_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Store> store_;
  UniqueFd state_dir_;
  std::unique_ptr<VerifiedFiles> verified_;
  std::unique_ptr<Publisher> publisher_;
  BudgetPool host_{"host", uint64_t{1} << 30};
  BudgetPool memlock_{"memlock", UINT64_MAX};
  RegionCache regions_;
  InProcessIndexer indexer_;
  HandIndexBuilder index_;
  FixedMachine machine_;
  NoPage page_;
  ThreadPool chunks_{"chunks", 2};
  std::unique_ptr<Loader> loader_;
  std::optional<AccessPolicy> access_;
  std::unique_ptr<ThreadPool> pool_;
  HealthReporter health_;
  ModelWatcher watcher_;
  WorkerSessions workers_;
  ScriptedConfig config_;
  Refusals refusals_;
  std::unique_ptr<ModelManager> manager_;
  std::unique_ptr<ControlServer> server_;
  std::optional<UnixListener> listener_;
  std::optional<Peer> pretend_;  // Control thread.
  std::thread thread_;
  std::unique_ptr<v1::Control::Stub> stub_;
};

}  // namespace modelhost
