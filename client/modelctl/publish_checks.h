// What can be said about a publish before a byte is sent: is what it requires well-formed, and does
// it have the files that its model asks for? The daemon decides again; here it costs nothing.
#pragma once

#include <string>
#include <vector>

#include "client/modelctl/context.h"
#include "client/modelctl/source_files.h"
#include "daemon/format/requires.h"

namespace modelhost::modelctl {

// --require KEY=VALUE, each key once. kUsage otherwise.
Outcome<Requirements> ParseRequireFlags(const std::vector<std::string>& flags);

// The flags', those of the sidecars among `files`, and those of the version that they are a copy
// of. kIntegrity for a malformed sidecar, kConflict when two disagree, or one speaks of a file that
// is not there. Warns of keys that nothing is compared with.
Outcome<std::vector<RequiresSource>> CollectRequirements(Context& context, const SourceSet& files,
                                                         const Requirements& flags);

// Warns when the model's policy asks for files that are not there: the version would never be
// READY. Says nothing when the daemon does not answer, or does not know the model.
void WarnOfMissingFiles(Context& context, const std::string& model, const SourceSet& files);

}  // namespace modelhost::modelctl
