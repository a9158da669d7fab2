// Shared memory that this process makes: first writable by it alone, then sealed for good.
//
//   WritableRegion --Seal()--> SealedRegion        weights, version indexes: nobody writes again
//   OneWriterRegion                                the catalogue page: the maker keeps writing
//
// Narrowing consumes the wider right; no call widens. Sizes are in bytes. All space is allocated
// when a region is made: memory that cannot be had is an error here, never a SIGBUS in a reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

enum class HugePages { kOff, kAuto };  // kAuto asks for shmem huge pages and does without.

// A sealed memfd: SHRINK|GROW|WRITE|SEAL are set. Map it with ReadOnlyMapping::MapSealed.
struct SealedRegion {
  UniqueFd fd;
  uint64_t bytes = 0;
};

class WritableRegion {
 public:
  // `name` shows in /proc/PID/maps. RESOURCE_EXHAUSTED when the memory cannot be had. `go_on`, when
  // given, is asked every 64 MiB or so; false from it ends this with CANCELLED.
  static Result<WritableRegion> Create(const std::string& name, uint64_t bytes, HugePages huge,
                                       const std::function<bool()>& go_on = nullptr);

  WritableRegion(WritableRegion&& other) noexcept;
  WritableRegion& operator=(WritableRegion&&) = delete;
  ~WritableRegion();

  std::span<std::byte> bytes() { return bytes_; }
  // The same memory, for filling with write calls: for gigabytes much cheaper than faulting each
  // page of bytes() in.
  const UniqueFd& fd() const { return fd_; }
  // Unmaps and seals. Spans from bytes() are dead after it.
  Result<SealedRegion> Seal() &&;
  // The same, but against a change of its size alone (SHRINK|GROW|SEAL): whoever has the descriptor
  // can write. For memory that a driver must be able to map writable.
  Result<UniqueFd> SealSize() &&;

 private:
  WritableRegion(UniqueFd fd, std::span<std::byte> bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

// Sealed SHRINK|GROW|FUTURE_WRITE|SEAL: this object's mapping is the only writable one there will
// be.
class OneWriterRegion {
 public:
  static Result<OneWriterRegion> Create(const std::string& name, uint64_t bytes);

  OneWriterRegion(OneWriterRegion&& other) noexcept;
  OneWriterRegion& operator=(OneWriterRegion&&) = delete;
  ~OneWriterRegion();

  std::span<std::byte> bytes() { return bytes_; }
  const UniqueFd& fd() const { return fd_; }

 private:
  OneWriterRegion(UniqueFd fd, std::span<std::byte> bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  UniqueFd fd_;
  std::span<std::byte> bytes_;
};

}  // namespace modelhost
