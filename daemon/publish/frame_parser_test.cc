// Frames from outside: what is right passes whole, what is wrong says what is wrong.
#include "daemon/publish/frame_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>

#include "proto/handle/fd_channel.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;

template <typename T>
Bytes Frame(abi::FrameType type, T frame, const Bytes& tail = {}, uint32_t fds = 0,
            uint32_t request_id = 7) {
  frame.header = MakeHeader(type, sizeof(T) + tail.size(), request_id, fds);
  Bytes bytes(AsBytes(frame).begin(), AsBytes(frame).end());
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return bytes;
}

abi::Ref MakeRef(const std::string& model, const std::string& label, uint64_t version = 0) {
  abi::Ref ref{};
  model.copy(ref.model, sizeof(ref.model));
  label.copy(ref.label, sizeof(ref.label));
  ref.version = version;
  return ref;
}

Bytes AcquireFrame(const std::vector<abi::Ref>& refs, uint32_t flags = 0,
                   uint64_t deadline_ms = 0) {
  abi::Acquire acquire{};
  acquire.flags = flags;
  acquire.count = static_cast<uint32_t>(refs.size());
  acquire.deadline_ms = deadline_ms;
  const auto tail = std::as_bytes(std::span(refs));
  return Frame(abi::FrameType::kAcquire, acquire, Bytes(tail.begin(), tail.end()));
}

std::string Refusal(const Bytes& frame, size_t fds = 0) {
  const auto request = ParseRequest(frame, fds);
  if (request.ok()) return "(accepted)";
  EXPECT_TRUE(absl::IsInvalidArgument(request.status()));
  return std::string(request.status().message());
}

TEST(ParseRequest, AnAcquireKeepsEverythingThatWasAsked) {
  abi::Ref fixed = MakeRef("detector", "", 12);
  fixed.digest[31] = 9;
  const auto request =
      ParseRequest(AcquireFrame({MakeRef("planner", "stable"), fixed}, abi::kAcquireWait, 250), 0);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->request_id, 7U);
  const auto& acquire = std::get<AcquireRequest>(request->body);
  EXPECT_TRUE(acquire.wait);
  EXPECT_FALSE(acquire.redeclare);
  EXPECT_EQ(acquire.deadline_ms, 250U);
  ASSERT_EQ(acquire.refs.size(), 2U);
  EXPECT_EQ(acquire.refs[0].model, "planner");
  EXPECT_EQ(acquire.refs[0].label, "stable");
  EXPECT_EQ(acquire.refs[1].version, 12U);
  EXPECT_EQ(acquire.refs[1].label, "");
  EXPECT_EQ(acquire.refs[1].digest[31], 9);
}

TEST(ParseRequest, EveryRequestIsToldApart) {
  abi::Hello hello{};
  hello.abi_min = 1;
  hello.abi_max = 3;
  abi::Fetch fetch{};
  fetch.lease_id = 5;
  fetch.region = 6;
  abi::Release release{};
  release.lease_id = 8;
  abi::Upload upload{};
  upload.ticket[0] = 1;
  upload.first = 64;
  upload.last = 1;
  const auto body = [](const Bytes& frame, size_t fds = 0) {
    const auto request = ParseRequest(frame, fds);
    EXPECT_TRUE(request.ok()) << request.status();
    return request->body;
  };
  EXPECT_EQ(std::get<HelloRequest>(body(Frame(abi::FrameType::kHello, hello))).abi_max, 3U);
  EXPECT_EQ(std::get<FetchRequest>(body(Frame(abi::FrameType::kFetch, fetch))).region, 6U);
  EXPECT_EQ(std::get<ReleaseRequest>(body(Frame(abi::FrameType::kRelease, release))).lease_id, 8U);
  EXPECT_TRUE(std::holds_alternative<SubscribeRequest>(
      body(Frame(abi::FrameType::kSubscribe, abi::Subscribe{}))));
  const auto parsed =
      std::get<UploadRequest>(body(Frame(abi::FrameType::kUpload, upload, {}, 2), 2));
  EXPECT_EQ(parsed.first, 64U);
  EXPECT_TRUE(parsed.last);
}

