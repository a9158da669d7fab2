// Which of this process's GPUs a device address belongs to.
#pragma once

#include <optional>

namespace modelhost::python {

// The ordinal as DLPack and the frameworks count (CUDA_VISIBLE_DEVICES applied). Empty when the
// driver does not know the address. Asks the driver that libmodelhost loaded, and loads none.
std::optional<int> OrdinalOf(const void* device_data);

}  // namespace modelhost::python
