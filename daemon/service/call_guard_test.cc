// What callers that behave badly may take from others, over real connections.
#include "daemon/service/call_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <fstream>

#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class CallGuardTest : public ControlServerTest {
 protected:
  CallGuardTest() {
    call_options_.most_send = absl::Seconds(2);
    call_options_.most_reflection = absl::Seconds(2);
  }

  struct Watch {
    grpc::ClientContext context;
    std::unique_ptr<v1::Control::Stub> stub;
    std::unique_ptr<grpc::ClientReader<v1::Model>> reader;
    grpc::Status status;  // When it was refused.
  };
  // A stream that has told its first model, or was refused.
  std::unique_ptr<Watch> OpenWatch() {
    auto watch = std::make_unique<Watch>();
    Deadline(watch->context);
    watch->stub = Connect();
    watch->reader = watch->stub->WatchModels(&watch->context, {});
    v1::Model model;
    if (!watch->reader->Read(&model)) {
      watch->status = watch->reader->Finish();
      watch->reader.reset();
    }
    return watch;
  }
  bool Answers(v1::Control::Stub& stub) {
    v1::GetStatusResponse status;
    return GetStatus(stub, &status).ok();
  }
};

TEST_F(CallGuardTest, StreamsOfReadersAreFewAndCommandsHavePlacesOfTheirOwn) {
  const CallGuard::Limit limit = CallGuard::LimitOf(CallGuard::Kind::kWatch);
  std::vector<std::unique_ptr<Watch>> watches;
  for (uint32_t uid = 12345; watches.size() < static_cast<size_t>(limit.of_readers); ++uid) {
    Pretend(uid, {4242});
    for (int i = 0; i < limit.of_uid; ++i) {
      watches.push_back(OpenWatch());
      ASSERT_NE(watches.back()->reader, nullptr) << watches.back()->status.error_message();
    }
    const auto refused = OpenWatch();
    EXPECT_EQ(refused->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused->status.error_message(), HasSubstr("WatchModels: "));
  }
  Pretend(99999, {4242});
  EXPECT_EQ(OpenWatch()->status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);

  // Who commands still watches, and commands.
  Pretend(::geteuid());
  auto own = OpenWatch();
  ASSERT_NE(own->reader, nullptr) << own->status.error_message();
  EXPECT_EQ(Load(1).last().state(), v1::SUCCEEDED);
  own->context.TryCancel();
  own->reader->Finish();
  for (auto& watch : watches) watch->context.TryCancel();
  for (auto& watch : watches) watch->reader->Finish();
}

// --- A caller that takes nothing

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  return frame + payload;
}

// A header field as HPACK's plain literal.
std::string Field(const std::string& name, const std::string& value) {
  return absl::StrCat(std::string(1, '\0'), std::string(1, static_cast<char>(name.size())), name,
                      std::string(1, static_cast<char>(value.size())), value);
}

std::string StatusCall(uint32_t stream) {
  constexpr uint8_t kHeaders = 1;
  constexpr uint8_t kData = 0;
  const std::string headers = Field(":method", "POST") + Field(":scheme", "http") +
                              Field(":path", "/modelhost.v1.Control/GetStatus") +
                              Field(":authority", "localhost") +
                              Field("content-type", "application/grpc") + Field("te", "trailers");
  return Frame(kHeaders, /*END_HEADERS*/ 4, stream, headers) +
         Frame(kData, /*END_STREAM*/ 1, stream, std::string(5, '\0'));
}

// HTTP/2 by hand, with no room for any byte of a message.
UniqueFd ConnectWithoutWindow(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return {};
  constexpr uint8_t kSettings = 4;
  const std::string initial_window("\x00\x04\x00\x00\x00\x00", 6);
  const std::string hello =
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, initial_window);
  if (::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL) < 0) return {};
  timeval limit{.tv_sec = 20, .tv_usec = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return socket;
}

// Reads frames until one of `type` comes; false at the end or the time limit.
bool ReadUntil(const UniqueFd& socket, uint8_t type) {
  const auto take = [&](size_t bytes) -> std::optional<std::string> {
    std::string out(bytes, '\0');
    if (bytes == 0) return out;
    if (::recv(socket.get(), out.data(), bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) {
      return std::nullopt;
    }
    return out;
  };
  while (const auto header = take(9)) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>((*header)[i]); };
    if (!take(size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2)).has_value()) return false;
    if (byte(3) == type) return true;
  }
  return false;
}

TEST_F(CallGuardTest, AnAnswerThatNobodyTakesIsGivenUp) {
  constexpr uint8_t kHeaders = 1;
  constexpr uint8_t kResetStream = 3;
  // A second connection, made before: there must be threads left for it.
  ASSERT_TRUE(Answers(*stub_));
  std::vector<UniqueFd> readers;
  for (uint32_t uid = 12345; uid < 12350; ++uid) {
    Pretend(uid, {4242});
    for (int i = 0; i < 2; ++i) {
      UniqueFd socket = ConnectWithoutWindow(SocketPath());
      ASSERT_TRUE(socket.valid());
      for (uint32_t call = 0; call < 30; ++call) {
        const std::string request = StatusCall(2 * call + 1);
        ASSERT_GT(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL), 0);
      }
      // A refusal needs no window. It says that this uid's share is taken, by the first connection.
      if (readers.empty()) {
        ASSERT_TRUE(ReadUntil(socket, kHeaders));
      }
      readers.push_back(std::move(socket));
    }
  }
  // 300 answers wait for a caller; an operator does not.
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(Answers(*stub_)) << i;
  EXPECT_EQ(Load(1).last().state(), v1::SUCCEEDED);
  EXPECT_TRUE(ReadUntil(readers.front(), kResetStream));
  // What they held is free again.
  Pretend(12399, {4242});
  const auto reader = Connect();
  EXPECT_TRUE(Answers(*reader));
}