TEST(ParseRequest, LengthsAreExact) {
  abi::Fetch fetch{};
  const Bytes whole = Frame(abi::FrameType::kFetch, fetch);
  for (size_t size = 0; size < whole.size(); ++size) {
    Bytes cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_NE(Refusal(cut), "(accepted)") << size;
    if (size < sizeof(abi::FrameHeader)) continue;
    reinterpret_cast<abi::FrameHeader*>(cut.data())->bytes = static_cast<uint32_t>(size);
    EXPECT_THAT(Refusal(cut), HasSubstr("expected 32")) << size;
  }
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kFetch, fetch, Bytes(8))), HasSubstr("40 bytes"));
  EXPECT_THAT(Refusal(Bytes(abi::kMaxFrameBytes + 1)), HasSubstr("16385"));
}

TEST(ParseRequest, ACountIsBelievedOnlyWithTheBytesThatGoWithIt) {
  Bytes frame = AcquireFrame({MakeRef("a", "b")});
  const auto set_count = [&](uint32_t count) {
    std::memcpy(frame.data() + offsetof(abi::Acquire, count), &count, sizeof(count));
  };
  for (const uint32_t count : {0U, 2U, 33U, 0x80000001U, 0xffffffffU}) {
    set_count(count);
    EXPECT_NE(Refusal(frame), "(accepted)") << count;
  }
  set_count(1);
  EXPECT_EQ(Refusal(frame), "(accepted)");
  EXPECT_EQ(Refusal(AcquireFrame(std::vector(abi::kMaxSet, MakeRef("a", "b")))), "(accepted)");
}

TEST(ParseRequest, NamesEndAndAreValid) {
  EXPECT_THAT(Refusal(AcquireFrame({MakeRef(std::string(72, 'a'), "b")})), HasSubstr("no end"));
  EXPECT_THAT(Refusal(AcquireFrame({MakeRef("a", std::string(72, 'b'))})), HasSubstr("no end"));
  for (const char* name : {"", "A", "../x", "a/b", "-a", "a\n"}) {
    EXPECT_THAT(Refusal(AcquireFrame({MakeRef(name, "b")})), HasSubstr("model name")) << name;
    EXPECT_THAT(Refusal(AcquireFrame({MakeRef("a", name)})), HasSubstr("label")) << name;
  }
  EXPECT_THAT(Refusal(AcquireFrame({MakeRef(std::string(65, 'a'), "b")})), HasSubstr("not valid"));
  EXPECT_EQ(Refusal(AcquireFrame({MakeRef(std::string(64, 'a'), "b")})), "(accepted)");
  EXPECT_THAT(Refusal(AcquireFrame({MakeRef("a", "b", 3)})), HasSubstr("both"));
}

TEST(ParseRequest, HeadersThatLieAreRefused) {
  Bytes frame = Frame(abi::FrameType::kSubscribe, abi::Subscribe{});
  Bytes magic = frame;
  magic[0] ^= std::byte{1};
  EXPECT_THAT(Refusal(magic), HasSubstr("magic"));
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kSubscribe, abi::Subscribe{}, {}, 0, 0)),
              HasSubstr("request id"));
  for (const uint16_t type : {0, 2, 4, 5, 9, 10, 11, 13, 0xffff}) {
    EXPECT_THAT(Refusal(Frame(static_cast<abi::FrameType>(type), abi::Subscribe{})),
                HasSubstr("no request"));
  }
}

TEST(ParseRequest, DescriptorsComeWithUploadsAlone) {
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kSubscribe, abi::Subscribe{}, {}, 1), 1),
              HasSubstr("may carry none"));
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kUpload, abi::Upload{}, {}, 2), 1),
              HasSubstr("2 were announced"));
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kUpload, abi::Upload{}, {}, 0), 0),
              HasSubstr("no descriptor"));
  EXPECT_NE(Refusal(Frame(abi::FrameType::kUpload, abi::Upload{}, {}, 65), 65), "(accepted)");
  abi::Upload upload{};
  upload.first = std::numeric_limits<uint32_t>::max();
  EXPECT_THAT(Refusal(Frame(abi::FrameType::kUpload, upload, {}, 2), 2), HasSubstr("first file"));
}

constexpr char kGpu[] = "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca427";

