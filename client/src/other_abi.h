// What a daemon of another version made, in one sentence: which side is older, and what to update.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/handle/error.h"

namespace modelhost {

// UNIMPLEMENTED. `theirs` is what came, `ours` the one that this library reads.
inline Error OtherAbi(std::string_view what, uint32_t theirs, uint32_t ours) {
  return Error{Code::kUnimplemented,
               std::string(what) + " ABI " + std::to_string(theirs) + ", this library reads " +
                   std::to_string(ours) + " (update " +
                   (theirs > ours ? "libmodelhost" : "modelhostd") + ")",
               0};
}

}  // namespace modelhost
