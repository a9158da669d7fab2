// What of a grant goes out: frames as a client would check them.
#include "daemon/publish/reply_frames.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "proto/handle/fd_channel.h"

namespace modelhost {
namespace {

constexpr char kGpu[] = "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca427";

class FakeDevice final : public DeviceReleaser {
 public:
  void ReleaseLater(std::vector<DeviceSegment> /*segments*/, Reservation /*booked*/) override {}
};

class GrantFramesTest : public ::testing::Test {
 protected:
  GrantFramesTest() {
    auto manifest = std::make_shared<Manifest>();
    manifest->model = "planner";
    manifest->version = 7;
    version_->manifest = std::move(manifest);
    version_->index.bytes = 4096;
    version_->index.fd = Fd();
  }

  static UniqueFd Fd() { return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

  // Of as many regions as there are numbers, with as many segments each. Segment i has (i + 1) MiB.
  void AddImage(abi::DeviceMode mode, const std::vector<int>& segments_of_regions) {
    DeviceImage image;
    image.gpu = kGpu;
    image.mode = mode;
    uint64_t number = 0;
    for (const int count : segments_of_regions) {
      DeviceRegion::Parts parts;
      parts.mode = mode;
      for (int i = 0; i < count; ++i) {
        DeviceSegment segment;
        segment.bytes = ++number << 20;
        if (mode == abi::DeviceMode::kCudaIpc) {
          segment.handle.fill(static_cast<std::byte>(number));
        } else {
          segment.fd = Fd();
        }
        parts.segments.push_back(std::move(segment));
      }
      image.regions.push_back(std::make_shared<const DeviceRegion>(device_, std::move(parts)));
    }
    version_->devices.push_back(std::move(image));
  }

  std::vector<OutFrame> Frames(bool redeclare = false, bool device = true) {
    Grant grant;
    grant.lease = 5;
    grant.key = {"planner", 7};
    grant.resident = version_;
    if (!version_->devices.empty()) grant.device = version_->devices.data();
    return GrantFrames(9, 0, 1, grant, redeclare, device);
  }

  template <typename T>
  static T As(const OutFrame& frame) {
    T value{};
    EXPECT_GE(frame.bytes.size(), sizeof(T));
    std::memcpy(&value, frame.bytes.data(), sizeof(T));
    EXPECT_EQ(value.header.bytes, frame.bytes.size());
    EXPECT_EQ(value.header.fd_count, frame.fds.size());
    EXPECT_EQ(value.header.request_id, 9U);
    return value;
  }
  static std::vector<abi::DeviceRef> Refs(const OutFrame& frame) {
    const auto head = As<abi::DeviceFds>(frame);
    EXPECT_EQ(static_cast<abi::FrameType>(head.header.type), abi::FrameType::kDeviceFds);
    EXPECT_EQ(head.lease_id, 5U);
    std::vector<abi::DeviceRef> refs(head.count);
    EXPECT_EQ(frame.bytes.size(), sizeof(head) + refs.size() * sizeof(abi::DeviceRef));
    std::memcpy(refs.data(), frame.bytes.data() + sizeof(head),
                refs.size() * sizeof(abi::DeviceRef));
    return refs;
  }

  FakeDevice device_;
  std::shared_ptr<ResidentVersion> version_ = std::make_shared<ResidentVersion>();
};

TEST_F(GrantFramesTest, SegmentsOfAllRegionsComeInOrderWithADescriptorEach) {
  AddImage(abi::DeviceMode::kVmmFd, {2, 1});
  const auto frames = Frames();
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(As<abi::Granted>(frames[0]).device, 1U);
  const auto head = As<abi::DeviceFds>(frames[1]);
  EXPECT_EQ(static_cast<abi::DeviceMode>(head.mode), abi::DeviceMode::kVmmFd);
  EXPECT_EQ(head.total, 3U);
  const auto refs = Refs(frames[1]);
  ASSERT_EQ(refs.size(), 3U);
  const DeviceImage& image = version_->devices[0];
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(refs[i].segment, i);
    EXPECT_EQ(refs[i].bytes, uint64_t{i + 1} << 20);
  }
  EXPECT_EQ(frames[1].fds[0], &image.regions[0]->segments()[0].fd);
  EXPECT_EQ(frames[1].fds[1], &image.regions[0]->segments()[1].fd);
  EXPECT_EQ(frames[1].fds[2], &image.regions[1]->segments()[0].fd);
  EXPECT_EQ(frames[1].keep.get(), version_.get());
}

TEST_F(GrantFramesTest, ManySegmentsComeInSeveralFrames) {
  AddImage(abi::DeviceMode::kHostRegistered, {130});
  const auto frames = Frames();
  ASSERT_EQ(frames.size(), 4U);
  uint32_t next = 0;
  for (size_t i = 1; i < frames.size(); ++i) {
    const auto head = As<abi::DeviceFds>(frames[i]);
    EXPECT_EQ(static_cast<abi::DeviceMode>(head.mode), abi::DeviceMode::kHostRegistered);
    EXPECT_EQ(head.total, 130U);
    EXPECT_EQ(head.count, i < 3 ? 64U : 2U);
    EXPECT_EQ(frames[i].fds.size(), head.count);
    for (const abi::DeviceRef& ref : Refs(frames[i])) EXPECT_EQ(ref.segment, next++);
  }
  EXPECT_EQ(next, 130U);
}

TEST_F(GrantFramesTest, LegacyHandlesComeWithoutDescriptors) {
  AddImage(abi::DeviceMode::kCudaIpc, {2});
  const auto frames = Frames();
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_TRUE(frames[1].fds.empty());
  const auto refs = Refs(frames[1]);
  ASSERT_EQ(refs.size(), 2U);
  EXPECT_EQ(refs[1].ipc[0], 2);
  EXPECT_EQ(refs[1].ipc[63], 2);
}

TEST_F(GrantFramesTest, WithoutSegmentsOneFrameSaysTheMode) {
  AddImage(abi::DeviceMode::kHostDirect, {});
  auto frames = Frames();
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(static_cast<abi::DeviceMode>(As<abi::DeviceFds>(frames[1]).mode),
            abi::DeviceMode::kHostDirect);
  EXPECT_EQ(As<abi::DeviceFds>(frames[1]).total, 0U);
  EXPECT_TRUE(Refs(frames[1]).empty());
  version_->devices.clear();
  frames = Frames();
  ASSERT_EQ(frames.size(), 2U);
  EXPECT_EQ(static_cast<abi::DeviceMode>(As<abi::DeviceFds>(frames[1]).mode),
            abi::DeviceMode::kNone);
}

TEST_F(GrantFramesTest, WhoDidNotAskOrHasItAlreadyGetsNone) {
  AddImage(abi::DeviceMode::kVmmFd, {1});
  for (const bool redeclare : {false, true}) {
    const auto frames = Frames(redeclare, /*device=*/redeclare);
    ASSERT_EQ(frames.size(), 1U);
    EXPECT_EQ(As<abi::Granted>(frames[0]).device, 0U);
  }
}

}  // namespace
}  // namespace modelhost
