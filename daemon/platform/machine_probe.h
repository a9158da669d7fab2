// Looks at the machine it runs on. Runs in a short-lived child (`modelhostd probe-machine`): a CUDA
// driver may hang, crash or start threads, and the daemon does nothing of the kind itself.
//
// The child writes one "fact.part=text" per line, the parent parses it. Single-threaded.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/platform/machine_facts.h"

namespace modelhost {

// "linux-x86_64", by uname.
MachineFact ProbePlatform();
// The versions in the real names of libnvinfer.so.X.Y.Z in `folders`.
MachineFact ProbeTensorRt(const std::vector<std::string>& folders);
// Where the dynamic linker looks: LD_LIBRARY_PATH, `ld_so_conf` with what it includes, the
// system's.
std::vector<std::string> LinkerFolders(const std::string& ld_so_conf);
// compute_capability and cuda_driver, from libcuda.so.1.
void ProbeCuda(MachineFacts& facts);

// Everything, as text for the parent: what is safe to find out first, then, `with_driver`, what
// the driver says.
void ProbeMachine(bool with_driver, const std::function<void(const std::string& text)>& print);
// Nothing for a fact that has neither a value nor a reason.
std::string FormatFacts(const MachineFacts& facts);
// Lines that FormatFacts would not write are passed over; `strange`: the first of them.
MachineFacts ParseFacts(absl::string_view text, std::string* strange);

}  // namespace modelhost
