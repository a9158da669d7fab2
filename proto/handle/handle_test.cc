// Rights over shared memory and descriptors: what the types promise, the kernel keeps.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "proto/handle/fd_channel.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"
#include "proto/handle/seqlock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

SealedRegion MakeSealed(uint64_t bytes, uint8_t fill) {
  auto region = WritableRegion::Create("test", bytes, HugePages::kOff);
  EXPECT_TRUE(region.ok());
  std::ranges::fill(region->bytes(), std::byte{fill});
  auto sealed = std::move(*region).Seal();
  EXPECT_TRUE(sealed.ok());
  return *std::move(sealed);
}

TEST(Region, SealedBytesOutliveTheDescriptor) {
  ReadOnlyMapping mapping;
  {
    SealedRegion sealed = MakeSealed(3 << 20, 7);
    auto mapped = ReadOnlyMapping::MapSealed(sealed.fd, sealed.bytes);
    ASSERT_TRUE(mapped.ok());
    mapping = *std::move(mapped);
  }
  EXPECT_EQ(mapping.bytes().size(), 3U << 20);
  EXPECT_EQ(mapping.bytes()[3000000], std::byte{7});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapping.bytes().data()) % (2 << 20), 0U);
}

TEST(Region, ASealedRegionCannotBeWrittenEvenAfterReopening) {
  const SealedRegion sealed = MakeSealed(4096, 1);
  const std::string path = "/proc/self/fd/" + std::to_string(sealed.fd.get());
  const UniqueFd again(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(again.valid());
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again.get(), 0), MAP_FAILED);
  EXPECT_LT(::pwrite(again.get(), "x", 1, 0), 0);
  EXPECT_NE(::ftruncate(again.get(), 1), 0);
}

TEST(Mapping, AnUnsealedMemfdIsRefused) {
  const UniqueFd fd(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), 4096), 0);
  const auto mapped = ReadOnlyMapping::MapSealed(fd, 4096);
  ASSERT_FALSE(mapped.ok());
  EXPECT_EQ(mapped.error().code, Code::kPermissionDenied);
}

TEST(Mapping, AWrongSizeIsRefused) {
  const SealedRegion sealed = MakeSealed(4096, 1);
  EXPECT_EQ(ReadOnlyMapping::MapSealed(sealed.fd, 8192).error().code, Code::kOutOfRange);
  EXPECT_EQ(ReadOnlyMapping::MapSealed(sealed.fd, 100).error().code, Code::kOutOfRange);
}

TEST(Mapping, APageThatItsWriterStillWritesIsNotASealedOne) {
  auto page = OneWriterRegion::Create("page", 4096);
  ASSERT_TRUE(page.ok());
  EXPECT_FALSE(ReadOnlyMapping::MapSealed(page->fd(), 4096).ok());
  auto mapped = ReadOnlyMapping::MapOneWriter(page->fd(), 4096);
  ASSERT_TRUE(mapped.ok());
  page->bytes()[5] = std::byte{9};
  EXPECT_EQ(mapped->bytes()[5], std::byte{9});
}

struct Pair {
  UniqueFd a;
  UniqueFd b;
};
Pair MakePair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

TEST(FdChannel, CarriesAFrameWithItsDescriptors) {
  const Pair pair = MakePair();
  const SealedRegion sealed = MakeSealed(4096, 3);
  abi::Fetch fetch{};
  fetch.header = MakeHeader(abi::FrameType::kFetch, sizeof(fetch), 5, 2);
  fetch.region = 42;
  const std::array<const UniqueFd*, 2> fds = {&sealed.fd, &sealed.fd};
  ASSERT_TRUE(SendFrame(pair.a, AsBytes(fetch), {}, fds).ok());
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  auto frame = ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {});
  ASSERT_TRUE(frame.ok()) << frame.error().text;
  EXPECT_EQ(frame->header.request_id, 5U);
  ASSERT_EQ(frame->fds.size(), 2U);
  EXPECT_NE(::fcntl(frame->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_TRUE(ReadOnlyMapping::MapSealed(frame->fds[1], 4096).ok());
}

TEST(FdChannel, AFrameThatLiesAboutItsLengthIsRefused) {
  const Pair pair = MakePair();
  abi::Release release{};
  release.header = MakeHeader(abi::FrameType::kRelease, sizeof(release) + 8, 1, 0);
  ASSERT_TRUE(SendFrame(pair.a, AsBytes(release), {}, {}).ok());
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  const auto frame = ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {});
  ASSERT_FALSE(frame.ok());
  EXPECT_EQ(frame.error().code, Code::kInvalidArgument);
}

