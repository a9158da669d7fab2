// "did you mean": the names most like one that was not found. Pure; any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace modelhost {

// At most three of the `count` names that `name_at` gives (empty ones are skipped), nearest first,
// as " (did you mean a, b?)"; empty when none is near. The work is bounded: of many names only
// those around `hint`, where `wanted` would stand in sorted order, are looked at.
std::string DidYouMean(std::string_view wanted, size_t count, size_t hint,
                       const std::function<std::string_view(size_t)>& name_at);

}  // namespace modelhost
