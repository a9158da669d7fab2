// The resident bytes of one file content, shared by every version that has it. Immutable; any
// thread.
//
// A content is known by its ContentKey, not by its SHA-256 alone: what a load verifies are the
// chunks, so only manifests that agree on every chunk may share a region. A manifest that lies
// about the whole file's digest thus spoils nobody else's version.
//
// Destruction unmaps, and thereby unlocks, which can take long for gigabytes: let a pool thread
// drop the last one.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "daemon/platform/os.h"
#include "daemon/region/memory_budget.h"
#include "daemon/store/digest.h"
#include "daemon/store/manifest.h"
#include "daemon/store/model_policy.h"
#include "proto/abi/version_index.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// What was reached, which may be less than what was asked (memlock best_effort).
enum class HostTier { kNone, kMapped, kWarm, kPinned };
absl::string_view HostTierName(HostTier tier);

// SHA-256 over a file's digest, size, and chunk digests.
Digest ContentKey(const ManifestFile& file);

struct RegionKey {
  Digest content;
  Residency residency = Residency::kMapped;
  friend auto operator<=>(const RegionKey&, const RegionKey&) = default;
};

class HostRegion {
 public:
  struct Parts {
    Digest digest;   // SHA-256 of the bytes.
    Digest content;  // ContentKey.
    abi::RegionKind kind = abi::RegionKind::kFile;
    Residency residency = Residency::kMapped;
    HostTier tier = HostTier::kNone;
    UniqueFd fd;  // O_RDONLY file or sealed memfd; what clients get.
    uint64_t bytes = 0;
    ReadOnlyMapping mapping;
    Reservation host;
    Reservation memlock;
    FileInfo source;          // The file it came from, as it was.
    std::string source_path;  // For people.
  };

  HostRegion(Os& os, Parts parts) : os_(os), parts_(std::move(parts)) {}
  HostRegion(const HostRegion&) = delete;

  const Digest& digest() const { return parts_.digest; }
  abi::RegionKind kind() const { return parts_.kind; }
  Residency residency() const { return parts_.residency; }
  RegionKey key() const { return {parts_.content, parts_.residency}; }
  HostTier tier() const { return parts_.tier; }
  const UniqueFd& fd() const { return parts_.fd; }
  uint64_t bytes() const { return parts_.bytes; }
  std::span<const std::byte> data() const { return parts_.mapping.bytes(); }
  uint64_t locked_bytes() const { return parts_.tier == HostTier::kPinned ? parts_.bytes : 0; }
  uint64_t booked_bytes() const { return parts_.host.bytes(); }
  const std::string& source_path() const { return parts_.source_path; }
  const FileInfo& source() const { return parts_.source; }
  // How many of its bytes are in memory now.
  uint64_t ResidentBytes() const;
  // False when the source file is no longer as it was (size or mtime): truncated or written in
  // place. Not ctime: a hard link from another version, or a chmod, changes that and no byte.
  // Always true for sealed regions.
  bool SourceUnchanged() const;

 private:
  Os& os_;
  Parts parts_;
};

}  // namespace modelhost
