// The command line: which verbs and flags there are, and what a given line asks for.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"

namespace modelhost::modelctl {

struct Command {
  std::string text;  // Of --help or --version: print it, and that is all.
  Globals globals;
  bool silent = false;                // health -q: the exit code alone.
  std::function<Exit(Context&)> run;  // Empty with `text`.
};

// `arguments` without the program's name. kUsage when it is no line of ours.
Outcome<Command> ParseCommandLine(const std::vector<std::string>& arguments);

}  // namespace modelhost::modelctl
