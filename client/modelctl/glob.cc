#include "client/modelctl/glob.h"

#include <cstddef>
#include <cstdint>

namespace modelhost::modelctl {
namespace {

// One element of the pattern against one byte. Returns the bytes of the element, 0 for no match.
size_t MatchOne(std::string_view pattern, char c) {
  if (pattern[0] == '?') return 1;
  if (pattern[0] != '[') return pattern[0] == c ? 1 : 0;
  const bool negated = pattern.size() > 1 && (pattern[1] == '!' || pattern[1] == '^');
  const size_t first = negated ? 2 : 1;
  const size_t close = pattern.find(']', first + 1);  // A ']' that comes first is a member.
  if (close == std::string_view::npos) return c == '[' ? 1 : 0;
  bool found = false;
  for (size_t i = first; i < close; ++i) {
    const auto low = static_cast<uint8_t>(pattern[i]);
    auto high = low;
    if (i + 2 < close && pattern[i + 1] == '-') {
      high = static_cast<uint8_t>(pattern[i + 2]);
      i += 2;
    }
    found = found || (low <= static_cast<uint8_t>(c) && static_cast<uint8_t>(c) <= high);
  }
  return found != negated ? close + 1 : 0;
}

}  // namespace

bool GlobMatches(std::string_view pattern, std::string_view text) {
  constexpr size_t kNone = std::string_view::npos;
  size_t p = 0;
  size_t t = 0;
  size_t star = kNone;  // After the last '*', and where it has got to.
  size_t resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      resume = t;
      continue;
    }
    const size_t used = p < pattern.size() ? MatchOne(pattern.substr(p), text[t]) : 0;
    if (used > 0) {
      p += used;
      ++t;
    } else if (star != kNone) {
      p = star;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace modelhost::modelctl
