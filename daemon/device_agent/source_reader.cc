#include "daemon/device_agent/source_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace modelhost {
namespace {

constexpr uint64_t kBlock = 4096;

// As much of `into` as the file has.
Result<uint64_t> ReadSome(const UniqueFd& fd, uint64_t offset, std::span<std::byte> into) {
  uint64_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(fd.get(), into.data() + done, into.size() - done,
                                static_cast<off_t>(offset + done));
    if (got > 0) {
      done += static_cast<uint64_t>(got);
    } else if (got == 0) {
      break;
    } else if (errno != EINTR) {
      return ErrnoError(errno, "read the source at offset " + std::to_string(offset + done));
    }
    // A direct read that stops inside a block has met the end of the file.
    if (got > 0 && static_cast<uint64_t>(got) % kBlock != 0 && done < into.size()) break;
  }
  return done;
}

Error TooShort(uint64_t end) {
  return Error{Code::kDataLoss,
               "the source ends before offset " + std::to_string(end) + ": it was truncated", 0};
}

}  // namespace

SourceFile OpenSource(UniqueFd fd, bool direct) {
  SourceFile source{std::move(fd), UniqueFd()};
  if (direct) {
    const std::string path = "/proc/self/fd/" + std::to_string(source.fd.get());
    // lint: allow(open) only reopening changes the flags of a lent descriptor
    source.direct = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  }
  return source;
}

SourceReader::SourceReader(uint64_t most) : room_((most / kBlock + 2) * kBlock) {}

Result<void> SourceReader::FillWindow(const SourceFile& source, uint64_t offset, uint64_t bytes) {
  if (window_ == nullptr) {
    window_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlock, room_)));
    if (window_ == nullptr) return ErrnoError(ENOMEM, "a buffer for direct reads");
  }
  of_ = nullptr;
  first_ = offset / kBlock * kBlock;
  const uint64_t wanted = std::min(room_, (offset - first_ + bytes + kBlock - 1) / kBlock * kBlock);
  auto got = ReadSome(source.direct, first_, {window_.get(), wanted});
  if (!got.ok() && got.error().sys_errno == EINVAL) {  // Larger blocks than ours: as usual, then.
    got = ReadSome(source.fd, first_, {window_.get(), wanted});
  }
  if (!got.ok()) return got.error();
  filled_ = *got;
  of_ = &source;
  return {};
}

Result<void> SourceReader::Read(const SourceFile& source, uint64_t offset,
                                std::span<std::byte> into, uint64_t ahead) {
  if (!source.direct.valid()) {
    auto got = ReadSome(source.fd, offset, into);
    // A short read of a pipe-like file would end early; what is left shows whether it is the end.
    while (got.ok() && *got < into.size()) {
      const auto more = ReadSome(source.fd, offset + *got, into.subspan(*got));
      if (!more.ok()) return more.error();
      if (*more == 0) return TooShort(offset + into.size());
      *got += *more;
    }
    if (!got.ok()) return got.error();
    return {};
  }
  if (of_ != &source || offset < first_ || offset + into.size() > first_ + filled_) {
    if (auto filled = FillWindow(source, offset, std::max<uint64_t>(into.size(), ahead));
        !filled.ok()) {
      return filled;
    }
  }
  if (offset + into.size() > first_ + filled_) return TooShort(offset + into.size());
  std::memcpy(into.data(), window_.get() + (offset - first_), into.size());
  return {};
}

}  // namespace modelhost