// --- Reflection: gRPC's own service, which asks nobody

class ReflectionTest : public CallGuardTest {
 protected:
  // One stream; `request` is not sent when it is empty. The answer, or the status that ended it.
  struct Reflected {
    grpc::Status status;
    std::string answer;
  };
  Reflected Reflect(const std::string& request) {
    grpc::GenericStub stub(Channel());
    grpc::ClientContext context;
    Deadline(context);
    grpc::CompletionQueue queue;
    auto call = stub.PrepareCall(
        &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
    const auto next = [&] {
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
      return ok;
    };
    Reflected out;
    call->StartCall(this);
    bool good = next();
    if (good && !request.empty()) {
      const grpc::Slice slice(request);
      call->Write(grpc::ByteBuffer(&slice, 1), this);
      good = next();
    }
    if (good) {
      grpc::ByteBuffer buffer;
      call->Read(&buffer, this);
      if (next()) {
        grpc::Slice slice;
        EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
        out.answer.assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
        call->WritesDone(this);
        next();
      }
    }
    call->Finish(&out.status, this);
    next();
    return out;
  }
  static constexpr char kListServices[] = "\x3a\x01*";
};

TEST_F(ReflectionTest, AReaderLearnsWhatIsServed) {
  Pretend(12345, {4242});
  const Reflected reflected = Reflect(kListServices);
  EXPECT_TRUE(reflected.status.ok()) << reflected.status.error_message();
  EXPECT_THAT(reflected.answer, HasSubstr("modelhost.v1.Control"));
}

TEST_F(ReflectionTest, AStrangersStreamEndsAtOnce) {
  Pretend(12345);
  const Reflected reflected = Reflect(kListServices);
  EXPECT_EQ(reflected.status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(reflected.answer, "");
}

TEST_F(ReflectionTest, AStreamThatSaysNothingEndsAndKeepsNobodyOut) {
  Pretend(12345, {4242});
  const absl::Time begin = absl::Now();
  EXPECT_EQ(Reflect("").status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_GE(absl::Now() - begin, call_options_.most_reflection);
  EXPECT_EQ(Reflect(kListServices).status.error_code(), grpc::StatusCode::OK);
}

// --- Models with read_groups of their own

class ReadGroupsTest : public CallGuardTest {
 protected:
  void SetUp() override {
    CallGuardTest::SetUp();
    WriteVersion(base_ / "store", "open", 1,
                 {{"model.safetensors", SafetensorsBytes({{"w", std::vector<float>(10, 1.0F)}})}});
    std::ofstream(base_ / "store/models/planner/model.toml") << "read_groups = [\"4545\"]\n";
    std::filesystem::permissions(base_ / "store/models/planner/model.toml",
                                 std::filesystem::perms(0644));
    grpc::ClientContext context;
    Deadline(context);
    v1::RescanResponse scanned;
    ASSERT_TRUE(stub_->Rescan(&context, {}, &scanned).ok());
    ASSERT_EQ(scanned.models(), 2U);
  }
  static std::vector<std::string> Models(v1::Control::Stub& stub) {
    grpc::ClientContext context;
    Deadline(context);
    v1::ListModelsResponse models;
    EXPECT_TRUE(stub.ListModels(&context, {}, &models).ok());
    std::vector<std::string> names;
    for (const v1::Model& model : models.models()) names.push_back(model.name());
    return names;
  }
  static grpc::StatusCode GetModel(v1::Control::Stub& stub, const std::string& name) {
    grpc::ClientContext context;
    Deadline(context);
    v1::GetModelRequest request;
    request.set_model(name);
    v1::Model model;
    return stub.GetModel(&context, request, &model).error_code();
  }
  static grpc::StatusCode GetOperation(v1::Control::Stub& stub, const std::string& id) {
    grpc::ClientContext context;
    Deadline(context);
    v1::GetOperationRequest request;
    request.set_id(id);
    v1::Operation operation;
    return stub.GetOperation(&context, request, &operation).error_code();
  }
};

TEST_F(ReadGroupsTest, AModelsOwnGroupAdmitsAndSeesThatModelOnly) {
  const std::string swap = Swap(1).last().id();
  Pretend(12345, {4545});
  const auto own = Connect();
  EXPECT_TRUE(Answers(*own));
  EXPECT_THAT(Models(*own), ::testing::ElementsAre("planner"));
  EXPECT_EQ(GetModel(*own, "planner"), grpc::StatusCode::OK);
  EXPECT_EQ(GetModel(*own, "open"), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(GetOperation(*own, swap), grpc::StatusCode::OK);
  EXPECT_EQ(LoadBy(*own, 1).status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(ReadGroupsTest, TheDaemonsReadersDoNotSeeAModelThatIsNotTheirs) {
  const std::string swap = Swap(1).last().id();
  Pretend(12345, {4242});
  const auto reader = Connect();
  EXPECT_THAT(Models(*reader), ::testing::ElementsAre("open"));
  EXPECT_EQ(GetModel(*reader, "planner"), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(GetOperation(*reader, swap), grpc::StatusCode::PERMISSION_DENIED);
  grpc::ClientContext context;
  Deadline(context);
  v1::ListOperationsResponse operations;
  ASSERT_TRUE(reader->ListOperations(&context, {}, &operations).ok());
  EXPECT_THAT(operations.operations(), SizeIs(0));
  // Who may command sees all.
  Pretend(12346, {4343});
  EXPECT_THAT(Models(*Connect()), ::testing::ElementsAre("open", "planner"));
}

}  // namespace
}  // namespace modelhost
