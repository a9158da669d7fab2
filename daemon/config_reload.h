// Reading the configuration again, for SIGHUP and for the ReloadConfig call: what can change while
// the daemon runs changes (models, machine, desired), what cannot is named.
//
//   Reload -> pool: read the file -> models, machine, desired file -> rescan -> whoever asked is
//   told
//
// One at a time; those who ask meanwhile get the answer of the next one, which reads the file after
// they asked. A file that cannot be read or is bad changes nothing. Control thread only.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "daemon/observe/logger.h"
#include "daemon/platform/probed_machine.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"
#include "daemon/service/config_control.h"

namespace modelhost {

class ConfigReloader final : public ConfigControl {
 public:
  // All outlive this; the loop has ended before it goes.
  struct Deps {
    ControlLoop& loop;
    Executor& pool;
    ModelManager& manager;
    ProbedMachine& machine;
    Logger& logger;
    std::function<void()> began;  // For systemd, around each reload.
    std::function<void()> ended;
  };
  // `path` empty: there is no file, and a reload looks at the machine and the store alone.
  // `flags`: what the command line has decided; an entry replaces that of its key.
  ConfigReloader(Deps deps, std::string path, Config config, std::vector<ConfigEntry> flags);

  ConfigView Effective() const override;
  void Reload(ReloadDone done) override;
  // Who waits is told UNAVAILABLE, and nothing is read any more.
  void Stop();

 private:
  void Begin();
  void Take(absl::StatusOr<Config> config);
  void End(const absl::StatusOr<ReloadReport>& report);
  void Log(const absl::StatusOr<ReloadReport>& report);

  const Deps deps_;
  const std::string path_;
  Config config_;  // In force.
  const std::vector<ConfigEntry> flags_;
  bool reloading_ = false;
  bool stopped_ = false;
  std::vector<ReloadDone> waiting_;  // For the reload under way.
  std::vector<ReloadDone> next_;
};

}  // namespace modelhost
