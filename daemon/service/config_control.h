// The configuration, as the service sees it: what is in force and where each value comes from, and
// reading the file again. Implemented by daemon/config_reload. Control thread only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace modelhost {

struct ConfigEntry {
  std::string key;          // "load.threads"; "models.planner.residency"
  std::string value;        // As TOML writes it; in words where the daemon finds it out.
  std::string source;       // "default", "FILE:LINE" or "--flag".
  bool reloadable = false;  // A change takes effect without a restart.
};

struct ConfigView {
  std::string file;                  // Empty: the daemon runs without one.
  std::vector<ConfigEntry> entries;  // In the order of the sections.
};

struct ConfigChange {
  std::string key;
  std::string from;
  std::string to;
  bool needs_restart = false;  // It was seen, and is not in force.
};

struct ReloadReport {
  std::string file;
  std::vector<ConfigChange> changes;
  std::string store_error;  // Of the look at the store that goes with it; empty: none.
};

class ConfigControl {
 public:
  virtual ~ConfigControl() = default;
  virtual ConfigView Effective() const = 0;
  // As SIGHUP. `done` runs when all that can change without a restart has changed; an error
  // (INVALID_ARGUMENT names file and line, UNAVAILABLE: stopping) means that nothing has.
  using ReloadDone = std::function<void(absl::StatusOr<ReloadReport>)>;
  virtual void Reload(ReloadDone done) = 0;
};

}  // namespace modelhost
