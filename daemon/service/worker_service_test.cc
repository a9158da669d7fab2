// The Worker service over real connections.
#include <gmock/gmock.h>

#include "daemon/service/control_server_test_fixture.h"
#include "modelhost/v1/worker.grpc.pb.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

class WorkerServiceTest : public ControlServerTest {
 protected:
  void SetUp() override {
    ControlServerTest::SetUp();
    ASSERT_TRUE(Swap(1).status.ok());
  }

  struct Stream {
    std::shared_ptr<grpc::Channel> channel;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionEvent>> calls;

    v1::SessionEvent Next() {
      v1::SessionEvent event;
      EXPECT_TRUE(calls->Read(&event)) << calls->Finish().error_message();
      return event;
    }
    v1::SessionEvent Acquire(uint64_t version = 0) {
      v1::SessionRequest request;
      request.set_request_id(1);
      v1::WorkerRef* ref = request.mutable_acquire()->add_refs();
      ref->set_model("planner");
      ref->set_version(version);
      EXPECT_TRUE(calls->Write(request));
      return Next();
    }
  };
  std::unique_ptr<Stream> Open() {
    auto stream = std::make_unique<Stream>();
    stream->channel = Channel();
    Deadline(stream->context);
    stream->calls = v1::Worker::NewStub(stream->channel)->Session(&stream->context);
    return stream;
  }
  size_t Leases() {
    return RunAndWait(*loop_, [&] { return manager_->Leases().size(); });
  }
  void AwaitLeases(size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (Leases() != count) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << Leases() << " leases";
      std::this_thread::yield();
    }
  }
  grpc::Status Resolve(const v1::WorkerRef& ref, v1::Resolved* resolved) {
    grpc::ClientContext context;
    Deadline(context);
    v1::ResolveRequest request;
    *request.mutable_ref() = ref;
    return v1::Worker::NewStub(Channel())->Resolve(&context, request, resolved);
  }
  std::pair<grpc::Status, std::vector<v1::IndexPage>> GetIndex(const v1::WorkerRef& ref) {
    grpc::ClientContext context;
    Deadline(context);
    v1::GetIndexRequest request;
    *request.mutable_ref() = ref;
    auto reader = v1::Worker::NewStub(Channel())->GetIndex(&context, request);
    std::vector<v1::IndexPage> pages;
    v1::IndexPage page;
    while (reader->Read(&page)) pages.push_back(page);
    return {reader->Finish(), pages};
  }
  static v1::WorkerRef Planner(uint64_t version = 0) {
    v1::WorkerRef ref;
    ref.set_model("planner");
    ref.set_version(version);
    return ref;
  }
};

