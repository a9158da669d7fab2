#include "proto/handle/fault_point.h"

namespace modelhost {

void FaultPoint(FaultName /*name*/) {}

}  // namespace modelhost
