// Completion scripts, made from the command line's own description, so that they never lag behind.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/string_view.h"

namespace modelhost::modelctl {

// `shell` is "bash", "zsh" or "fish"; empty for any other. Models are asked from the daemon when
// they are completed, at most a second long.
std::string CompletionScript(absl::string_view shell, const CLI::App& app);

}  // namespace modelhost::modelctl
