// Regular expressions (RE2) for names of tensors. Their cost is bounded whatever they are: RE2 is
// linear in the name, and a pattern that would take more than 1 MiB is refused.
//
// Immutable; any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace re2 {
class RE2;
}

namespace modelhost {

class NamePatterns {
 public:
  // INVALID_ARGUMENT names the pattern and what is wrong with it.
  static absl::StatusOr<NamePatterns> Compile(const std::vector<std::string>& patterns);

  NamePatterns(NamePatterns&& other) noexcept;
  NamePatterns& operator=(NamePatterns&& other) noexcept;
  ~NamePatterns();

  size_t size() const { return patterns_.size(); }
  // Whether pattern number `i` matches the whole of `name`.
  bool Matches(size_t i, std::string_view name) const;

 private:
  explicit NamePatterns(std::vector<std::unique_ptr<const re2::RE2>> patterns);
  std::vector<std::unique_ptr<const re2::RE2>> patterns_;
};

}  // namespace modelhost