Bytes DeviceFrame(const std::string& gpu, uint32_t flags = abi::kAcquireDevice,
                  size_t want_bytes = sizeof(abi::DeviceWant)) {
  const abi::Ref ref = MakeRef("planner", "stable");
  abi::DeviceWant want{};
  gpu.copy(want.gpu, sizeof(want.gpu));
  Bytes tail(AsBytes(ref).begin(), AsBytes(ref).end());
  tail.insert(tail.end(), AsBytes(want).begin(), AsBytes(want).begin() + want_bytes);
  abi::Acquire acquire{};
  acquire.flags = flags;
  acquire.count = 1;
  return Frame(abi::FrameType::kAcquire, acquire, tail);
}

TEST(ParseRequest, AWishForDeviceMemoryNamesItsGpu) {
  const auto parsed = [](uint32_t flags) {
    const auto request = ParseRequest(DeviceFrame(kGpu, flags), 0);
    EXPECT_TRUE(request.ok()) << request.status();
    return std::get<AcquireRequest>(request->body);
  };
  EXPECT_EQ(parsed(abi::kAcquireDevice).device, AcquireRequest::Device::kRequired);
  EXPECT_EQ(parsed(abi::kAcquireDevice).gpu, kGpu);
  EXPECT_EQ(parsed(abi::kAcquireDevice).refs.at(0).label, "stable");
  EXPECT_EQ(parsed(abi::kAcquireDeviceIfAny | abi::kAcquireRedeclare).device,
            AcquireRequest::Device::kIfAny);
  const auto without = ParseRequest(AcquireFrame({MakeRef("a", "b")}), 0);
  EXPECT_EQ(std::get<AcquireRequest>(without->body).device, AcquireRequest::Device::kNone);
  EXPECT_EQ(std::get<AcquireRequest>(without->body).gpu, "");
}

TEST(ParseRequest, AWishForDeviceMemoryIsWholeAndOfOneKind) {
  EXPECT_THAT(Refusal(DeviceFrame(kGpu, abi::kAcquireDevice | abi::kAcquireDeviceIfAny)),
              HasSubstr("both"));
  EXPECT_THAT(Refusal(DeviceFrame(kGpu, abi::kAcquireDevice, 0)), HasSubstr("expected 264"));
  EXPECT_THAT(Refusal(DeviceFrame(kGpu, abi::kAcquireDevice, 47)), HasSubstr("expected 264"));
  EXPECT_THAT(Refusal(DeviceFrame(kGpu, 0)), HasSubstr("expected 216"));
  EXPECT_THAT(Refusal(DeviceFrame(kGpu, 16)), HasSubstr("unknown flags"));
}

TEST(ParseRequest, AGpuIsNamedByItsUuidAlone) {
  EXPECT_THAT(Refusal(DeviceFrame(std::string(48, 'a'))), HasSubstr("no end"));
  for (const char* gpu :
       {"", "0", "GPU-", "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca42",
        "gpu-1b4e28ba-2fa1-11d2-883f-0016d3cca427", "GPU-1B4E28BA-2fa1-11d2-883f-0016d3cca427",
        "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca4277", "GPU-1b4e28ba02fa1-11d2-883f-0016d3cca427",
        "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca42g", "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca42\n"}) {
    EXPECT_THAT(Refusal(DeviceFrame(gpu)), HasSubstr("UUID")) << gpu;
  }
}

TEST(NegotiateAbi, TakesTheNewestThatBothSpeak) {
  const auto abi = NegotiateAbi({0, 100});
  ASSERT_TRUE(abi.ok());
  EXPECT_EQ(*abi, abi::kFrameAbi);
}

TEST(NegotiateAbi, NamesBothRangesWhenThereIsNone) {
  const auto newer = NegotiateAbi({70, 80});
  EXPECT_TRUE(absl::IsUnimplemented(newer.status()));
  EXPECT_THAT(std::string(newer.status().message()), HasSubstr("70 to 80"));
  EXPECT_THAT(std::string(newer.status().message()), HasSubstr("update modelhostd"));
  const auto older = NegotiateAbi({0, abi::kFrameAbiMin - 1});
  EXPECT_TRUE(absl::IsUnimplemented(older.status()));
  EXPECT_THAT(std::string(older.status().message()), HasSubstr("update libmodelhost"));
}

}  // namespace
}  // namespace modelhost
