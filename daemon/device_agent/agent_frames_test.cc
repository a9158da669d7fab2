#include "daemon/device_agent/agent_frames.h"

#include <cstring>

#include "daemon/device_agent/device_mode.h"
#include "gmock/gmock.h"
#include "proto/handle/fd_channel.h"

namespace modelhost::agent {
namespace {

using ::testing::HasSubstr;

Request Good(Frame frame) {
  Request request{};
  request.header = MakeHeader(static_cast<abi::FrameType>(frame), sizeof(request), 1, 0);
  request.bytes = 4096;
  return request;
}

std::string WhyNot(const Request& request, size_t fds) {
  const auto parsed = ParseRequest(AsBytes(request), fds);
  return parsed.ok() ? "" : parsed.error().text;
}

TEST(AgentFrames, EveryRequestNeedsItsDescriptors) {
  struct Case {
    Frame frame;
    size_t least;
    size_t most;
  };
  for (const Case& one :
       {Case{Frame::kList, 0, 0}, Case{Frame::kOpen, 0, 0}, Case{Frame::kCreate, 0, 0},
        Case{Frame::kRelease, 0, 0}, Case{Frame::kMemory, 0, 0}, Case{Frame::kTryImport, 0, 0},
        Case{Frame::kTryHostRead, 0, 0}, Case{Frame::kVerify, 1, 1}, Case{Frame::kCheck, 1, 1},
        Case{Frame::kUpload, 2, 2 + kMaxSources}}) {
    Request request = Good(one.frame);
    SCOPED_TRACE(request.header.type);
    EXPECT_EQ(WhyNot(request, one.least), "");
    EXPECT_EQ(WhyNot(request, one.most), "");
    EXPECT_THAT(WhyNot(request, one.most + 1), HasSubstr("descriptors came with type"));
    if (one.least == 0) continue;
    EXPECT_THAT(WhyNot(request, one.least - 1), HasSubstr("descriptors came with type"));
    request.segment = 3;  // Legacy memory, which has a number instead.
    EXPECT_EQ(WhyNot(request, one.least - 1), "");
    EXPECT_THAT(WhyNot(request, one.most), HasSubstr("descriptors came with type"));
  }
  EXPECT_THAT(WhyNot(Good(Frame::kReply), 0), HasSubstr("type 385"));
  EXPECT_THAT(WhyNot(Good(static_cast<Frame>(0)), 0), HasSubstr("type 0"));
}

TEST(AgentFrames, WhatARequestSaysMustBePossible) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{4097}, uint64_t{1} << 63}) {
    Request request = Good(Frame::kCreate);
    request.bytes = bytes;
    EXPECT_THAT(WhyNot(request, 0), HasSubstr("a segment of " + std::to_string(bytes) + " bytes"));
  }
  Request request = Good(Frame::kUpload);
  request.items = kMaxItems + 1;
  EXPECT_THAT(WhyNot(request, 2), HasSubstr("16777217 pieces"));
  request = Good(Frame::kOpen);
  request.ipc_test = 4;
  EXPECT_THAT(WhyNot(request, 0), HasSubstr("a test result"));
  for (char* text : {request.uuid, request.direct_failure, request.ipc_failure}) {
    request = Good(Frame::kOpen);
    std::memset(text, 'x', text == request.uuid ? kUuidBytes : kFailureBytes);
    EXPECT_THAT(WhyNot(request, 0), HasSubstr("a text does not end"));
  }
  request = Good(Frame::kOpen);
  EXPECT_FALSE(ParseRequest(AsBytes(request).first(sizeof(request) - 1), 0).ok());
}

TEST(AgentFrames, APlanIsSortedApartAndInside) {
  const auto why_not = [](const std::vector<UploadItem>& items, uint64_t bytes = 4096) {
    const auto parsed = ParsePlan(std::as_bytes(std::span(items)), items.size(), 2, bytes);
    return parsed.ok() ? "" : parsed.error().text;
  };
  EXPECT_EQ(why_not({}), "");
  EXPECT_EQ(why_not({{0, 1, 0, 1, 0}, {1, 4095, 7, 0, 0}}), "");
  const uint64_t top = static_cast<uint64_t>(INT64_MAX);
  for (const UploadItem& bad :
       {UploadItem{8, 0, 0, 0, 0}, UploadItem{8, 1, 0, 2, 0}, UploadItem{7, 1, 0, 0, 0},
        UploadItem{4097, 1, 0, 0, 0}, UploadItem{8, 4089, 0, 0, 0}, UploadItem{8, ~0ULL, 0, 0, 0},
        UploadItem{8, 8, top - 7, 0, 0}, UploadItem{8, 8, ~0ULL, 0, 0}}) {
    EXPECT_EQ(why_not({{0, 8, 0, 0, 0}, bad}), "item 1 of the upload does not fit its segment");
  }
  EXPECT_NE(why_not({{0, ~0ULL, 0, 0, 0}}, ~0ULL), "");
  EXPECT_FALSE(ParsePlan({}, 1, 1, 4096).ok());
  EXPECT_FALSE(ParsePlan({}, ~0ULL, 1, 4096).ok());
}

TEST(AgentFrames, AReplyIsToWhatWasAsked) {
  Reply reply{};
  const auto parses = [&](size_t fds = 0) { return ParseReply(AsBytes(reply), fds, 7).ok(); };
  const auto reset = [&](Frame frame = Frame::kReply) {
    reply = Reply{};
    reply.header = MakeHeader(static_cast<abi::FrameType>(frame), sizeof(reply), 7, 0);
  };
  reset();
  EXPECT_TRUE(parses());
  EXPECT_TRUE(parses(1));
  EXPECT_FALSE(parses(2));
  EXPECT_TRUE(IsLast(reply));
  reset(Frame::kProgress);
  EXPECT_TRUE(parses());
  EXPECT_FALSE(parses(1));
  EXPECT_FALSE(IsLast(reply));
  reset(Frame::kList);
  EXPECT_FALSE(parses());
  reset();
  reply.header.request_id = 8;
  EXPECT_FALSE(parses());
  reset();
  reply.code = 16;
  EXPECT_FALSE(parses());
  reset();
  reply.device.mode = static_cast<uint32_t>(DeviceMode::kCudaIpc) + 1;
  EXPECT_FALSE(parses());
  reset();
  reply.devices = kMaxDevices + 1;
  EXPECT_FALSE(parses());
  reset();
  reply.device.granularity = 3;
  EXPECT_FALSE(parses());
  for (const std::span<char> text :
       {std::span<char>(reply.text), std::span<char>(reply.device.uuid),
        std::span<char>(reply.device.name), std::span<char>(reply.device.reason)}) {
    reset();
    std::memset(text.data(), 'x', text.size());
    EXPECT_FALSE(parses());
  }
  EXPECT_FALSE(ParseReply({}, 0, 7).ok());
}

TEST(AgentFrames, ATextIsCutAtItsRoom) {
  char text[4];
  CopyText(text, "abcdef");
  EXPECT_EQ(TextOf(text), "abc");
  CopyText(text, "");
  EXPECT_EQ(TextOf(text), "");
}

}  // namespace
}  // namespace modelhost::agent
