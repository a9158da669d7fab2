// The composition root: builds the daemon's objects, starts and stops them in order. Reading Build
// and Stop shows the whole program.
//
//   start  lock the runtime directory, labels (epoch + 1), store, page, sockets, take back what the
//          fd store kept, then load what the labels name; READY is told to systemd when the
//          required models are READY
//   stop   withdraw (page closed, grants end), RPCs get a second, loads are cancelled, the loop
//   ends
//
// One App per process. Run is called by the main thread, which becomes the control thread.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config.h"
#include "daemon/observe/logger.h"
#include "daemon/platform/systemd.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct AppOptions {
  Config config;
  std::string config_path;  // Empty: none; SIGHUP then has nothing to read.
  std::string store_dir;
  std::string store_view;  // A read-only mount of it, to open what is served; empty: none.
  std::string state_dir;
  std::string runtime_dir;
  std::string program_dir;            // Where this program lies; its helpers lie beside it.
  UniqueFd program;                   // This very one, to start device agents with.
  std::string metrics_listen;         // "ADDR:PORT" or "off".
  bool metrics_required = false;      // Asked for by name: failing to listen is an error.
  std::set<std::string> given_flags;  // "--store", ...: for people who ask where a value is from.
  LogLevel log_level = LogLevel::kInfo;
  InheritedFds inherited;  // From systemd: "control", "handles", and what was stored.
  UniqueFd signals;        // A signalfd for SIGTERM, SIGINT, SIGHUP.
  std::string version;
  std::string revision;
};

class App {
 public:
  // Everything that can fail at start-up, with the path and the way out.
  static absl::StatusOr<std::unique_ptr<App>> Build(AppOptions options);
  ~App();

  // Serves until SIGTERM or SIGINT.
  void Run();

 private:
  struct Impl;
  explicit App(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace modelhost
