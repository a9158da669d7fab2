// The index of one version: tensors, files, regions, metadata, as flat read-only tables.
//
// One memfd, fully sealed (SHRINK|GROW|WRITE|SEAL). The daemon writes it once; a client maps it and
// looks names up in place, so attaching costs the same for ten tensors and for 100,000.
//
//   0            IndexHeader (512 bytes)
//   components   ComponentEntry[component_count]
//   regions      RegionEntry[region_count]
//   files        FileEntry[file_count], sorted by path, bytewise
//   dims         int64_t[dim_count]: shapes, and strides where not row-major; tensors share them
//   strings      char[string_bytes]; every string is followed by a NUL
//   tensors      TensorEntry[tensor_count], sorted by (name, component), bytewise
//   buckets      Bucket[bucket_count], see HashName
//   metadata     MetadataEntry[metadata_count], sorted by key
//   segments     DeviceSegmentEntry[device_segments.count]
//
// Readers go by the header's offsets, not by this order, which keeps what every attach touches in
// the first pages.
// All offsets are in bytes from the start of the index and multiples of 8; all counts are numbers
// of entries. A client checks the header against the size of the memfd once (IndexFits) and every
// number that it follows from an entry when it follows it: a broken index is an error, never a
// crash.
//
// A region is the bytes of one file, or of all files with the same digest. Every file names its
// region; a tensor names a region and an offset in it.
//
// Tensors that the policy puts on GPUs (kTensorOnDevice) are packed into device segments, the same
// on every GPU: `device_segment` and `device_offset` say where. Their memory comes with the grant
// (handle_frame.h, DeviceFds). Without segments the GPU reads the host region itself.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "proto/abi/dtype.h"
#include "proto/abi/shared_layout.h"

