// Builds an index of nothing but a header's worth of bytes, where nobody looks inside. Any thread.
#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/region/loader.h"
#include "proto/handle/region.h"

namespace modelhost {

class SmallIndex : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion&, const std::vector<ComponentIndex>&,
                                     const DevicePlan&) override {
    auto region = WritableRegion::Create("index", 4096, HugePages::kOff);
    if (!region.ok()) return absl::ResourceExhaustedError(region.error().text);
    auto sealed = std::move(*region).Seal();
    if (!sealed.ok()) return absl::InternalError(sealed.error().text);
    return *std::move(sealed);
  }
};

}  // namespace modelhost
