#include "daemon/publish/broker_fixture.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace modelhost {
namespace {

constexpr auto kPatience = std::chrono::seconds(20);

template <typename T>
T Must(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return *std::move(value);
}

}  // namespace

Bytes HelloBytes(uint32_t abi_min, uint32_t abi_max) {
  abi::Hello hello{};
  hello.abi_min = abi_min;
  hello.abi_max = abi_max;
  return MakeFrame(abi::FrameType::kHello, hello);
}

abi::Ref LabelRef(const std::string& model, const std::string& label) {
  abi::Ref ref{};
  model.copy(ref.model, abi::kMaxNameLength);
  label.copy(ref.label, abi::kMaxNameLength);
  return ref;
}

abi::Ref VersionRef(const std::string& model, uint64_t version) {
  abi::Ref ref = LabelRef(model, "");
  ref.version = version;
  return ref;
}

Bytes AcquireBytes(const std::vector<abi::Ref>& refs, uint32_t request_id, uint32_t flags,
                   uint64_t deadline_ms) {
  abi::Acquire acquire{};
  acquire.flags = flags;
  acquire.count = static_cast<uint32_t>(refs.size());
  acquire.deadline_ms = deadline_ms;
  const auto tail = std::as_bytes(std::span(refs));
  return MakeFrame(abi::FrameType::kAcquire, acquire, Bytes(tail.begin(), tail.end()), request_id);
}

std::string Frame::ErrorText() const {
  if (type() != abi::FrameType::kError) return "";
  const auto error = As<abi::Error>();
  const auto code = static_cast<absl::StatusCode>(error.code);
  return absl::StrCat(
      absl::StatusCodeToString(code), ": ",
      absl::string_view(reinterpret_cast<const char*>(bytes.data()) + sizeof(error), error.length));
}

TestClient::TestClient(const std::string& path) {
  auto socket = ConnectSeqpacket(path);
  EXPECT_TRUE(socket.ok());
  if (socket.ok()) socket_ = *std::move(socket);
}

void TestClient::Send(const Bytes& frame, const std::vector<const UniqueFd*>& fds) {
  const auto sent = SendFrame(socket_, frame, {}, fds);
  // The daemon may have hung up on an earlier frame.
  EXPECT_TRUE(sent.ok() || sent.error().code == Code::kUnavailable) << sent.error().text;
}

std::optional<Frame> TestClient::Receive() {
  Bytes buffer(abi::kMaxFrameBytes);
  auto received = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline,
                               std::chrono::steady_clock::now() + kPatience);
  if (!received.ok()) {
    EXPECT_EQ(received.error().code, Code::kUnavailable) << received.error().text;
    return std::nullopt;
  }
  buffer.resize(received->bytes);
  return Frame{received->header, std::move(buffer), std::move(received->fds)};
}

std::optional<Frame> TestClient::ReceiveNow() {
  Bytes buffer(abi::kMaxFrameBytes);
  auto received = ReceiveFrame(socket_, buffer, ReceiveWait::kNo, {});
  if (!received.ok()) return std::nullopt;
  buffer.resize(received->bytes);
  return Frame{received->header, std::move(buffer), std::move(received->fds)};
}

BrokerFixture::BrokerFixture() {
  std::string name = ::testing::TempDir() + "broker.XXXXXX";
  dir_ = ::mkdtemp(name.data());
  socket_path_ = dir_ + "/handles.sock";
  std::filesystem::create_directories(dir_ + "/state");
  state_dir_ = Must(os_.OpenDir(dir_ + "/state"));
  store_ = Must(Store::Open(os_, dir_ + "/store", dir_ + "/state", ::getuid()));
  labels_.epoch = 77;
}

BrokerFixture::~BrokerFixture() {
  if (loop_ != nullptr) {
    OnLoop([this] { broker_->Stop(); });
    absl::Notification stopped;
    loop_->Post([&] { manager_->Stop([&] { stopped.Notify(); }); });
    stopped.WaitForNotification();
    loop_->Quit();
    thread_.join();
    pool_.reset();
    broker_.reset();
    manager_.reset();
    chunks_.reset();
  }
  std::error_code ignored;
  std::filesystem::remove_all(dir_, ignored);
}

