// Names of things. Identity is (model, version, digest), never a time stamp.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace modelhost {

struct VersionKey {
  std::string model;
  uint64_t version = 0;
  friend auto operator<=>(const VersionKey&, const VersionKey&) = default;
  std::string ToString() const { return absl::StrCat(model, "@", version); }
};

using LeaseId = uint64_t;      // Never reused within an epoch; 0 is none.
using SessionId = uint64_t;    // One connection that may hold leases; 0 is none.
using OperationId = uint64_t;  // Shown as "op-<n>"; unique within an epoch; 0 is none.

// "[a-z0-9][a-z0-9._-]{0,63}", for models and labels.
bool IsValidModelName(absl::string_view name);

inline constexpr char kDefaultLabel[] = "stable";

}  // namespace modelhost
