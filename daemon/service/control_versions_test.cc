// Clients of other versions on control.sock: what they say more is ignored, what they miss is
// defaulted, and what does not exist is UNIMPLEMENTED.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

class ControlVersionsTest : public ControlServerTest {
 protected:
  struct Answer {
    grpc::Status status;
    std::string bytes;
  };
  // A unary call with any bytes.
  Answer Call(const std::string& method, const std::string& bytes) {
    grpc::GenericStub stub(Channel());
    grpc::ClientContext context;
    Deadline(context);
    grpc::Slice slice(bytes);
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::CompletionQueue queue;
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    Answer answer;
    call->Finish(&response, &answer.status, this);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    std::vector<grpc::Slice> slices;
    if (answer.status.ok() && response.Dump(&slices).ok()) {
      for (const grpc::Slice& part : slices) {
        answer.bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
      }
    }
    return answer;
  }
};

// Field 999 as a varint, as a string and as a message, after the fields that are known.
constexpr char kLaterFields[] = "\xb8\x3e\x2a\xc2\x3e\x03new\xca\x3e\x02\x08\x01";

TEST_F(ControlVersionsTest, FieldsOfALaterClientAreIgnored) {
  v1::GetModelRequest request;
  request.set_model("planner");
  const Answer answer =
      Call("/modelhost.v1.Control/GetModel", request.SerializeAsString() + kLaterFields);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  v1::Model model;
  ASSERT_TRUE(model.ParseFromString(answer.bytes));
  EXPECT_EQ(model.name(), "planner");
  EXPECT_EQ(model.versions_size(), 2);
}

TEST_F(ControlVersionsTest, CallsOfALaterClientAreUnimplemented) {
  for (const char* method : {"/modelhost.v1.Control/Teleport", "/modelhost.v2.Control/GetStatus"}) {
    const Answer answer = Call(method, "");
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method;
  }
  v1::GetStatusResponse status;
  EXPECT_TRUE(GetStatus(*stub_, &status).ok());
}

TEST_F(ControlVersionsTest, AnEarlierClientReadsWhatItKnows) {
  const Answer answer = Call("/modelhost.v1.Control/GetStatus", "");
  ASSERT_TRUE(answer.status.ok());
  // The first fields, as a client knew them that was made before all others.
  v1::GetStatusResponse status;
  ASSERT_TRUE(status.ParseFromString(answer.bytes + kLaterFields));
  EXPECT_EQ(status.version(), "1.2.3");
  EXPECT_EQ(status.epoch(), 7U);
}

TEST_F(ControlVersionsTest, BytesThatAreNoMessageAreRefused) {
  EXPECT_FALSE(Call("/modelhost.v1.Control/GetModel", "\x0a\xff\xff\xff\xff\x0f").status.ok());
  v1::GetStatusResponse status;
  EXPECT_TRUE(GetStatus(*stub_, &status).ok());
}

}  // namespace
}  // namespace modelhost
