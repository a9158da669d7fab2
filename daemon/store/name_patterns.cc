#include "daemon/store/name_patterns.h"

#include <re2/re2.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr int64_t kMaxPatternMemory = int64_t{1} << 20;

}  // namespace

NamePatterns::NamePatterns(std::vector<std::unique_ptr<const re2::RE2>> patterns)
    : patterns_(std::move(patterns)) {}
NamePatterns::NamePatterns(NamePatterns&& other) noexcept = default;
NamePatterns& NamePatterns::operator=(NamePatterns&& other) noexcept = default;
NamePatterns::~NamePatterns() = default;

absl::StatusOr<NamePatterns> NamePatterns::Compile(const std::vector<std::string>& patterns) {
  re2::RE2::Options options;
  options.set_log_errors(false);
  options.set_max_mem(kMaxPatternMemory);
  options.set_never_capture(true);
  std::vector<std::unique_ptr<const re2::RE2>> compiled;
  for (const std::string& pattern : patterns) {
    auto& each = compiled.emplace_back(std::make_unique<const re2::RE2>(pattern, options));
    if (!each->ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(Quoted(pattern), ": not a regular expression: ", each->error()));
    }
  }
  return NamePatterns(std::move(compiled));
}

bool NamePatterns::Matches(size_t i, std::string_view name) const {
  return re2::RE2::FullMatch(re2::StringPiece(name.data(), name.size()), *patterns_[i]);
}

}  // namespace modelhost
