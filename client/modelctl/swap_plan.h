// What `swap --dry-run` prints: the capacity plan, as a table or as JSON.
#pragma once

#include <string>

#include "client/modelctl/context.h"
#include "modelhost/v1/control.pb.h"

namespace modelhost::modelctl {

// A plan that does not fit is a failure, with the code and the text that the swap would have.
Exit PrintSwapPlan(Context& context, const v1::SwapPlan& plan, const std::string& what);

}  // namespace modelhost::modelctl
