#include "daemon/config_view.h"

#include <algorithm>
#include <array>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

// What holds where the file is silent, as a file would say it. In words where the daemon looks at
// the machine.
struct DefaultValue {
  absl::string_view key;
  absl::string_view value;
};
constexpr std::array kDefaults = {
    DefaultValue{"memory.host_budget", "80 % of the smaller of RAM and the cgroup's limit"},
    DefaultValue{"memory.memlock", "\"best_effort\""},
    DefaultValue{"load.threads", "0"},
    DefaultValue{"load.verify", "\"full\""},
    DefaultValue{"load.isolate_parsing", "\"auto\""},
    DefaultValue{"load.io_priority", "\"best-effort:6\""},
    DefaultValue{"load.retries", "5"},
    DefaultValue{"load.pace", "\"auto\""},
    DefaultValue{"load.admission_timeout", "\"60s\""},
    DefaultValue{"device.enabled", "true"},
    DefaultValue{"device.pinned_ring", "\"128MiB\""},
    DefaultValue{"device.threads", "4"},
    DefaultValue{"device.stall_timeout", "\"30s\""},
    DefaultValue{"device.budget", "90 % of each GPU's memory"},
    DefaultValue{"device.segment_size", "0"},
    DefaultValue{"device.check_interval", "\"10s\""},
    DefaultValue{"device.allow_registered", "false"},
    DefaultValue{"metrics.listen", "\"127.0.0.1:9464\""},
    DefaultValue{"access.read_groups", "[\"modelhost\"]"},
    DefaultValue{"access.admin_groups", "[\"modelhost-admin\"]"},
    DefaultValue{"access.max_leases_per_uid", "4096"},
    DefaultValue{"access.max_connections_per_uid", "1024"},
    DefaultValue{"machine.platform", "looked for"},
    DefaultValue{"machine.tensorrt", "looked for"},
    DefaultValue{"machine.compute_capability", "looked for"},
    DefaultValue{"machine.cuda_driver", "looked for"},
    DefaultValue{"desired.file", "\"\""},
};

bool IsReloadable(absl::string_view key) {
  return absl::StartsWith(key, "models.") || absl::StartsWith(key, "machine.") ||
         absl::StartsWith(key, "desired.");
}

std::string DefaultOf(const std::string& key) {
  if (absl::StartsWith(key, "models.")) return "as the model's own model.toml says";
  const auto* const it = std::find_if(kDefaults.begin(), kDefaults.end(),
                                      [&](const DefaultValue& known) { return known.key == key; });
  return it == kDefaults.end() ? "default" : std::string(it->value);
}

// Those of the sections first, then those of models.
std::vector<std::string> KeysOf(const Config& config) {
  std::vector<std::string> keys = ConfigKeys();
  for (const auto& [key, given] : config.given) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  return keys;
}

std::string ValueOf(const Config& config, const std::string& key) {
  const auto it = config.given.find(key);
  return it == config.given.end() ? DefaultOf(key) : it->second.text;
}

}  // namespace

std::vector<ConfigEntry> DescribeConfig(const Config& config, const std::string& file) {
  std::vector<ConfigEntry> entries;
  for (const std::string& key : KeysOf(config)) {
    const auto given = config.given.find(key);
    entries.push_back(
        {key, ValueOf(config, key),
         given == config.given.end() ? "default" : absl::StrCat(file, ":", given->second.line),
         IsReloadable(key)});
  }
  return entries;
}

std::vector<ConfigChange> CompareConfigs(const Config& from, const Config& to) {
  std::vector<ConfigChange> changes;
  std::vector<std::string> keys = KeysOf(from);
  for (const std::string& key : KeysOf(to)) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  for (const std::string& key : keys) {
    ConfigChange change{key, ValueOf(from, key), ValueOf(to, key), !IsReloadable(key)};
    if (change.from != change.to) changes.push_back(std::move(change));
  }
  return changes;
}

}  // namespace modelhost
