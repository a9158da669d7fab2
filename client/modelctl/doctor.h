// The machine's checks, each a finding, a verdict and what to do. They need no daemon; with one
// they know more. One thread; none takes longer than about two seconds.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "modelhost/v1/control.pb.h"

namespace modelhost::modelctl {

enum class Verdict { kOk, kWarn, kFail };
const char* VerdictName(Verdict verdict);  // "ok", "warn", "fail"

struct Check {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string finding;
  std::string advice;  // Empty when there is nothing to do.
};

// The running daemon's status, when it answers.
using DaemonStatus = std::optional<v1::GetStatusResponse>;

Check CheckKernel();
Check CheckPopulate();
Check CheckSealing();
Check CheckMemlock(const DaemonStatus& daemon);
Check CheckFileLimit();
Check CheckShmemHugePages();
// Of the file system that `path` is on.
Check CheckFolios(const std::string& path);
// Reads at most 64 MiB past the page cache, from a store file if one can be opened, else from a
// temporary file of its own.
Check CheckDisk(const std::string& store);
// One for each GPU that the daemon knows; one that says why there is none.
std::vector<Check> CheckGpus(const DaemonStatus& daemon);

// Parses "6.1.0-18-amd64". {0, 0} when it is no such text.
std::pair<int, int> ParseKernelRelease(absl::string_view release);
// The chosen word of "always [advise] never". Empty when none is.
std::string ChosenWord(absl::string_view text);

}  // namespace modelhost::modelctl
