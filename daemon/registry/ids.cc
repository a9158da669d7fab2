#include "daemon/registry/ids.h"

#include "proto/abi/shared_layout.h"

namespace modelhost {

bool IsValidModelName(absl::string_view name) { return abi::IsValidName(name.data(), name.size()); }

}  // namespace modelhost
