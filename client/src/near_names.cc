#include "client/src/near_names.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace modelhost {
namespace {

constexpr size_t kMaxLooked = 128;  // Loaders ask for hundreds of names that need not be there.
constexpr size_t kMaxLength = 128;  // Of names that are compared.
constexpr size_t kMaxShown = 3;

// Edits that turn `a` into `b`, or `limit` + 1 when there are more. Lengths are at most kMaxLength.
size_t Distance(std::string_view a, std::string_view b, size_t limit) {
  const size_t gap = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  if (gap > limit) return limit + 1;
  std::array<uint8_t, kMaxLength + 1> row{};
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<uint8_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    uint8_t diagonal = row[0];
    row[0] = static_cast<uint8_t>(i);
    uint8_t best = row[0];
    for (size_t j = 1; j <= b.size(); ++j) {
      const int same = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = static_cast<uint8_t>(std::min({same, row[j] + 1, row[j - 1] + 1}));
      best = std::min(best, row[j]);
    }
    if (best > limit) return limit + 1;
  }
  return row[b.size()];
}

}  // namespace

std::string DidYouMean(std::string_view wanted, size_t count, size_t hint,
                       const std::function<std::string_view(size_t)>& name_at) {
  if (wanted.empty() || wanted.size() > kMaxLength) return {};
  const size_t limit = std::max<size_t>(2, wanted.size() / 4);
  const size_t first =
      count <= kMaxLooked ? 0 : std::min(hint - std::min(hint, kMaxLooked / 2), count - kMaxLooked);
  const size_t last = std::min(count, first + kMaxLooked);
  std::vector<std::pair<size_t, std::string_view>> near;
  for (size_t i = first; i < last; ++i) {
    const std::string_view name = name_at(i);
    if (name.empty() || name.size() > kMaxLength) continue;
    const size_t distance = Distance(wanted, name, limit);
    if (distance <= limit) near.emplace_back(distance, name);
  }
  std::sort(near.begin(), near.end());
  near.erase(std::unique(near.begin(), near.end()), near.end());
  std::string text;
  for (size_t i = 0; i < std::min(near.size(), kMaxShown); ++i) {
    text += (i == 0 ? " (did you mean " : ", ") + std::string(near[i].second);
  }
  return text.empty() ? text : text + "?)";
}

}  // namespace modelhost
