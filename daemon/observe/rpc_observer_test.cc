#include "daemon/observe/rpc_observer.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include "daemon/observe/metrics_test_exposition.h"
#include "daemon/platform/clock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// gRPC's own health service, watched.
class RpcObserverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
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

  SystemClock clock_;
  Metrics metrics_{BuildInfo{}};
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RpcObserverTest, CountsCallsByMethodAndCode) {
  EXPECT_EQ(Call("/grpc.health.v1.Health/Check", ""), grpc::StatusCode::OK);
  EXPECT_EQ(Call("/grpc.health.v1.Health/Check", "\x0a\x04none"), grpc::StatusCode::NOT_FOUND);
  const Exposition scrape = Scrape();
  const std::string count = "modelhost_rpc_duration_seconds_count";
  EXPECT_EQ(scrape.Value(count + "{code=\"OK\",method=\"grpc.health.v1.Health/Check\"}"), 1);
  EXPECT_EQ(scrape.Value(count + "{code=\"NOT_FOUND\",method=\"grpc.health.v1.Health/Check\"}"), 1);
  EXPECT_EQ(scrape.Value("modelhost_rpc_in_flight{method=\"grpc.health.v1.Health/Check\"}"), 0);
}

TEST_F(RpcObserverTest, AMethodThatNobodyServesMakesNoSeriesOfItsOwn) {
  EXPECT_EQ(Call("/made.up/Method", ""), grpc::StatusCode::UNIMPLEMENTED);
  for (const std::string& series : Scrape().SeriesOf("modelhost_rpc_")) {
    EXPECT_THAT(series, Not(HasSubstr("made.up")));
  }
}

}  // namespace
}  // namespace modelhost
