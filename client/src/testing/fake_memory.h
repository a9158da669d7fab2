// Memory and files as a daemon would hand them out, and as it would not.
#pragma once

#include <string>

#include "proto/handle/region.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::testing {

// Ends the test program when what it needs of the system fails.
void Require(bool condition, const char* what);

SealedRegion Sealed(const std::string& bytes);
UniqueFd Unsealed(const std::string& bytes);
// A file that has no name any more. Returns it for reading; `writable` is the owner's.
UniqueFd PlainFile(const std::string& bytes, UniqueFd* writable);

}  // namespace modelhost::testing
