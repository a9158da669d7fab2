// References as people write them: "planner", "planner:canary", "planner@7". Pure; any thread.
#pragma once

#include <string>
#include <string_view>

#include "proto/abi/handle_frame.h"
#include "proto/handle/error.h"

namespace modelhost {

inline constexpr std::string_view kDefaultLabel = "stable";

// INVALID_ARGUMENT with what is wrong and what is allowed.
Result<abi::Ref> ParseReference(std::string_view text);

// As ParseReference would read it.
std::string ReferenceName(const abi::Ref& ref);

// Copies a name that fits into a NUL-padded field of a shared struct.
void CopyName(std::string_view name, char (&field)[abi::kNameBytes]);
// The name in such a field, which may come from a peer: never past its end.
std::string_view NameIn(const char (&field)[abi::kNameBytes]);

}  // namespace modelhost
