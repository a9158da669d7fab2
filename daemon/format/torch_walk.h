// Gives the tensors in a checkpoint's pickle their names.
//
// Thread-safe: no state. Time and memory are bounded by the size of the pickle: parts without
// tensors are walked once, the keys of a dict compared once, and an index (names, dimensions,
// entries) beyond a multiple of the pickle's own bytes is refused.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/format/pickle.h"

namespace modelhost {

// Calls `take` with the path and the number of each tensor that the root leads to, in order; ends
// with the first error. Keys are joined by dots; an integer is its digits, so is a place in a list.
// Refused: a value that contains itself, a key twice in one dict, a tensor below a key that is
// neither text nor integer, a name with NUL or that is not UTF-8.
absl::Status WalkTensors(
    std::string_view file, const Pickle& pickle, uint64_t pickle_bytes,
    absl::FunctionRef<absl::Status(std::string_view name, uint64_t tensor)> take);

}  // namespace modelhost
