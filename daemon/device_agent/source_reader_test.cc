#include "daemon/device_agent/source_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <vector>

#include "gmock/gmock.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Bytes(size_t count) {
  std::mt19937_64 random(count);
  std::vector<std::byte> bytes(count);
  for (std::byte& one : bytes) one = static_cast<std::byte>(random());
  return bytes;
}

// On a disk where there is one, so that O_DIRECT means something.
UniqueFd FileOf(const std::vector<std::byte>& bytes) {
  UniqueFd fd(::open(::testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return fd;
}

UniqueFd Again(const UniqueFd& fd) { return UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3)); }

SourceFile Source(const UniqueFd& fd, bool direct) {
  auto source = OpenSource(Again(fd), direct);
  EXPECT_TRUE(source.ok());
  return *std::move(source);
}

class SourceReaderTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(PageCache, SourceReaderTest, ::testing::Bool(),
                         [](const auto& one) { return one.param ? "Direct" : "Cached"; });

TEST_P(SourceReaderTest, AnyPieceOfAFileIsReadWhole) {
  for (const size_t size : {size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{300'001}}) {
    SCOPED_TRACE(size);
    const std::vector<std::byte> bytes = Bytes(size);
    const UniqueFd fd = FileOf(bytes);
    const SourceFile source = Source(fd, GetParam());
    constexpr uint64_t kMost = 40'000;
    SourceReader reader(kMost);
    std::mt19937_64 random(7);
    for (int i = 0; i < 300; ++i) {
      // A third of them at the very end, with pieces that go on beyond what is asked for now.
      const uint64_t count = 1 + random() % std::min<uint64_t>(kMost, size);
      const uint64_t offset = i % 3 == 0 ? size - count : random() % (size - count + 1);
      std::vector<std::byte> got(count);
      const auto read = reader.Read(source, offset, got, count + random() % kMost);
      ASSERT_TRUE(read.ok()) << read.error().text;
      ASSERT_TRUE(std::equal(got.begin(), got.end(), bytes.begin() + static_cast<int64_t>(offset)))
          << count << " bytes at " << offset;
    }
    std::vector<std::byte> got(2);
    const auto over = reader.Read(source, size - 1, got, 2);
    ASSERT_FALSE(over.ok());
    EXPECT_EQ(over.error().code, Code::kDataLoss);
    EXPECT_FALSE(reader.Read(source, uint64_t{1} << 50, got, 2).ok());
    EXPECT_TRUE(reader.Read(source, uint64_t{1} << 50, std::span(got).first(0), 0).ok());
  }
}

TEST_P(SourceReaderTest, PiecesOfTwoFilesAreKeptApart) {
  const std::vector<std::byte> bytes[] = {Bytes(10'000), Bytes(10'001)};
  const UniqueFd fds[] = {FileOf(bytes[0]), FileOf(bytes[1])};
  const SourceFile sources[] = {Source(fds[0], GetParam()), Source(fds[1], GetParam())};
  SourceReader reader(4096);
  for (size_t i = 0; i < 100; ++i) {
    std::byte got{};
    ASSERT_TRUE(reader.Read(sources[i % 2], 50 * i, std::span(&got, 1), 4096).ok());
    EXPECT_EQ(got, bytes[i % 2][50 * i]);
  }
}

TEST_P(SourceReaderTest, AFileThatIsCutIsDataLoss) {
  const UniqueFd fd = FileOf(Bytes(100'000));
  const SourceFile source = Source(fd, GetParam());
  EXPECT_TRUE(CheckUnchanged(source).ok());
  SourceReader reader(8192);
  std::vector<std::byte> got(8192);
  ASSERT_TRUE(reader.Read(source, 0, got, got.size()).ok());
  ASSERT_EQ(::ftruncate(fd.get(), 50'001), 0);
  const auto read = reader.Read(source, 50'000, got, got.size());
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.error().code, Code::kDataLoss);
  EXPECT_THAT(read.error().text, HasSubstr("ends before offset 58192: it was truncated"));
  EXPECT_EQ(CheckUnchanged(source).error().code, Code::kDataLoss);
}

TEST_P(SourceReaderTest, AFileThatIsWrittenToIsDataLoss) {
  const UniqueFd fd = FileOf(Bytes(100'000));
  const timespec long_ago[2] = {{1'000'000'000, 0}, {1'000'000'000, 0}};
  ASSERT_EQ(::futimens(fd.get(), long_ago), 0);
  const SourceFile source = Source(fd, GetParam());
  ASSERT_EQ(::fchmod(fd.get(), 0400), 0);  // As when a store is tidied up: not a change.
  EXPECT_TRUE(CheckUnchanged(source).ok());
  ASSERT_EQ(::pwrite(fd.get(), "x", 1, 3), 1);
  EXPECT_EQ(CheckUnchanged(source).error().code, Code::kDataLoss);
}

TEST_P(SourceReaderTest, MemoryIsASourceToo) {
  const std::vector<std::byte> bytes = Bytes(9'999);
  const UniqueFd fd(::memfd_create("source", MFD_CLOEXEC));
  ASSERT_EQ(::pwrite(fd.get(), bytes.data(), bytes.size(), 0), 9'999);
  const SourceFile source = Source(fd, GetParam());
  SourceReader reader(9'999);
  std::vector<std::byte> got(9'998);
  ASSERT_TRUE(reader.Read(source, 1, got, got.size()).ok());
  EXPECT_TRUE(std::equal(got.begin(), got.end(), bytes.begin() + 1));
}

TEST(SourceReader, WhatIsNoFileIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  UniqueFd read(ends[0]);
  const UniqueFd write(ends[1]);
  const auto source = OpenSource(std::move(read), true);
  ASSERT_FALSE(source.ok());
  EXPECT_EQ(source.error().code, Code::kFailedPrecondition);
}

}  // namespace
}  // namespace modelhost
