// What a user types to name a model, a version or a label. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "client/modelctl/exit_code.h"

namespace modelhost::modelctl {

inline constexpr char kDefaultLabel[] = "stable";

// "planner", "planner:canary" or "planner@7".
struct Ref {
  std::string model;
  std::string label;     // Empty when not given.
  uint64_t version = 0;  // 0 when not given.
  std::string ToString() const;
};

// Each fails with kUsage and a text that says what is wrong and what is right.
Outcome<Ref> ParseRef(absl::string_view text);
// Only "planner@7".
Outcome<Ref> ParseVersionRef(absl::string_view text);
// Only "planner".
Outcome<std::string> ParseModelName(absl::string_view text);
Outcome<std::string> ParseLabelName(absl::string_view text);
// "8"; not "08", "+8", "0".
Outcome<uint64_t> ParseVersion(absl::string_view text);
// "detector=4"
Outcome<Ref> ParseAssignment(absl::string_view text);

}  // namespace modelhost::modelctl