void BrokerFixture::AddVersion(const std::string& model, uint64_t version,
                               const std::map<std::string, std::string>& files) {
  const std::filesystem::path path =
      absl::StrCat(dir_, "/store/models/", model, "/versions/", version);
  std::filesystem::create_directories(path);
  for (const auto& [name, bytes] : files) {
    std::ofstream(path / name, std::ios::binary) << bytes;
    std::filesystem::permissions(path / name, std::filesystem::perms(0444));
  }
}

void BrokerFixture::SetLabel(const std::string& model, const std::string& label, uint64_t version,
                             uint64_t generation) {
  LabelRecord& record = labels_.labels[{model, label}];
  record.version = version;
  record.generation = generation;
}

std::string BrokerFixture::Safetensors(const std::string& name, const std::string& values) {
  const std::string header =
      absl::StrCat("{\"", name, "\":{\"dtype\":\"U8\",\"shape\":[", values.size(),
                   "],\"data_offsets\":[0,", values.size(), "]}}");
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + header + values;
}

void BrokerFixture::StartDaemon(BrokerOptions options) {
  loop_ = Must(EventLoop::Create(clock_));
  verified_ = VerifiedFiles::Load(os_, state_dir_);
  publisher_ = std::make_unique<Publisher>(*store_, verified_.get());
  chunks_ = std::make_unique<ThreadPool>("chunk", 2);
  LoaderOptions load_options;
  load_options.memlock = MemlockPolicy::kOff;
  loader_ = std::make_unique<Loader>(os_, clock_, *store_, *verified_, *chunks_, regions_, host_,
                                     memlock_, indexer_, index_writer_, machine_, load_options);
  pool_ = std::make_unique<ThreadPool>("work", 2);
  catalogue_ = Must(CatalogueWriter::Create(labels_.epoch, labels_));
  access_ = AccessPolicy::Make({}, {}, ::getuid(), nullptr);
  ManagerOptions manager_options;
  manager_options.memlock = MemlockPolicy::kOff;
  manager_options.own_uid = ::getuid();
  manager_options.model_policies = model_policies_;
  manager_ = std::make_unique<ModelManager>(
      ModelManager::Deps{os_, clock_, *loop_, *pool_, *pool_, *store_, *publisher_, *loader_,
                         *verified_, host_, memlock_, *catalogue_, state_dir_, access_, machine_},
      manager_options, labels_);
  broker_ = std::make_unique<HandleBroker>(
      HandleBroker::Deps{*loop_, *pool_, *pool_, closer_, *manager_, *catalogue_, clock_}, options);
  manager_->AddObserver(broker_.get());
  if (observer_ != nullptr) manager_->AddObserver(observer_);
  broker_->Start(Must(UnixListener::Bind(socket_path_, SocketType::kSeqpacket, 0666)));
  manager_->Start();
  thread_ = std::thread([this] { loop_->Run(); });
}

TestClient BrokerFixture::Connect() {
  TestClient client(socket_path_);
  client.Send(HelloBytes());
  const auto reply = client.Receive();
  EXPECT_TRUE(reply.has_value() && reply->type() == abi::FrameType::kHelloReply);
  return client;
}

void BrokerFixture::StartWithPlanner(BrokerOptions options) {
  AddVersion("planner", 7,
             {{"model.safetensors", Safetensors("w", "seven")}, {"config.json", "{\"n\": 7}"}});
  AddVersion("planner", 8, {{"model.safetensors", Safetensors("w", "eight")}});
  SetLabel("planner", "stable", 7, 12);
  StartDaemon(options);
}

TestClient BrokerFixture::ConnectAndAcquire(uint64_t* lease) {
  TestClient client = Connect();
  client.Send(AcquireBytes({LabelRef("planner")}));
  const auto granted = client.Receive();
  EXPECT_TRUE(granted.has_value() && granted->type() == abi::FrameType::kGranted);
  if (lease != nullptr && granted.has_value()) *lease = granted->As<abi::Granted>().lease_id;
  return client;
}

bool BrokerFixture::Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    if (OnLoop(condition)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

size_t BrokerFixture::OpenFds() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

}  // namespace modelhost
