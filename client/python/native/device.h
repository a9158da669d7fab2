// Which of this process's GPUs a handle has its device memory on.
#pragma once

#include <optional>
#include <string_view>

namespace modelhost::python {

// The ordinal of the GPU with this UUID ("GPU-1b4e28ba-...") as DLPack and the frameworks count
// (CUDA_VISIBLE_DEVICES applied). Empty when the driver does not have it. Asks the driver that
// libmodelhost loaded, and loads none.
std::optional<int> OrdinalOf(std::string_view uuid);

}  // namespace modelhost::python
