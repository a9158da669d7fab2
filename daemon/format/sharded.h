// Sharded weights: a JSON index that maps tensor names to the files of one folder, all of them
// safetensors or all of them PyTorch checkpoints.
//
// Nothing in the format ties the index to its shards, so all of it is checked here: every file is
// there and good, every mapped tensor is in the file that the map names, no tensor is in two files.
// Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

struct ShardIndex {
  struct Entry {
    uint64_t name_at;
    uint32_t name_size;
    uint32_t shard;  // Number in `shards`.
  };
  std::string_view Name(const Entry& entry) const {
    return std::string_view(names).substr(entry.name_at, entry.name_size);
  }

  std::vector<std::string> shards;  // As written: relative to the folder of the index.
  std::vector<Entry> entries;
  std::string names;  // All tensor names, one after the other.
  std::vector<MetadataItem> metadata;
  std::string total_size;  // JSON text; empty when absent.
};

// True when the bytes are a JSON object with a "weight_map" at its top.
bool HasWeightMap(std::span<const std::byte> bytes);

absl::StatusOr<ShardIndex> ParseShardIndex(std::string_view name, std::span<const std::byte> bytes);

// Fills an index that has `name` as its file 0, and says what the shards are.
absl::Status ReadSharded(const std::string& name, std::span<const std::byte> bytes,
                         FileSource& source, TensorIndex& index);

// `name` beside `main`: in the same folder.
std::string SiblingName(std::string_view main, std::string_view name);

}  // namespace modelhost
