// Views of shared bytes: read-only, but for SharedMapping.
//
// Two ways in, and the name says what each proves:
//   MapSealed  the bytes cannot change or shrink: the kernel's seals say so, even against root.
//              (An O_RDONLY memfd proves nothing: any peer reopens it for writing through /proc.)
//   MapFile    the bytes are a store file, read-only by mode, owner and mount alone. A writer with
//              the right to the file could change it, and truncation raises SIGBUS.
//
// Sizes are in bytes. Mappings start at a multiple of 2 MiB when they are that large (and not
// Align::kPage), so that large folios and huge pages can be mapped whole. Thread-compatible: const
// calls may run concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// Fills the page tables of these mapped bytes in one call instead of a fault for every few pages;
// a fault costs several times as much, and on a virtual machine far more. Only a hint: where it
// fails (an old kernel, bytes past the end of a truncated file) the faults come as ever.
void Prefault(std::span<const std::byte> bytes);

// The pages of these mapped bytes leave this process, but not the page cache: a program that
// streams through a file larger than its memory limit stays small. Reading them again faults them
// in again. Only for bytes of a ReadOnlyMapping.
void DropResident(std::span<const std::byte> bytes);

// kPage is for tables that are looked up and not streamed; it takes fewer system calls.
enum class Align : uint8_t { kPage, kHugePage };

class ReadOnlyMapping {
 public:
  // Maps all of `fd`, which the caller may then close: the mapping lives on.
  //   PERMISSION_DENIED   a seal is missing: a peer could still write or resize
  //   OUT_OF_RANGE        the file is not exactly `bytes` long (the sender's claim)
  //   RESOURCE_EXHAUSTED  no address space, or no map count, is left
  static Result<ReadOnlyMapping> MapSealed(const UniqueFd& fd, uint64_t bytes,
                                           Align align = Align::kHugePage);

  // As MapSealed, but its single writer keeps writing through a mapping made before the seals
  // (F_SEAL_FUTURE_WRITE): the catalogue page.
  static Result<ReadOnlyMapping> MapOneWriter(const UniqueFd& fd, uint64_t bytes);

  // Maps a regular file of at least `bytes` bytes; the first `bytes` of it.
  //   FAILED_PRECONDITION not a regular file;  OUT_OF_RANGE  shorter than `bytes`
  static Result<ReadOnlyMapping> MapFile(const UniqueFd& fd, uint64_t bytes);

  ReadOnlyMapping() = default;  // Empty: bytes().empty().
  ReadOnlyMapping(ReadOnlyMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  ReadOnlyMapping& operator=(ReadOnlyMapping&& other) noexcept;
  ~ReadOnlyMapping();  // Unmaps.

  // Page aligned. Valid until this object is destroyed, moved from or assigned to.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit ReadOnlyMapping(std::span<const std::byte> bytes) : bytes_(bytes) {}
  static Result<ReadOnlyMapping> Map(const UniqueFd& fd, uint64_t bytes, Align align);

  std::span<const std::byte> bytes_;
};

// Memory of another process, mapped for writing too, because a GPU's driver takes no other pages:
// nothing protects it. Only for memory that was made for that.
class SharedMapping {
 public:
  // `fd`, which the caller may then close, cannot shrink: PERMISSION_DENIED. OUT_OF_RANGE: it is
  // not exactly `bytes` long. RESOURCE_EXHAUSTED.
  static Result<SharedMapping> Map(const UniqueFd& fd, uint64_t bytes);

  SharedMapping(SharedMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SharedMapping& operator=(SharedMapping&& other) = delete;
  ~SharedMapping();  // Unmaps.

  // Page aligned.
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit SharedMapping(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace modelhost
