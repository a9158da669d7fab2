#include "daemon/device_agent/source_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace modelhost {
namespace {

constexpr uint64_t kBlock = 4096;

// As much of `into` as the file has. A direct read that stops inside a block cannot be continued.
Result<uint64_t> ReadSome(const UniqueFd& fd, uint64_t offset, std::span<std::byte> into,
                          bool direct) {
  uint64_t done = 0;
  while (done < into.size() && !(direct && done % kBlock != 0)) {
    const ssize_t got = ::pread(fd.get(), into.data() + done, into.size() - done,
                                static_cast<off_t>(offset + done));
    if (got == 0) break;
    if (got > 0) {
      done += static_cast<uint64_t>(got);
    } else if (errno != EINTR) {
      return ErrnoError(errno, "read the source at offset " + std::to_string(offset + done));
    }
  }
  return done;
}

Error TooShort(uint64_t end) {
  return Error{Code::kDataLoss,
               "the source ends before offset " + std::to_string(end) + ": it was truncated", 0};
}

int64_t WrittenNs(const struct stat& info) {
  return int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

}  // namespace

Result<SourceFile> OpenSource(UniqueFd fd, bool direct) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError(errno, "look at the source");
  if (!S_ISREG(info.st_mode)) {
    return Error{Code::kFailedPrecondition, "the source is not a regular file", 0};
  }
  SourceFile source{std::move(fd), UniqueFd(), static_cast<uint64_t>(info.st_size),
                    WrittenNs(info)};
  if (direct) {
    const std::string path = "/proc/self/fd/" + std::to_string(source.fd.get());
    // lint: allow(open) only reopening changes the flags of a lent descriptor
    source.direct = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  }
  return source;
}

Result<void> CheckUnchanged(const SourceFile& source) {
  struct stat info {};
  if (::fstat(source.fd.get(), &info) != 0) return ErrnoError(errno, "look at the source");
  if (static_cast<uint64_t>(info.st_size) != source.bytes || WrittenNs(info) != source.written_ns) {
    return Error{Code::kDataLoss, "the source was written to while it was read", 0};
  }
  return {};
}

SourceReader::SourceReader(uint64_t most) : room_((most / kBlock + 2) * kBlock) {}

Result<void> SourceReader::FillWindow(const SourceFile& source, uint64_t offset, uint64_t bytes) {
  if (window_ == nullptr) {
    window_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlock, room_)));
    if (window_ == nullptr) return ErrnoError(ENOMEM, "a buffer for direct reads");
  }
  of_ = nullptr;
  first_ = offset / kBlock * kBlock;
  const uint64_t most = std::min(room_, (offset - first_ + bytes + kBlock - 1) / kBlock * kBlock);
  const std::span<std::byte> window(window_.get(), most);
  auto got = ReadSome(source.direct, first_, window, /*direct=*/true);
  if (!got.ok() && got.error().sys_errno == EINVAL) got = uint64_t{0};  // Larger blocks than ours.
  if (!got.ok()) return std::move(got).error();
  if (*got < most && first_ + *got < source.bytes) {
    // It stopped before the end: the rest as usual.
    const auto rest = ReadSome(source.fd, first_ + *got, window.subspan(*got), /*direct=*/false);
    if (!rest.ok()) return rest.error();
    *got += *rest;
  }
  filled_ = *got;
  of_ = &source;
  return {};
}

Result<void> SourceReader::Read(const SourceFile& source, uint64_t offset,
                                std::span<std::byte> into, uint64_t ahead) {
  if (into.empty()) return {};
  const uint64_t end = offset + into.size();
  if (!source.direct.valid()) {
    const auto got = ReadSome(source.fd, offset, into, /*direct=*/false);
    if (!got.ok()) return got.error();
    if (*got < into.size()) return TooShort(end);
    return {};
  }
  if (of_ != &source || offset < first_ || end > first_ + filled_) {
    auto filled = FillWindow(source, offset, std::max<uint64_t>(into.size(), ahead));
    if (!filled.ok()) return filled;
  }
  if (end > first_ + filled_) return TooShort(end);
  std::memcpy(into.data(), window_.get() + (offset - first_), into.size());
  return {};
}

}  // namespace modelhost
