// `modelctl inspect PATH`: the index of a model file, or of the weight sets in a folder. Needs no
// daemon and links no gRPC.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "client/modelctl/index_render.h"

namespace modelhost::modelctl {

struct InspectOptions {
  IndexOutput output = IndexOutput::kTable;
  bool tensors = false;
  std::string filter_glob;
};

// Prints the index to `out` and returns 0, or prints nothing there, one line `error: ...` to `err`,
// and returns the exit code: 3 not found, 5 out of memory, descriptors or the like, 6 malformed or
// refused, 9 no permission, 1 anything else.
int InspectPath(const std::string& path, const InspectOptions& options, std::ostream& out,
                std::ostream& err);

}  // namespace modelhost::modelctl
