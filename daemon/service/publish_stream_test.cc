#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

class StreamedPublishTest : public ControlServerTest {
 protected:
  StreamedPublishTest() : bytes_(SafetensorsBytes({{"w", std::vector<float>(1'000'000, 3.5F)}})) {}

  struct Published {
    grpc::Status status;
    v1::PublishResponse response;
  };
  v1::PublishRequest Begin() const {
    v1::PublishRequest request;
    request.mutable_begin()->set_model("planner");
    request.mutable_begin()->set_version(3);
    for (const auto& [path, size] : std::vector<std::pair<std::string, uint64_t>>{
             {"empty.txt", 0}, {"model.safetensors", bytes_.size()}, {"tokenizer.json", 2}}) {
      v1::PublishFile* file = request.mutable_begin()->add_files();
      file->set_path(path);
      file->set_bytes(size);
    }
    return request;
  }
  static v1::PublishRequest Chunk(uint32_t file, std::string data) {
    v1::PublishRequest request;
    request.mutable_chunk()->set_file(file);
    request.mutable_chunk()->set_data(std::move(data));
    return request;
  }
  Published Publish(const std::vector<v1::PublishRequest>& messages) {
    Published out;
    grpc::ClientContext context;
    Deadline(context);
    auto writer = stub_->Publish(&context, &out.response);
    for (const v1::PublishRequest& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    out.status = writer->Finish();
    return out;
  }
  // gRPC may answer before the handler knows; the operations end when everything is tidied up.
  void AwaitPublishes() {
    grpc::ClientContext list;
    Deadline(list);
    v1::ListOperationsResponse operations;
    ASSERT_TRUE(stub_->ListOperations(&list, {}, &operations).ok());
    for (const v1::Operation& operation : operations.operations()) {
      grpc::ClientContext watch;
      Deadline(watch);
      v1::GetOperationRequest request;
      request.set_id(operation.id());
      EXPECT_TRUE(Drain(stub_->WatchOperation(&watch, request)).status.ok());
    }
  }
  std::vector<v1::PublishRequest> AllOfIt() const {
    std::vector<v1::PublishRequest> messages = {Begin()};
    for (size_t at = 0; at < bytes_.size(); at += 1 << 20) {
      messages.push_back(Chunk(1, bytes_.substr(at, 1 << 20)));
    }
    messages.push_back(Chunk(2, "{}"));
    return messages;
  }

  const std::string bytes_;
};

TEST_F(StreamedPublishTest, WhatWasStreamedCanBeLoaded) {
  const Published published = Publish(AllOfIt());
  ASSERT_TRUE(published.status.ok()) << published.status.error_message();
  EXPECT_EQ(published.response.result().bytes(), bytes_.size() + 2);
  EXPECT_THAT(published.response.result().digest(), SizeIs(64));
  EXPECT_EQ(Operation(published.response.operation_id()).state(), v1::SUCCEEDED);
  std::ifstream file(base_ / "store/models/planner/versions/3/model.safetensors", std::ios::binary);
  const std::string stored((std::istreambuf_iterator<char>(file)), {});
  EXPECT_TRUE(stored == bytes_);
  EXPECT_TRUE(std::filesystem::exists(base_ / "store/models/planner/versions/3/empty.txt"));
  EXPECT_EQ(Load(3).last().state(), v1::SUCCEEDED);
}

TEST_F(StreamedPublishTest, BytesThatWereNotAnnouncedAreRefused) {
  std::vector<v1::PublishRequest> messages = AllOfIt();
  messages.push_back(Chunk(2, "x"));
  const Published published = Publish(messages);
  EXPECT_EQ(published.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(published.status.error_message(), HasSubstr("tokenizer.json"));
  AwaitPublishes();
  EXPECT_THAT(Incoming(), SizeIs(0));
}

TEST_F(StreamedPublishTest, AStreamThatEndsEarlyLeavesNothing) {
  std::vector<v1::PublishRequest> messages = AllOfIt();
  messages.pop_back();
  const Published published = Publish(messages);
  EXPECT_EQ(published.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(published.status.error_message(), HasSubstr("0 bytes came of the 2"));
  AwaitPublishes();
  EXPECT_THAT(Incoming(), SizeIs(0));
  EXPECT_FALSE(std::filesystem::exists(base_ / "store/models/planner/versions/3"));
}

TEST_F(StreamedPublishTest, FilesComeInTheOrderAnnounced) {
  EXPECT_EQ(Publish({Begin(), Chunk(2, "{}")}).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Publish({Begin(), Chunk(3, "{}")}).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(StreamedPublishTest, ChunksAreBounded) {
  EXPECT_EQ(Publish({Begin(), Chunk(1, std::string((1 << 20) + 1, 'x'))}).status.error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Publish({Begin(), Chunk(1, std::string(3 << 20, 'x'))}).status.error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);  // gRPC's own limit, before it is in memory.
  AwaitPublishes();
  EXPECT_THAT(Incoming(), SizeIs(0));
}

TEST_F(StreamedPublishTest, OnlyTheFirstMessageAnnounces) {
  EXPECT_EQ(Publish({}).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Publish({Chunk(0, "x")}).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(Publish({Begin(), Begin()}).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(StreamedPublishTest, SizesThatOverflowAreRefused) {
  v1::PublishRequest begin = Begin();
  for (v1::PublishFile& file : *begin.mutable_begin()->mutable_files()) {
    file.set_bytes(UINT64_MAX / 2);
  }
  EXPECT_EQ(Publish({begin}).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(StreamedPublishTest, AnOperatorsCancelEndsAStreamThatIsSilent) {
  grpc::ClientContext context;
  Deadline(context);
  v1::PublishResponse response;
  auto writer = stub_->Publish(&context, &response);
  ASSERT_TRUE(writer->Write(Begin()));
  ASSERT_TRUE(writer->Write(Chunk(1, bytes_.substr(0, 1000))));
  v1::GetOperationRequest request;
  while (request.id().empty()) {
    grpc::ClientContext list;
    Deadline(list);
    v1::ListOperationsResponse operations;
    ASSERT_TRUE(stub_->ListOperations(&list, {}, &operations).ok());
    for (const v1::Operation& one : operations.operations()) {
      // All that was sent has been looked at.
      if (one.kind() == v1::PUBLISH && one.bytes_done() > 0) request.set_id(one.id());
    }
  }
  grpc::ClientContext cancel;
  Deadline(cancel);
  v1::Operation operation;
  ASSERT_TRUE(stub_->CancelOperation(&cancel, request, &operation).ok());
  // Nothing more is sent: the daemon ends it, well before the caller's silence would.
  EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  AwaitPublishes();
  EXPECT_EQ(Operation(request.id()).state(), v1::CANCELLED);
  // A cancel does not wait for its worker, which takes away what it has staged.
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!Incoming().empty() && absl::Now() < deadline) std::this_thread::yield();
  EXPECT_THAT(Incoming(), SizeIs(0));
}

TEST_F(StreamedPublishTest, ACallerThatGoesAwayEndsThePublish) {
  grpc::ClientContext context;
  Deadline(context);
  v1::PublishResponse response;
  auto writer = stub_->Publish(&context, &response);
  ASSERT_TRUE(writer->Write(Begin()));
  ASSERT_TRUE(writer->Write(Chunk(1, bytes_.substr(0, 1000))));
  // It is under way when the list of operations has it.
  std::string id;
  while (id.empty()) {
    grpc::ClientContext list;
    Deadline(list);
    v1::ListOperationsResponse operations;
    ASSERT_TRUE(stub_->ListOperations(&list, {}, &operations).ok());
    for (const v1::Operation& one : operations.operations()) {
      if (one.kind() == v1::PUBLISH) id = one.id();
    }
  }
  context.TryCancel();
  writer->Finish();
  grpc::ClientContext watch;
  Deadline(watch);
  v1::GetOperationRequest watched;
  watched.set_id(id);
  EXPECT_EQ(Drain(stub_->WatchOperation(&watch, watched)).last().state(), v1::CANCELLED);
  AwaitPublishes();
  EXPECT_THAT(Incoming(), SizeIs(0));
}

}  // namespace
}  // namespace modelhost
