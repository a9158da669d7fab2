// modelhostd.toml: what the operator of a machine decides. Every key has a default; a daemon
// without a file runs on DefaultConfig().
//
// Unknown keys and wrong types are INVALID_ARGUMENT, "file:line: key 'section.key': why". Sizes are
// bytes. Pure but for LoadConfig, which reads one file (start-up and SIGHUP).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/platform/machine_facts.h"
#include "daemon/region/loader.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

// Whether model files are parsed by modelhost-indexer, or in the daemon: kAuto takes the program
// where it is installed.
enum class IsolateParsing { kAuto, kRequired, kOff };

struct Config {
  struct Memory {
    // Unset: 80 % of the smaller of RAM and the cgroup's limit.
    std::optional<uint64_t> host_budget_bytes;
    MemlockPolicy memlock = MemlockPolicy::kBestEffort;
  };
  struct Load {
    int threads = 0;  // 0: one per core, at most 8.
    VerifyPolicy verify = VerifyPolicy::kFull;
    std::string io_priority = "best-effort:6";  // "best-effort:0".."best-effort:7", "idle", "none".
    int retries = 5;  // Of a load that failed for a reason that may pass; 0: none.
    LoadPace pace;    // "auto", "off" or "SIZE/s".
    IsolateParsing isolate_parsing = IsolateParsing::kAuto;
    absl::Duration admission_timeout = absl::Seconds(60);  // How long a load waits for room.
  };
  struct Device {
    bool enabled = true;  // False: no driver is looked for; every model stays on the host.
    // Of each GPU, while something is copied: pinned host memory, filled by that many threads.
    uint64_t pinned_ring_bytes = uint64_t{128} << 20;
    int threads = 4;                                    // 1 to 8.
    absl::Duration stall_timeout = absl::Seconds(30);   // A copy without progress has failed.
    std::optional<uint64_t> budget_bytes;               // Of each GPU. Unset: 90 % of its memory.
    uint64_t segment_bytes = 0;                         // The most of one allocation; 0: no limit.
    absl::Duration check_interval = absl::Seconds(10);  // Whether the copies are still there.
    bool allow_registered = false;                      // Mode host_registered: unprotected pages.
  };
  struct Metrics {
    std::string listen = "127.0.0.1:9464";  // As in ParseHttpAddress, or "off".
    bool given = false;                     // The file has it: failing to listen is an error.
  };
  struct Access {
    std::vector<std::string> read_groups = {"modelhost"};  // Names or decimal numbers.
    std::vector<std::string> admin_groups = {"modelhost-admin"};
    // Of one uid, whoever it is: root and the daemon's own, too.
    uint64_t max_leases_per_uid = 4096;
    uint64_t max_connections_per_uid = 1024;  // To each of the two sockets.
  };

  struct Desired {
    std::string file;  // Absolute; empty: none is followed.
  };

  // [machine]: what is said here is not looked for. Empty facts are.
  MachineFacts machine;
  Memory memory;
  Load load;
  Device device;
  Metrics metrics;
  Access access;
  Desired desired;
  std::map<std::string, ModelPolicy> models;  // [[models]] by name.

  struct Given {
    uint32_t line = 0;
    std::string text;  // The value as TOML writes it.
  };
  // What the file has: "load.threads", "models.planner.residency".
  std::map<std::string, Given> given;
};

Config DefaultConfig();
// `file` is for messages.
absl::StatusOr<Config> ParseConfig(absl::string_view text, absl::string_view file);
// NOT_FOUND, PERMISSION_DENIED and the like name the path.
absl::StatusOr<Config> LoadConfig(const std::string& path);

// "section.key" of all that a file may have, without [[models]], in the order of the sections.
std::vector<std::string> ConfigKeys();
// Puts into `running` what a new file says about the parts that may change while the daemon runs:
// models, machine and desired.
void TakeReloadable(Config fresh, Config& running);

// INVALID_ARGUMENT unless it is what Metrics::listen may be; also for the command line.
absl::Status CheckListenAddress(absl::string_view listen);

}  // namespace modelhost