namespace modelhost::abi {

inline constexpr uint64_t kIndexMagic = 0x3158444e494c444dULL;  // "MDLINDX1"
inline constexpr uint32_t kIndexAbi = 1;
inline constexpr uint32_t kNone = 0xffffffffU;
inline constexpr uint32_t kMaxRank = 4096;  // A longer shape is refused at load.

struct TableRef {
  uint64_t offset;
  uint64_t count;
};

struct StringRef {
  uint32_t offset;  // From the start of the string table; a NUL follows the last byte.
  uint32_t length;  // 0: the empty string, whatever the offset.
};

// Of HashName; random, anew for every index. A fixed one would let the author of a model choose
// names that all fall into one bucket.
struct HashKey {
  uint64_t low;
  uint64_t high;
};

struct IndexHeader {
  uint64_t magic;
  uint32_t abi_version;
  uint32_t header_bytes;
  uint64_t index_bytes;  // The exact size of the memfd.
  uint64_t version;
  char model[kNameBytes];
  uint8_t digest[kDigestBytes];  // Of the version (store/manifest.h).
  TableRef tensors;
  TableRef buckets;  // count is a power of two, or 0 when there is no tensor.
  TableRef dims;
  TableRef files;
  TableRef regions;
  TableRef components;
  TableRef metadata;
  TableRef strings;
  StringRef format;  // "safetensors", "gguf", ...; "mixed" when components differ.
  HashKey hash_key;
  TableRef device_segments;
  uint8_t reserved[512 - 136 - 8 * 16 - 8 - 16 - 16];
};

enum TensorFlags : uint8_t {
  kTensorMappable = 1,  // [region_offset, +nbytes) holds the values as they are.
  kTensorStrided = 2,   // `strides` is valid; the range covers the view.
  kTensorOnDevice = 4,  // Also on the GPUs that the policy names; only with kTensorMappable.
};

struct TensorEntry {
  StringRef name;
  uint64_t region_offset;  // Of the first byte, from the start of the region.
  uint64_t nbytes;
  uint64_t device_offset;  // In device segment `device_segment`; unused when that is kNone.
  uint32_t device_segment;
  uint32_t region;
  uint32_t file;
  uint32_t component;
  uint32_t shape;    // First of `rank` numbers in dims; outermost dimension first.
  uint32_t strides;  // In elements; kNone = row-major.
  uint16_t dtype;    // DType
  uint16_t rank;
  uint8_t flags;            // TensorFlags
  uint8_t alignment_log2;   // Real alignment of the first byte in the region, at most 21.
  uint16_t block_elements;  // 1 for plain types.
  uint32_t block_bytes;     // Bytes of a block; 0 for plain types.
  StringRef reason;         // Why it is not mappable; empty otherwise.
  uint8_t reserved[4];
};

struct FileEntry {
  StringRef path;  // Relative to the version, '/' between parts.
  StringRef role;  // "weights", "sidecar".
  uint64_t bytes;
  uint8_t digest[kDigestBytes];
  uint32_t region;
  uint32_t reserved;
};

enum class RegionKind : uint32_t {
  kFile = 1,    // A store file, mapped in place: read-only by file mode and mount.
  kSealed = 2,  // A memfd sealed against writing and resizing.
};

struct RegionEntry {
  uint64_t bytes;
  uint8_t digest[kDigestBytes];  // SHA-256 of the bytes.
  uint32_t kind;                 // RegionKind
  uint32_t eager;                // 1: its descriptor comes with the grant (it holds tensors).
};

struct DeviceSegmentEntry {
  uint64_t bytes;   // Of the allocation; all of it is mapped.
  uint32_t region;  // Whose tensors it holds.
  uint32_t reserved;
};

struct ComponentEntry {
  StringRef name;
  StringRef format;
};

struct MetadataEntry {
  StringRef key;    // "component/key" when several components have metadata.
  StringRef value;  // UTF-8 text; numbers and arrays as JSON.
};

struct Bucket {
  uint32_t hash;    // HashName of the tensor's name: only equal ones need a look at the name.
  uint32_t number;  // 1 + the tensor's; 0 = empty.
};

static_assert(SharedLayout<Bucket> && sizeof(Bucket) == 8);
static_assert(SharedLayout<IndexHeader> && sizeof(IndexHeader) == 512);
static_assert(offsetof(IndexHeader, tensors) == 136);
static_assert(offsetof(IndexHeader, hash_key) == 272);
static_assert(offsetof(IndexHeader, device_segments) == 288);
static_assert(SharedLayout<DeviceSegmentEntry> && sizeof(DeviceSegmentEntry) == 16);
static_assert(SharedLayout<TensorEntry> && sizeof(TensorEntry) == 80);
static_assert(offsetof(TensorEntry, dtype) == 56);
static_assert(SharedLayout<FileEntry> && sizeof(FileEntry) == 64);
static_assert(SharedLayout<RegionEntry> && sizeof(RegionEntry) == 48);
static_assert(SharedLayout<ComponentEntry> && SharedLayout<MetadataEntry>);

// SipHash-1-3 with the header's key, folded to 32 bits. The bucket of a name is
// HashName(key, name) & (bucket_count - 1); collisions go to the next bucket, wrapping. Tensors of
// one bare name in several components are all in the table.
constexpr uint32_t HashName(const HashKey& key, std::string_view name) {
  uint64_t v0 = key.low ^ 0x736f6d6570736575ULL;
  uint64_t v1 = key.high ^ 0x646f72616e646f6dULL;
  uint64_t v2 = key.low ^ 0x6c7967656e657261ULL;
  uint64_t v3 = key.high ^ 0x7465646279746573ULL;
  const auto round = [&] {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  };
  // Eight bytes at a time, the first one lowest; the last word ends in the length.
  const auto word_at = [&](size_t first, size_t count) {
    uint64_t word = 0;
    for (size_t i = 0; i < count; ++i) {
      word |= uint64_t{static_cast<uint8_t>(name[first + i])} << (8 * i);
    }
    return word;
  };
  const auto mix = [&](uint64_t word) {
    v3 ^= word;
    round();
    v0 ^= word;
  };
  size_t at = 0;
  for (; name.size() - at >= 8; at += 8) mix(word_at(at, 8));
  mix(word_at(at, name.size() - at) | uint64_t{name.size()} << 56);
  v2 ^= 0xff;
  for (int i = 0; i < 3; ++i) round();
  const uint64_t hash = v0 ^ v1 ^ v2 ^ v3;
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

// True when every table of the header lies inside `index_bytes` and the header describes this ABI.
constexpr bool IndexFits(const IndexHeader& header, uint64_t index_bytes) {
  const auto fits = [&](const TableRef& table, uint64_t entry_bytes) {
    return table.offset % 8 == 0 && table.offset <= index_bytes &&
           table.count <= (index_bytes - table.offset) / entry_bytes;
  };
  const uint64_t buckets = header.buckets.count;
  return header.magic == kIndexMagic && header.abi_version == kIndexAbi &&
         header.header_bytes == sizeof(IndexHeader) && header.index_bytes == index_bytes &&
         header.model[kNameBytes - 1] == 0 && fits(header.tensors, sizeof(TensorEntry)) &&
         fits(header.buckets, sizeof(Bucket)) && (buckets & (buckets - 1)) == 0 &&
         (header.tensors.count == 0 || buckets > header.tensors.count) &&
         fits(header.dims, sizeof(int64_t)) && fits(header.files, sizeof(FileEntry)) &&
         fits(header.regions, sizeof(RegionEntry)) &&
         fits(header.components, sizeof(ComponentEntry)) &&
         fits(header.metadata, sizeof(MetadataEntry)) && fits(header.strings, 1) &&
         fits(header.device_segments, sizeof(DeviceSegmentEntry));
}

}  // namespace modelhost::abi
