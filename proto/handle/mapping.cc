#include "proto/handle/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14; older headers do not have it.
#endif

namespace modelhost {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

uintptr_t PageBytes() { return static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE)); }

Result<void> CheckSeals(const UniqueFd& fd, int wanted) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) {
    return Error{Code::kPermissionDenied, "shared memory: not a sealable memfd", errno};
  }
  if ((seals & wanted) != wanted) {
    return Error{Code::kPermissionDenied,
                 "shared memory: seals are missing, a peer could still write or resize it", 0};
  }
  return {};
}

Result<void> CheckSize(const UniqueFd& fd, uint64_t bytes, bool exact) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoError(errno, "stat of a received descriptor");
  const auto actual = static_cast<uint64_t>(info.st_size);
  if (!S_ISREG(info.st_mode)) {
    return Error{Code::kFailedPrecondition, "received descriptor: not a regular file", 0};
  }
  if (exact ? actual != bytes : actual < bytes) {
    return Error{Code::kOutOfRange,
                 "received descriptor: " + std::to_string(actual) + " bytes, expected " +
                     std::to_string(bytes),
                 0};
  }
  return {};
}

}  // namespace

void Prefault(std::span<const std::byte> bytes) {
  // The kernel wants a page's first byte.
  const auto first = reinterpret_cast<uintptr_t>(bytes.data()) & ~(PageBytes() - 1);
  const auto end = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size();
  (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_POPULATE_READ);
}

void DropResident(std::span<const std::byte> bytes) {
  const auto first = reinterpret_cast<uintptr_t>(bytes.data()) & ~(PageBytes() - 1);
  const auto end = reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size();
  // The mapping is shared and read-only: nothing is lost.
  if (end > first) (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
}

Result<ReadOnlyMapping> ReadOnlyMapping::Map(const UniqueFd& fd, uint64_t bytes, Align align) {
  if (bytes == 0) return ReadOnlyMapping();
  int sharing = MAP_SHARED;
  void* direct = ::mmap(nullptr, bytes, PROT_READ, sharing, fd.get(), 0);
  if (direct == MAP_FAILED && errno == EPERM) {
    // Linux before 6.7 refuses a shared map of what is sealed against writing when the descriptor
    // could write. A private one that nobody writes to shows the same pages.
    sharing = MAP_PRIVATE;
    direct = ::mmap(nullptr, bytes, PROT_READ, sharing, fd.get(), 0);
  }
  if (direct == MAP_FAILED) return ErrnoError(errno, "map " + std::to_string(bytes) + " bytes");
  // Newer kernels align by themselves what could be mapped in huge pages.
  if (bytes < kHugePage || align == Align::kPage ||
      reinterpret_cast<uintptr_t>(direct) % kHugePage == 0) {
    return ReadOnlyMapping({static_cast<const std::byte*>(direct), bytes});
  }
  ::munmap(direct, bytes);
  // Reserve with room to align, map into the middle, give the rest back.
  const uint64_t room = bytes + kHugePage;
  void* reserved =
      ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return ErrnoError(errno, "reserve " + std::to_string(room) + " bytes of address space");
  }
  const auto start = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = (start + kHugePage - 1) & ~(kHugePage - 1);
  void* at =
      ::mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ, sharing | MAP_FIXED, fd.get(), 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    return ErrnoError(error, "map " + std::to_string(bytes) + " bytes");
  }
  if (aligned > start) ::munmap(reserved, aligned - start);
  const uintptr_t tail = (aligned + bytes + PageBytes() - 1) & ~(PageBytes() - 1);
  if (start + room > tail) ::munmap(reinterpret_cast<void*>(tail), start + room - tail);
  return ReadOnlyMapping({static_cast<const std::byte*>(at), bytes});
}

Result<ReadOnlyMapping> ReadOnlyMapping::MapSealed(const UniqueFd& fd, uint64_t bytes,
                                                   Align align) {
  if (auto checked = CheckSeals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
      !checked.ok()) {
    return std::move(checked).error();
  }
  if (auto checked = CheckSize(fd, bytes, /*exact=*/true); !checked.ok()) {
    return std::move(checked).error();
  }
  return Map(fd, bytes, align);
}

Result<ReadOnlyMapping> ReadOnlyMapping::MapOneWriter(const UniqueFd& fd, uint64_t bytes) {
  if (auto checked =
          CheckSeals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
      !checked.ok()) {
    return std::move(checked).error();
  }
  if (auto checked = CheckSize(fd, bytes, /*exact=*/true); !checked.ok()) {
    return std::move(checked).error();
  }
  return Map(fd, bytes, Align::kPage);
}

Result<ReadOnlyMapping> ReadOnlyMapping::MapFile(const UniqueFd& fd, uint64_t bytes) {
  if (auto checked = CheckSize(fd, bytes, /*exact=*/false); !checked.ok()) {
    return std::move(checked).error();
  }
  return Map(fd, bytes, Align::kHugePage);
}

ReadOnlyMapping& ReadOnlyMapping::operator=(ReadOnlyMapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

ReadOnlyMapping::~ReadOnlyMapping() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

Result<SharedMapping> SharedMapping::Map(const UniqueFd& fd, uint64_t bytes) {
  if (auto checked = CheckSeals(fd, F_SEAL_SHRINK); !checked.ok()) {
    return std::move(checked).error();
  }
  if (auto checked = CheckSize(fd, bytes, /*exact=*/true); !checked.ok()) {
    return std::move(checked).error();
  }
  if (bytes == 0) return Error{Code::kOutOfRange, "received descriptor: no bytes", 0};
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED) return ErrnoError(errno, "map " + std::to_string(bytes) + " bytes");
  return SharedMapping({static_cast<std::byte*>(at), bytes});
}

SharedMapping::~SharedMapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace modelhost
