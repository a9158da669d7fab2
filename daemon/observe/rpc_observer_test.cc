#include "daemon/observe/rpc_observer.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/method_handler.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>

#include <memory>

#include "daemon/observe/metrics_test_exposition.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A service by hand, as the generated code would make it: bytes in, bytes out.
class Echo final : public grpc::Service {
 public:
  explicit Echo(ManualClock& clock) {
    using Bytes = grpc::ByteBuffer;
    using Unary = grpc::internal::RpcMethodHandler<Echo, Bytes, Bytes, Bytes, Bytes>;
    using Stream = grpc::internal::ServerStreamingHandler<Echo, Bytes, Bytes>;
    Add("/test.Echo/Say", grpc::internal::RpcMethod::NORMAL_RPC,
        std::make_unique<Unary>(
            [&clock](Echo*, grpc::ServerContext*, const Bytes* in, Bytes* out) {
              clock.Advance(absl::Milliseconds(2));
              *out = *in;
              return in->Length() > 0 ? grpc::Status::OK
                                      : grpc::Status(grpc::StatusCode::NOT_FOUND, "no words");
            },
            this));
    Add("/test.Echo/Repeat", grpc::internal::RpcMethod::SERVER_STREAMING,
        std::make_unique<Stream>(
            [&clock](Echo*, grpc::ServerContext*, const Bytes* in, grpc::ServerWriter<Bytes>* out) {
              clock.Advance(absl::Milliseconds(2));
              out->Write(*in);
              clock.Advance(absl::Seconds(50));  // The rest is no longer the answer.
              return grpc::Status(grpc::StatusCode::ABORTED, "enough");
            },
            this));
  }

 private:
  void Add(const char* name, grpc::internal::RpcMethod::RpcType type,
           std::unique_ptr<grpc::internal::MethodHandler> handler) {
    // The service owns its methods, and each its handler.
    AddMethod(std::make_unique<grpc::internal::RpcServiceMethod>(name, type, handler.release())
                  .release());
  }
};

class RpcObserverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    grpc::ServerBuilder builder;
    builder.RegisterService(&echo_);
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> creators;
    creators.push_back(MakeRpcObserver(metrics_, clock_));
    builder.experimental().SetInterceptorCreators(std::move(creators));
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    channel_ = server_->InProcessChannel(grpc::ChannelArguments());
  }

  grpc::StatusCode Call(const std::string& method, const std::string& message) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::CompletionQueue queue;
    grpc::Slice slice(message);
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    return status.error_code();
  }

  // After the server is down every call has ended.
  Exposition Scrape() {
    channel_.reset();
    server_->Shutdown();
    server_->Wait();
    server_.reset();
    return Exposition(metrics_.registry()->Collect());
  }

  ManualClock clock_;
  Metrics metrics_{BuildInfo{}};
  Echo echo_{clock_};
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RpcObserverTest, CountsAndTimesCallsByMethodAndCode) {
  EXPECT_EQ(Call("/test.Echo/Say", "word"), grpc::StatusCode::OK);
  EXPECT_EQ(Call("/test.Echo/Say", ""), grpc::StatusCode::NOT_FOUND);
  const Exposition scrape = Scrape();
  const std::string name = "modelhost_rpc_duration_seconds";
  EXPECT_EQ(scrape.Value(name + "_count{code=\"OK\",method=\"test.Echo/Say\"}"), 1);
  EXPECT_EQ(scrape.Value(name + "_count{code=\"NOT_FOUND\",method=\"test.Echo/Say\"}"), 1);
  EXPECT_EQ(scrape.Value(name + "_sum{code=\"OK\",method=\"test.Echo/Say\"}"), 0.002);
  EXPECT_EQ(scrape.Value("modelhost_rpc_in_flight{method=\"test.Echo/Say\"}"), 0);
}

TEST_F(RpcObserverTest, AStreamIsAnsweredByItsFirstMessage) {
  Call("/test.Echo/Repeat", "word");
  const Exposition scrape = Scrape();
  const std::string name = "modelhost_rpc_duration_seconds";
  EXPECT_EQ(scrape.Value(name + "_sum{code=\"OK\",method=\"test.Echo/Repeat\"}"), 0.002);
  EXPECT_FALSE(scrape.Has(name + "_count{code=\"ABORTED\",method=\"test.Echo/Repeat\"}"));
  EXPECT_EQ(scrape.Value("modelhost_rpc_in_flight{method=\"test.Echo/Repeat\"}"), 0);
}

TEST_F(RpcObserverTest, AMethodThatNobodyServesMakesNoSeriesOfItsOwn) {
  EXPECT_EQ(Call("/made.up/Method", ""), grpc::StatusCode::UNIMPLEMENTED);
  for (const std::string& series : Scrape().SeriesOf("modelhost_rpc_")) {
    EXPECT_THAT(series, Not(HasSubstr("made.up")));
  }
}

}  // namespace
}  // namespace modelhost
