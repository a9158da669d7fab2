// All parts of the daemon, in the order of their construction. For app.cc, which puts them
// together, and app_run.cc, which lets them run and ends them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "daemon/app.h"
#include "daemon/config_reload.h"
#include "daemon/device_agent/agent_finder.h"
#include "daemon/observe/http_endpoint.h"
#include "daemon/observe/log_observer.h"
#include "daemon/observe/metrics.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/dir_watcher.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd_closer.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/probed_machine.h"
#include "daemon/platform/systemd.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/platform/unix_listener.h"
#include "daemon/publish/catalogue_writer.h"
#include "daemon/publish/handle_broker.h"
#include "daemon/publish/index_writer.h"
#include "daemon/region/device_tier.h"
#include "daemon/region/loader.h"
#include "daemon/registry/model_manager.h"
#include "daemon/runtime_dir.h"
#include "daemon/service/control_server.h"
#include "daemon/store/publish.h"
#include "daemon/store/store.h"

namespace modelhost {

// In the order of construction; destruction is the reverse.
struct App::Impl : public Observer {
  explicit Impl(AppOptions options_in)
      : options(std::move(options_in)), logger(options.log_level), log_observer(logger, clock) {}

  absl::Status Build();
  absl::StatusOr<std::unique_ptr<ContentsIndexer>> MakeIndexer();
  absl::StatusOr<UniqueFd> OpenIndexer();
  void MakeDevices();
  absl::StatusOr<UnixListener> Listen(const std::string& name, SocketType type);
  void AcceptControl();
  void TellOfShortage(const std::string& socket, const absl::Status& why);
  void OnSignal();
  std::vector<ConfigEntry> FlagEntries() const;
  void AskForTime();
  void BeginStop(int signal_number);
  void FeedWatchdog();
  void RefreshWatches();
  std::string StatusLine() const;
  void TellOfDevices();

  void OnReady(bool ready) override;
  void OnScan(uint64_t added, uint64_t invalid) override;
  void OnDesiredFile(const DesiredFileReport& report) override;

  AppOptions options;
  Logger logger;
  SystemClock clock;
  LogObserver log_observer;
  LinuxOs os;
  FdCloser closer;  // Last to go: it has what the others left.
  OwnedDir runtime;
  OwnedDir state;
  std::optional<AccessPolicy> access;
  std::unique_ptr<EventLoop> loop;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<Store> store;
  std::unique_ptr<VerifiedFiles> verified;
  std::unique_ptr<Publisher> publisher;
  std::unique_ptr<BudgetPool> host;
  std::unique_ptr<BudgetPool> memlock;
  std::unique_ptr<AgentFinder> gpu_finder;
  std::unique_ptr<DeviceTier> devices;  // Outlives every copy on a GPU.
  SystemdFdStore fd_store;
  RestoredMemory restored;
  std::unique_ptr<Parking> parking;  // Null without an fd store. Outlives what it parked.
  RegionCache regions;
  IndexWriter index_writer;
  ProbedMachine machine{clock};
  std::unique_ptr<ThreadPool> chunk_pool;  // Pieces of a load.
  std::unique_ptr<ContentsIndexer> indexer;
  std::unique_ptr<Loader> loader;
  std::unique_ptr<ThreadPool> load_pool;  // Whole loads, verifications, publishes.
  std::unique_ptr<ThreadPool> pool;       // Everything else that blocks.
  std::unique_ptr<ThreadPool> open_pool;  // Opens files for clients, who wait.
  std::unique_ptr<CatalogueWriter> catalogue;
  std::unique_ptr<ModelManager> manager;
  std::unique_ptr<HandleBroker> broker;
  HealthReporter health;
  ModelWatcher model_watcher;
  std::unique_ptr<ConfigReloader> reloader;
  std::unique_ptr<ControlServer> server;
  std::unique_ptr<HttpEndpoint> http;
  std::unique_ptr<DirWatcher> watcher;
  std::unique_ptr<DirWatcher> desired_watcher;
  std::optional<UnixListener> control_listener;
  std::optional<UnixListener> handles_listener;
  WatchId control_watch = 0;
  std::map<std::string, absl::Duration> shortage_told;  // By socket, when.
  bool told_ready = false;
  bool stopping = false;
};

}  // namespace modelhost
