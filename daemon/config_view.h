// The configuration in words: every key with its value and where that comes from, and what differs
// between two of them. Pure; any thread.
#pragma once

#include <string>
#include <vector>

#include "daemon/config.h"
#include "daemon/service/config_control.h"

namespace modelhost {

// All keys that ParseConfig knows, in the order of the sections, and those of [[models]] that are
// given. `file` is what `config` was read from.
std::vector<ConfigEntry> DescribeConfig(const Config& config, const std::string& file);

// Keys whose values differ, by the text of the values.
std::vector<ConfigChange> CompareConfigs(const Config& from, const Config& to);

}  // namespace modelhost
