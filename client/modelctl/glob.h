// Shell patterns over tensor names: '*' any text, '?' one byte, "[a-c]" and "[!a-c]" one of a set.
// A '[' that nothing closes stands for itself. '*' crosses '.' and '/'.
#pragma once

#include <string_view>

namespace modelhost::modelctl {

// At most pattern times text steps: no pattern is slow.
bool GlobMatches(std::string_view pattern, std::string_view text);

}  // namespace modelhost::modelctl
