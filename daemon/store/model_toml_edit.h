// Changing one key of a model.toml and nothing else in it. Pure.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

// `text` with residency set; other keys, comments and layout as they were. INVALID_ARGUMENT if it
// is no good model.toml to begin with.
absl::StatusOr<std::string> WithResidency(absl::string_view text, absl::string_view file,
                                          Residency residency);

}  // namespace modelhost
