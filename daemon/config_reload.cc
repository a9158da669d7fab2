#include "daemon/config_reload.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/config_view.h"

namespace modelhost {

ConfigReloader::ConfigReloader(Deps deps, std::string path, Config config,
                               std::vector<ConfigEntry> flags)
    : deps_(std::move(deps)),
      path_(std::move(path)),
      config_(std::move(config)),
      flags_(std::move(flags)) {}

ConfigView ConfigReloader::Effective() const {
  ConfigView view;
  view.file = path_;
  view.entries = DescribeConfig(config_, path_);
  for (const ConfigEntry& flag : flags_) {
    const auto it = std::find_if(view.entries.begin(), view.entries.end(),
                                 [&](const ConfigEntry& entry) { return entry.key == flag.key; });
    if (it == view.entries.end()) {
      view.entries.push_back(flag);
    } else {
      *it = flag;
    }
  }
  return view;
}

void ConfigReloader::Reload(ReloadDone done) {
  if (stopped_) return done(absl::UnavailableError("the daemon is stopping"));
  next_.push_back(std::move(done));
  if (!reloading_) Begin();
}

void ConfigReloader::Stop() {
  stopped_ = true;
  std::vector<ReloadDone> waiting = std::exchange(waiting_, {});
  for (ReloadDone& done : std::exchange(next_, {})) waiting.push_back(std::move(done));
  for (const ReloadDone& done : waiting) done(absl::UnavailableError("the daemon is stopping"));
}

void ConfigReloader::Begin() {
  reloading_ = true;
  waiting_ = std::exchange(next_, {});
  deps_.began();
  if (path_.empty()) return Take(config_);
  // A read that hangs may outlive this.
  deps_.pool.Post([this, path = path_, &loop = deps_.loop] {
    auto config = LoadConfig(path);
    loop.Post([this, config = std::move(config)]() mutable { Take(std::move(config)); });
  });
}

void ConfigReloader::Take(absl::StatusOr<Config> config) {
  if (stopped_) return;
  if (!config.ok()) return End(config.status());
  ReloadReport report;
  report.file = path_;
  report.changes = CompareConfigs(config_, *config);
  deps_.manager.SetModelPolicies(config->models);
  deps_.manager.FollowDesired(config->desired.file);
  deps_.machine.SetOverrides(config->machine);
  deps_.machine.Forget();
  TakeReloadable(*std::move(config), config_);
  deps_.manager.Rescan(
      [this, report](const absl::StatusOr<ModelManager::RescanResult>& scanned) mutable {
        if (stopped_) return;
        if (!scanned.ok()) report.store_error = std::string(scanned.status().message());
        deps_.manager.ReviewServed();
        End(report);
      });
}

void ConfigReloader::End(const absl::StatusOr<ReloadReport>& report) {
  Log(report);
  reloading_ = false;
  deps_.ended();
  for (const ReloadDone& done : std::exchange(waiting_, {})) done(report);
  if (!next_.empty() && !reloading_) Begin();
}

void ConfigReloader::Log(const absl::StatusOr<ReloadReport>& report) {
  LogLine line("reload");
  if (!report.ok()) {
    deps_.logger.Write(LogLevel::kError,
                       line.Add("note", "nothing was changed").AddError(report.status()));
    return;
  }
  std::vector<std::string> changed;
  std::vector<std::string> restart;
  for (const ConfigChange& change : report->changes) {
    (change.needs_restart ? restart : changed).push_back(change.key);
  }
  line.Add("changed", changed.empty() ? "nothing" : absl::StrJoin(changed, ","));
  if (!restart.empty()) line.Add("needs_restart", absl::StrJoin(restart, ","));
  if (path_.empty()) line.Add("note", "no configuration file; the store is read again");
  if (!report->store_error.empty()) line.Add("store_error", report->store_error);
  deps_.logger.Write(restart.empty() ? LogLevel::kInfo : LogLevel::kWarning, line);
}

}  // namespace modelhost
