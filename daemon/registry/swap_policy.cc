#include "daemon/registry/swap_policy.h"

#include <algorithm>
#include <cerrno>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "daemon/registry/retry_policy.h"

namespace modelhost {
namespace {

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

}  // namespace

LoadFailure ClassifyLoadFailure(const absl::Status& status, int sys_errno) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      // Descriptors or memory of the kernel's are no pool of ours.
      return IsTransient(status, sys_errno) ? LoadFailure::kTransient : LoadFailure::kNoRoom;
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kAborted:
      return LoadFailure::kCancelled;
    case absl::StatusCode::kDataLoss:
      return sys_errno == 0 ? LoadFailure::kBadBytes : LoadFailure::kTransient;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kOutOfRange:
      return sys_errno == 0 ? LoadFailure::kBadBytes : LoadFailure::kTransient;
    default:
      return LoadFailure::kTransient;
  }
}

absl::Status CheckIfCurrent(const std::string& model, const std::string& label,
                            std::optional<uint64_t> if_current, uint64_t current) {
  if (!if_current.has_value() || *if_current == current) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      model, ":", label, " is ", current == 0 ? "not set" : absl::StrCat("at ", current), ", not ",
      *if_current == 0 ? "unset" : absl::StrCat("at ", *if_current),
      " as --if-current asks (look at `modelctl versions ", model, "` and decide again)"));
}

std::optional<std::string> NearestName(const std::string& wanted,
                                       std::span<const std::string> names) {
  constexpr size_t kMostNames = 128;  // A suggestion is not worth more work than this.
  constexpr size_t kMostBytes = 66;   // The longest name, and two letters too many.
  if (wanted.size() > kMostBytes) return std::nullopt;
  std::optional<std::string> nearest;
  size_t best = 3;
  for (const std::string& name : names.first(std::min(names.size(), kMostNames))) {
    const size_t distance = EditDistance(wanted, name);
    if (distance < best && distance < std::max(wanted.size(), name.size())) {
      best = distance;
      nearest = name;
    }
  }
  return nearest;
}

}  // namespace modelhost
