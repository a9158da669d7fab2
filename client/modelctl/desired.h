// The desired state file as the daemon tells of it: for status, and for whoever moves a label that
// the file names.
#pragma once

#include <cstdint>
#include <string>

#include "client/modelctl/context.h"
#include "client/modelctl/json.h"
#include "client/modelctl/render.h"
#include "modelhost/v1/control.pb.h"

namespace modelhost::modelctl {

// The fields of an object that is open.
void WriteDesired(JsonWriter& json, const v1::DesiredStatus& desired);
// "desired" and, label by label, what is not as wanted. Nothing where no file is followed.
void AddDesiredRows(Table& table, const v1::DesiredStatus& desired, bool wide);
// A warning when a file wants another version for the label: it will be moved back. `version` 0:
// removed. Asks the daemon; says nothing when that fails.
void WarnIfDesired(Context& context, const std::string& model, const std::string& label,
                   uint64_t version);

}  // namespace modelhost::modelctl
