#include "proto/handle/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace modelhost {
namespace {

struct Memory {
  UniqueFd fd;
  std::span<std::byte> bytes;
};

// Zeroing takes about 10 ms for this much.
constexpr uint64_t kAllocateBytes = uint64_t{64} << 20;

Result<Memory> Make(const std::string& name, uint64_t bytes, HugePages huge,
                    const std::function<bool()>& go_on) {
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoError(errno, "create shared memory " + name);
  if (bytes == 0) return Memory{std::move(fd), {}};
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoError(errno, "size shared memory " + name);
  }
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return ErrnoError(errno, "map shared memory " + name);
  Memory memory{std::move(fd), {static_cast<std::byte*>(at), bytes}};
  // Advice must come before the pages do; a kernel without shmem huge pages refuses it, which is
  // fine.
  if (huge == HugePages::kAuto) (void)::madvise(at, bytes, MADV_HUGEPAGE);
  int error = 0;
  for (uint64_t done = 0; done < bytes && error == 0;) {
    const uint64_t piece = std::min(kAllocateBytes, bytes - done);
    if (go_on && !go_on()) {
      error = ECANCELED;
    } else if (::fallocate(memory.fd.get(), 0, static_cast<off_t>(done),
                           static_cast<off_t>(piece)) == 0) {
      done += piece;
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error != 0) {
    ::munmap(at, bytes);
    return ErrnoError(error,
                      "allocate " + std::to_string(bytes) + " bytes of shared memory for " + name);
  }
  return memory;
}

void Unmap(std::span<std::byte> bytes) {
  if (!bytes.empty()) ::munmap(bytes.data(), bytes.size());
}

}  // namespace

Result<WritableRegion> WritableRegion::Create(const std::string& name, uint64_t bytes,
                                              HugePages huge, const std::function<bool()>& go_on) {
  auto memory = Make(name, bytes, huge, go_on);
  if (!memory.ok()) return std::move(memory).error();
  return WritableRegion(std::move(memory->fd), memory->bytes);
}

WritableRegion::WritableRegion(WritableRegion&& other) noexcept
    : fd_(std::move(other.fd_)), bytes_(std::exchange(other.bytes_, {})) {}

WritableRegion::~WritableRegion() { Unmap(bytes_); }

Result<SealedRegion> WritableRegion::Seal() && {
  const uint64_t bytes = bytes_.size();
  Unmap(std::exchange(bytes_, {}));  // F_SEAL_WRITE is refused while a writable mapping lives.
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) !=
      0) {
    return ErrnoError(errno, "seal shared memory");
  }
  return SealedRegion{std::move(fd_), bytes};
}

Result<UniqueFd> WritableRegion::SealSize() && {
  Unmap(std::exchange(bytes_, {}));
  if (::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoError(errno, "seal the size of shared memory");
  }
  return std::move(fd_);
}

Result<OneWriterRegion> OneWriterRegion::Create(const std::string& name, uint64_t bytes) {
  auto memory = Make(name, bytes, HugePages::kOff, nullptr);
  if (!memory.ok()) return std::move(memory).error();
  OneWriterRegion region(std::move(memory->fd), memory->bytes);
  if (::fcntl(region.fd_.get(), F_ADD_SEALS,
              F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return ErrnoError(errno, "seal shared memory " + name);
  }
  return region;
}

OneWriterRegion::OneWriterRegion(OneWriterRegion&& other) noexcept
    : fd_(std::move(other.fd_)), bytes_(std::exchange(other.bytes_, {})) {}

OneWriterRegion::~OneWriterRegion() { Unmap(bytes_); }

}  // namespace modelhost