TEST_F(WorkerServiceTest, AStreamHoldsItsLeasesAndTheyEndWithIt) {
  auto stream = Open();
  const v1::SessionOpened opened = stream->Next().opened();
  EXPECT_EQ(opened.epoch(), 7U);
  EXPECT_NE(opened.session(), 0U);
  const v1::SessionEvent granted = stream->Acquire();
  ASSERT_EQ(granted.granted().grants_size(), 1) << granted.DebugString();
  EXPECT_EQ(granted.granted().grants(0).version(), 1U);
  EXPECT_EQ(Leases(), 1U);
  EXPECT_EQ(RunAndWait(*loop_, [&] { return manager_->Sessions().at(0).transport; }), "grpc");
  stream->context.TryCancel();
  AwaitLeases(0);
  EXPECT_EQ(stream->calls->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(WorkerServiceTest, AHalfClosedStreamEndsWell) {
  auto stream = Open();
  stream->Next();
  stream->Acquire();
  stream->calls->WritesDone();
  EXPECT_TRUE(stream->calls->Finish().ok());
  AwaitLeases(0);
}

TEST_F(WorkerServiceTest, AStreamFollowsASwap) {
  auto stream = Open();
  stream->Next();
  stream->Acquire();
  ASSERT_TRUE(Swap(2).status.ok());
  const v1::GenerationChanged changed = stream->Next().generation_changed();
  EXPECT_EQ(changed.version(), 2U);
  EXPECT_EQ(changed.generation(), 2U);
  EXPECT_EQ(stream->Acquire().granted().grants(0).version(), 2U);
}

TEST_F(WorkerServiceTest, AThousandAcquiresOverOneStreamAreAllAnswered) {
  auto stream = Open();
  stream->Next();
  std::thread asks([&] {
    for (uint64_t i = 1; i <= 1000; ++i) {
      v1::SessionRequest request;
      request.set_request_id(i);
      request.mutable_acquire()->add_refs()->set_model("planner");
      ASSERT_TRUE(stream->calls->Write(request));
    }
  });
  for (uint64_t i = 1; i <= 1000; ++i) {
    const v1::SessionEvent event = stream->Next();
    ASSERT_EQ(event.request_id(), i);
    ASSERT_TRUE(event.has_granted());
  }
  asks.join();
  EXPECT_EQ(Leases(), 1000U);
  stream->context.TryCancel();
  AwaitLeases(0);
}

TEST_F(WorkerServiceTest, AStrangerGetsNoStream) {
  Pretend(12345);
  auto stream = Open();
  v1::SessionEvent event;
  EXPECT_FALSE(stream->calls->Read(&event));
  const grpc::Status status = stream->calls->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(status.error_message(), HasSubstr("12345"));
  v1::RpcStatus details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  v1::Resolved resolved;
  EXPECT_EQ(Resolve(Planner(), &resolved).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(GetIndex(Planner()).first.error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(WorkerServiceTest, AUidHasOnlySoManyStreams) {
  Pretend(12345, {4242});
  const int most = CallGuard::LimitOf(CallGuard::Kind::kSession).of_uid;
  std::vector<std::unique_ptr<Stream>> streams;
  std::shared_ptr<grpc::Channel> channel;
  for (int i = 0; i < most; ++i) {
    if (i % 30 == 0) channel = Channel();
    auto stream = std::make_unique<Stream>();
    stream->channel = channel;
    Deadline(stream->context);
    stream->calls = v1::Worker::NewStub(channel)->Session(&stream->context);
    ASSERT_TRUE(stream->Next().has_opened()) << i;
    streams.push_back(std::move(stream));
  }
  auto refused = Open();
  v1::SessionEvent event;
  EXPECT_FALSE(refused->calls->Read(&event));
  EXPECT_EQ(refused->calls->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  streams.pop_back();  // Cancels it.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    auto again = Open();
    if (again->calls->Read(&event)) break;
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  }
}

TEST_F(WorkerServiceTest, ARequestThatIsTooLongIsNotEvenParsed) {
  auto stream = Open();
  stream->Next();
  stream->Acquire();
  v1::SessionRequest request;
  for (int i = 0; i < 20'000; ++i) request.mutable_acquire()->add_refs();
  ASSERT_GT(request.ByteSizeLong(), WorkerSession::kMostRequestBytes);
  ASSERT_TRUE(stream->calls->Write(request));
  v1::SessionEvent event;
  EXPECT_FALSE(stream->calls->Read(&event));
  const grpc::Status status = stream->calls->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("a request of 40"));
  AwaitLeases(0);
}

TEST_F(WorkerServiceTest, AStopTellsTheStreamsAndEndsThem) {
  auto stream = Open();
  stream->Next();
  stream->Acquire();
  std::thread stop([&] { server_->Shutdown(absl::Seconds(10)); });
  EXPECT_TRUE(stream->Next().has_closing());
  v1::SessionEvent event;
  EXPECT_FALSE(stream->calls->Read(&event));
  EXPECT_EQ(stream->calls->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  EXPECT_EQ(Leases(), 0U);
}

TEST_F(WorkerServiceTest, AStreamThatReadsNothingDoesNotHoldUpTheStop) {
  auto stream = Open();
  for (int i = 0; i < 100; ++i) {
    v1::SessionRequest request;
    request.mutable_acquire()->add_refs()->set_model("planner");
    if (!stream->calls->Write(request)) break;
  }
  server_->Shutdown(absl::ZeroDuration());
  EXPECT_EQ(Leases(), 0U);
}

TEST_F(WorkerServiceTest, ResolveSaysWhatAReferenceNames) {
  v1::Resolved resolved;
  ASSERT_TRUE(Resolve(Planner(), &resolved).ok());
  EXPECT_EQ(resolved.version(), 1U);
  EXPECT_EQ(resolved.label(), "stable");
  EXPECT_EQ(resolved.generation(), 1U);
  EXPECT_EQ(resolved.digest().size(), 64U);
  EXPECT_EQ(resolved.phase(), v1::READY);
  EXPECT_EQ(resolved.epoch(), 7U);
  ASSERT_TRUE(Resolve(Planner(2), &resolved).ok());
  EXPECT_EQ(resolved.phase(), v1::STAGED);
  EXPECT_EQ(Resolve(Planner(9), &resolved).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::WorkerRef bad;
  bad.set_model("../x");
  EXPECT_EQ(Resolve(bad, &resolved).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::WorkerRef other = Planner();
  other.set_digest(std::string(64, '1'));
  EXPECT_EQ(Resolve(other, &resolved).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(WorkerServiceTest, TheIndexComesInPages) {
  const auto [status, pages] = GetIndex(Planner());
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(pages.size(), 1U);
  EXPECT_EQ(pages[0].head().model(), "planner");
  EXPECT_EQ(pages[0].head().version(), 1U);
  ASSERT_EQ(pages[0].tensors_size(), 1);
  EXPECT_EQ(pages[0].tensors(0).name(), "w");
  EXPECT_EQ(GetIndex(Planner(2)).first.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
}

}  // namespace
}  // namespace modelhost
