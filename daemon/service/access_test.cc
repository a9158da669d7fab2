// Who may call what: over every RPC that there is, so that a new one cannot be forgotten.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

class AccessTest : public ControlServerTest {
 protected:
  // The code that an empty request of this method gets on a connection of its own.
  grpc::StatusCode CallEmpty(const std::string& method) {
    grpc::GenericStub stub(Channel());
    grpc::ClientContext context;
    Deadline(context);
    grpc::Slice slice("");
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::CompletionQueue queue;
    auto call = stub.PrepareUnaryCall(&context, "/modelhost.v1.Control/" + method, request, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&response, &status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status.error_code();
  }

  static std::vector<std::string> Methods() {
    const auto* service = v1::SwapRequest::descriptor()->file()->FindServiceByName("Control");
    std::vector<std::string> methods;
    for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i)->name());
    return methods;
  }

  static bool OnlyLooks(const std::string& method) {
    for (const char* prefix : {"Get", "List", "Watch", "Plan"}) {
      if (absl::StartsWith(method, prefix)) return true;
    }
    return false;
  }
};

TEST_F(AccessTest, AReaderMayCallNothingThatChangesSomething) {
  Pretend(12345, {4242});
  int commands = 0;
  for (const std::string& method : Methods()) {
    if (OnlyLooks(method)) continue;
    ++commands;
    EXPECT_EQ(CallEmpty(method), grpc::StatusCode::PERMISSION_DENIED) << method;
  }
  EXPECT_GE(commands, 11);
}

TEST_F(AccessTest, AStrangerMayCallNothing) {
  for (const std::string& method : Methods()) {
    Pretend(12345);
    EXPECT_EQ(CallEmpty(method), grpc::StatusCode::PERMISSION_DENIED) << method;
    Pretend(::geteuid());  // The daemon's own user is let in to the same call.
    if (!OnlyLooks(method)) {
      EXPECT_NE(CallEmpty(method), grpc::StatusCode::PERMISSION_DENIED) << method;
    }
  }
}

}  // namespace
}  // namespace modelhost
