// The text of labels.json. Pure. Errors are INVALID_ARGUMENT with the offset or the place.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/store/labels.h"

namespace modelhost {

absl::StatusOr<LabelFile> ParseLabels(absl::string_view text);
std::string SerializeLabels(const LabelFile& labels);

}  // namespace modelhost
