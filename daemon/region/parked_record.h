// <state>/parked.json: what was left in the fd store, and all that a later daemon must know to take
// it back. Written by this daemon alone, beside every change of the store; read once, at a start.
//
//   {"schema": 1,
//    "regions": [{"name": "mh-7-1", "device": 1, "inode": 2, "bytes": 3, "content": "<hex>"}],
//    "versions": [{"model": "planner", "version": 8, "digest": "<hex>", "residency": "sealed",
//                  "contents": ["<hex>", ...], "regions": ["mh-7-1"],
//                  "index": {"name": "mh-7-2", "device": 1, "inode": 4, "bytes": 5,
//                            "sha256": "<hex>", "builder": "0.3.0 (ab12)", "format": "gguf",
//                            "tensors": 6, "tensor_bytes": 7, "eager": [0], "warnings": [],
//                            "gpu_layout": "\"all\" segments 9 by 2"}}],
//    "devices": [{"gpu": "GPU-1", "content": "<hex>", "part": "<hex>", "planned": "<hex>",
//                 "segments": [{"name": "mh-7-3", "bytes": 2097152, "checksum": 8}]}]}
//
// `content` is the ContentKey of the bytes: with it the manifest says what they are. `contents` are
// those of all regions of the version, in the order that its index numbers them; `regions` names
// what of it is in the store. A version without "index" has none there. `devices` are copies on
// GPUs (device_region.h); they are nobody's in particular, and a record or an index without has
// none. Device memory has no inode that stays: what it holds is told by its checksum.
//
// Parsing: INVALID_ARGUMENT with the place, also for a name that is there twice and for a version
// that names an unknown region. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/store/digest.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

inline constexpr char kParkedName[] = "parked.json";

// One descriptor in the store.
struct ParkedMemory {
  std::string name;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
};

struct ParkedRegion {
  ParkedMemory memory;
  Digest content;
};

struct ParkedIndex {
  ParkedMemory memory;
  Digest sha256;        // Of its bytes.
  std::string builder;  // The program that laid it out; another one may do so differently.
  std::string format;
  uint64_t tensor_count = 0;
  uint64_t tensor_bytes = 0;
  std::vector<uint32_t> eager;
  std::vector<std::string> warnings;  // Of the load that parsed the files.
  std::string gpu_layout = {};        // How it lays tensors out on GPUs (LoadJob); empty: it does
                                      // not.
};

struct ParkedVersion {
  std::string model;
  uint64_t version = 0;
  Digest digest;
  Residency residency = Residency::kSealed;
  std::vector<Digest> contents;
  std::vector<std::string> regions;
  std::optional<ParkedIndex> index;
};

struct ParkedSegment {
  std::string name;
  uint64_t bytes = 0;
  uint64_t checksum = 0;  // As the device agent sums.
};

struct ParkedDevice {
  std::string gpu;
  Digest content;
  Digest part;
  Digest planned;
  std::vector<ParkedSegment> segments;
};

struct ParkedRecord {
  std::vector<ParkedRegion> regions;
  std::vector<ParkedVersion> versions;
  std::vector<ParkedDevice> devices = {};
};

absl::StatusOr<ParkedRecord> ParseParkedRecord(absl::string_view text);
std::string SerializeParkedRecord(const ParkedRecord& record);

}  // namespace modelhost
