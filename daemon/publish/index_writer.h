// Lays out the flat index of a version (proto/abi/version_index.h) and seals it.
//
// Two passes: count and check everything, then write the tables into one memfd of the exact size.
// 100,000 tensors take a few tens of milliseconds. No state; any thread.
//
// Errors: INVALID_ARGUMENT (a tensor outside its file, in a file that the manifest does not have,
// twice in one component, or with too many dimensions: the text names it), RESOURCE_EXHAUSTED (more
// than the 32-bit numbers of the index can count, or no memory), INTERNAL (the loader's parts, or
// the device plan, do not fit together).
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "daemon/region/loader.h"
#include "proto/handle/region.h"

namespace modelhost {

class IndexWriter final : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                     const std::vector<ComponentIndex>& components,
                                     const DevicePlan& plan) override;
};

}  // namespace modelhost
