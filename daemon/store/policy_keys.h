// The keys of a ModelPolicy, for both files that may hold them.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/store/model_policy.h"
#include "daemon/store/toml_document.h"

namespace modelhost {

inline constexpr char kPolicyKeys[] =
    "residency, huge_pages, device, required, keep_previous, keep_on_disk, requires_files, "
    "read_groups, on_drain_deadline, drain_timeout";

// Sets what `field` is about. False: no key of a policy.
absl::StatusOr<bool> ReadPolicyKey(const TomlField& field, ModelPolicy& policy);
// The key `device` of it (device_policy.cc).
absl::Status ReadDevicePolicy(const TomlField& field, ModelPolicy& policy);

}  // namespace modelhost
