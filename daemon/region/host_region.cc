#include "daemon/region/host_region.h"

#include <array>
#include <cstring>

namespace modelhost {

absl::string_view HostTierName(HostTier tier) {
  switch (tier) {
    case HostTier::kNone:
      return "none";
    case HostTier::kMapped:
      return "mapped";
    case HostTier::kWarm:
      return "warm";
    case HostTier::kPinned:
      return "pinned";
  }
  return "none";
}

Digest ContentKey(const ManifestFile& file) {
  Sha256Stream stream;
  const auto add = [&](const void* data, size_t bytes) {
    stream.Update({static_cast<const std::byte*>(data), bytes});
  };
  add(file.sha256.bytes.data(), file.sha256.bytes.size());
  const std::array<uint64_t, 2> sizes = {file.bytes, file.chunk_bytes};
  add(sizes.data(), sizeof(sizes));
  for (const Digest& chunk : file.chunks) add(chunk.bytes.data(), chunk.bytes.size());
  return stream.Finish();
}

uint64_t HostRegion::ResidentBytes() const {
  return os_.ResidentBytes(data()).value_or(0);  // A gauge: what cannot be told is not there.
}

bool HostRegion::SourceUnchanged() const {
  if (parts_.kind == abi::RegionKind::kSealed) return true;
  const absl::StatusOr<FileInfo> now = os_.Stat(parts_.fd);
  return now.ok() && now->bytes == parts_.source.bytes && now->mtime_ns == parts_.source.mtime_ns;
}

}  // namespace modelhost