TEST(FdChannel, UnannouncedDescriptorsAreAnErrorAndClosed) {
  const Pair pair = MakePair();
  const SealedRegion sealed = MakeSealed(4096, 3);
  abi::Release release{};
  release.header = MakeHeader(abi::FrameType::kRelease, sizeof(release), 1, 0);
  const std::array<const UniqueFd*, 1> fds = {&sealed.fd};
  ASSERT_TRUE(SendFrame(pair.a, AsBytes(release), {}, fds).ok());
  const int before = ::dup(0);
  ::close(before);
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  EXPECT_FALSE(ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {}).ok());
  const int after = ::dup(0);
  ::close(after);
  EXPECT_EQ(before, after);  // The received descriptor's number is free again.
}

// The kernel lets a peer send up to 253.
TEST(FdChannel, MoreDescriptorsThanAFrameMayCarryAreMalformedAndGivenBack) {
  for (const int count : {65, 253}) {
    const Pair pair = MakePair();
    abi::Release release{};
    release.header = MakeHeader(abi::FrameType::kRelease, sizeof(release), 1, count);
    std::vector<char> control(CMSG_SPACE(sizeof(int) * count));
    iovec part{&release, sizeof(release)};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * count);
    auto* fds = reinterpret_cast<int*>(CMSG_DATA(head));
    for (int i = 0; i < count; ++i) fds[i] = pair.a.get();
    ASSERT_EQ(::sendmsg(pair.a.get(), &message, 0), static_cast<ssize_t>(sizeof(release)));
    std::vector<std::byte> buffer(abi::kMaxFrameBytes);
    std::vector<UniqueFd> refused;
    const auto frame = ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {}, &refused);
    ASSERT_FALSE(frame.ok());
    EXPECT_EQ(frame.error().code, Code::kInvalidArgument) << frame.error().text;
    EXPECT_EQ(refused.size(), static_cast<size_t>(count));
  }
}

TEST(FdChannel, LostDescriptorsNameTheLimit) {
  const Pair pair = MakePair();
  const SealedRegion sealed = MakeSealed(4096, 3);
  abi::Release release{};
  release.header = MakeHeader(abi::FrameType::kRelease, sizeof(release), 1, 3);
  const std::array<const UniqueFd*, 3> fds = {&sealed.fd, &sealed.fd, &sealed.fd};
  ASSERT_TRUE(SendFrame(pair.a, AsBytes(release), {}, fds).ok());
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(0);  // The lowest free number.
  ::close(next);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(next) + 1;  // Room for one of three, at most.
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto frame = ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {});
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(frame.ok());
  EXPECT_EQ(frame.error().code, Code::kResourceExhausted);
  EXPECT_THAT(frame.error().text, HasSubstr("RLIMIT_NOFILE"));
}

TEST(FdChannel, APeerThatIsGoneIsUnavailableAndASilentOneTimesOut) {
  Pair pair = MakePair();
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  EXPECT_EQ(ReceiveFrame(pair.b, buffer, ReceiveWait::kUntilDeadline,
                         std::chrono::steady_clock::now() + std::chrono::milliseconds(20))
                .error()
                .code,
            Code::kDeadlineExceeded);
  pair.a.Reset();
  EXPECT_EQ(ReceiveFrame(pair.b, buffer, ReceiveWait::kNo, {}).error().code, Code::kUnavailable);
}

TEST(FdChannel, EndingItWakesWhoWaitsHereAndThere) {
  Pair pair = MakePair();
  std::vector<std::byte> here(abi::kMaxFrameBytes);
  std::vector<std::byte> there(abi::kMaxFrameBytes);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::thread waiter([&] {
    EXPECT_EQ(ReceiveFrame(pair.a, here, ReceiveWait::kUntilDeadline, deadline).error().code,
              Code::kUnavailable);
  });
  EndChannel(pair.a);
  EXPECT_EQ(ReceiveFrame(pair.b, there, ReceiveWait::kUntilDeadline, deadline).error().code,
            Code::kUnavailable);
  waiter.join();
}

TEST(Seqlock, ReadersNeverSeeHalfAWrite) {
  std::atomic<uint64_t> sequence{0};
  std::array<std::atomic<uint64_t>, 4> words{};
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 1; !stop.load(); ++i) {
      const SeqlockWrite write(sequence);
      for (auto& word : words) word.store(i, std::memory_order_relaxed);
    }
  });
  uint64_t good = 0;
  for (int i = 0; i < 200000; ++i) {
    std::array<uint64_t, 4> copy{};
    if (!SeqlockRead(sequence, 64, [&] {
          for (size_t w = 0; w < copy.size(); ++w)
            copy[w] = words[w].load(std::memory_order_relaxed);
        })) {
      continue;
    }
    ++good;
    ASSERT_TRUE(std::ranges::all_of(copy, [&](uint64_t word) { return word == copy[0]; }));
  }
  stop = true;
  writer.join();
  EXPECT_GT(good, 0U);
}

TEST(Seqlock, AWriterThatDiedInsideAWriteDoesNotHoldAReader) {
  std::atomic<uint64_t> sequence{3};
  EXPECT_FALSE(SeqlockRead(sequence, 100, [] {}));
}

}  // namespace
}  // namespace modelhost
