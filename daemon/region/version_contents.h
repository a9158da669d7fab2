// What the files of a version hold: its weight sets, found and indexed in the mapped bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"
#include "daemon/region/contents_indexer.h"

namespace modelhost {

struct VersionContents {
  std::vector<ComponentIndex> components;
  std::string format;  // "mixed" when components differ; empty without any.
  uint64_t tensor_count = 0;
  uint64_t tensor_bytes = 0;
  std::vector<uint32_t> eager;  // Regions that hold tensors, in the order of their first tensor.
  std::vector<std::string> warnings;
};

// `files[i]` is manifest.files[i], `regions[i]` the number of its region. `where` is put before
// errors. A file that is truncated while it is parsed is DATA_LOSS, never a signal; otherwise the
// errors of contents_indexer.h.
absl::StatusOr<VersionContents> ReadContents(const std::string& where, ContentsIndexer& indexer,
                                             const std::vector<ContentsIndexer::File>& files,
                                             std::span<const uint32_t> regions,
                                             const CancelToken& cancel);

}  // namespace modelhost
