// May a version be used on this machine, and is it complete? Asked before a byte of it is loaded,
// and again, of what is loaded, before it is handed out.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/requires.h"
#include "daemon/platform/machine_facts.h"
#include "daemon/region/cancel_token.h"
#include "daemon/store/model_policy.h"
#include "daemon/store/store.h"

namespace modelhost {

// The manifest's, and those of the sidecars in `files`, whose bytes must be those of the manifest.
//   INVALID_ARGUMENT a sidecar is malformed, or there are more than kMostRequiresFiles;
//   DATA_LOSS it is not what was published; FAILED_PRECONDITION it speaks of a file that is not
//   there; CANCELLED
absl::StatusOr<std::vector<RequiresSource>> ReadRequirements(Os& os, const VersionFiles& files,
                                                             const CancelToken& cancel);

// FAILED_PRECONDITION when two sources disagree about the same thing, or when the machine does not
// fulfil one, or is not known to: the text has both sides of each difference, and what to do.
// INVALID_ARGUMENT for a value that cannot be compared. `version` is "planner@8". Pure.
absl::Status CheckRequires(std::string_view version, std::span<const RequiresSource> sources,
                           const MachineFacts& machine);
// The same of a version that was found to fit once: what is not known of the machine any more, or
// not yet, takes nothing away. Pure.
absl::Status CheckStillFits(std::string_view version, std::span<const RequiresSource> sources,
                            const MachineFacts& machine);
// What must be known of the machine to compare all of them.
FactsNeeded NeededFacts(std::span<const RequiresSource> sources);
// Those that are compared with something, without the rest.
std::vector<RequiresSource> Compared(std::span<const RequiresSource> sources);
// All of them as one map, for display: "x.engine: platform" is what a sidecar of one file says.
Requirements Flatten(std::span<const RequiresSource> sources);

// FAILED_PRECONDITION naming every file of requires_files that `manifest` lacks. Pure.
absl::Status CheckRequiredFiles(const EffectivePolicy& policy, const Manifest& manifest);

}  // namespace modelhost
