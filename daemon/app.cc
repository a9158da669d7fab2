#include "daemon/app.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/app_impl.h"
#include "daemon/observe/process_metrics.h"
#include "daemon/observe/rpc_observer.h"
#include "daemon/observe/state_metrics.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr char kIndexerName[] = "modelhost-indexer";
constexpr int kLoadThreads = 4;  // Loads, verifications, publishes at one time.
// Loads, verifications, publishes at one time.
constexpr int kWorkThreads = 3;  // Label writes, scans, freeing: what must not wait for those.
// Label writes, scans, freeing: what must not wait for those.
constexpr int kOpenThreads = 2;
constexpr uint32_t kSocketMode = 0666;  // Who may do what is decided by the kernel's credentials.

int LoadThreads(int configured) {
  if (configured > 0) return configured;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 8);
}

uint64_t HostBudget(const Config& config, const MemoryLimits& limits) {
  if (config.memory.host_budget_bytes.has_value()) return *config.memory.host_budget_bytes;
  return std::min(limits.ram_bytes, limits.cgroup_bytes) / 5 * 4;
}

}  // namespace

absl::StatusOr<std::unique_ptr<App>> App::Build(AppOptions options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  if (auto status = impl->Build(); !status.ok()) return status;
  return std::unique_ptr<App>(new App(std::move(impl)));
}

App::App(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
App::~App() = default;

// The program is opened once: an upgrade that replaces it under a running daemon changes nothing.
absl::StatusOr<std::unique_ptr<ContentsIndexer>> App::Impl::MakeIndexer() {
  const IsolateParsing isolate = options.config.load.isolate_parsing;
  if (isolate == IsolateParsing::kOff) return std::make_unique<InProcessIndexer>();
  auto program = OpenIndexer();
  absl::Status why = program.status();
  if (why.ok()) {
    auto made =
        std::make_unique<ProcessIndexer>(*std::move(program), os, clock, ProcessIndexer::Options{});
    why = made->CheckConfined();
    if (why.ok() || absl::IsUnimplemented(why)) {
      logger.Write(LogLevel::kInfo,
                   LogLine("parsing_isolated").Add("confined", why.ok() ? "yes" : "no"));
      return made;
    }
  }
  // Not there, or not to be confined here: only what the operator may be content with.
  const bool content = absl::IsNotFound(why) || absl::IsFailedPrecondition(why);
  if (isolate == IsolateParsing::kRequired || !content) {
    return absl::Status(why.code(), absl::StrCat(why.message(),
                                                 "; model files are parsed by that program "
                                                 "(install it, or set isolate_parsing in [load])"));
  }
  logger.Write(LogLevel::kWarning, LogLine("parsing_in_process").AddError(why));
  return std::make_unique<InProcessIndexer>();
}

absl::StatusOr<UniqueFd> App::Impl::OpenIndexer() {
  std::string looked_in;
  for (const std::string& place :
       {options.program_dir, absl::StrCat(options.program_dir, "/", MODELHOST_LIBEXEC)}) {
    auto dir = os.OpenDir(place);
    auto program = dir.ok() ? os.OpenFileAt(*dir, kIndexerName) : dir.status();
    if (program.ok() || !absl::IsNotFound(program.status())) return program;
    absl::StrAppend(&looked_in, looked_in.empty() ? "" : " or ", place);
  }
  return absl::NotFoundError(absl::StrCat(kIndexerName, ": not in ", looked_in));
}

// The GPUs are looked for in the background: what stays on the host does not wait for a driver.
void App::Impl::MakeDevices() {
  const Config::Device& config = options.config.device;
  DeviceAgentOptions agent_options;
  agent_options.ring_bytes = config.pinned_ring_bytes;
  agent_options.threads = static_cast<uint32_t>(config.threads);
  agent_options.allow_registered = config.allow_registered;
  agent_options.stall = config.stall_timeout;
  gpu_finder = std::make_unique<AgentFinder>(std::move(options.program), clock, agent_options);
  DeviceTierOptions tier_options;
  tier_options.enabled = config.enabled;
  tier_options.budget_bytes = config.budget_bytes;
  if (config.segment_bytes > 0) tier_options.segment_bytes = config.segment_bytes;
  tier_options.ring_bytes = config.pinned_ring_bytes;
  tier_options.discovery = config.stall_timeout;
  devices = std::make_unique<DeviceTier>(*gpu_finder, clock, *host, tier_options);
  loader->UseDevices(*devices);
}

absl::Status App::Impl::Build() {
  const Config& config = options.config;
  const uint32_t uid = ::geteuid();
  auto runtime_dir = TakeDir(os, options.runtime_dir, uid, ::getpid());
  if (!runtime_dir.ok()) return runtime_dir.status();
  runtime = *std::move(runtime_dir);
  auto state_dir = TakeDir(os, options.state_dir, uid, ::getpid());
  if (!state_dir.ok()) return state_dir.status();
  state = *std::move(state_dir);

  auto labels = LoadLabels(os, state.dir);
  if (!labels.ok()) return labels.status();
  labels->epoch += 1;
  if (auto status = SaveLabels(os, state.dir, *labels); !status.ok()) return status;
  FaultPoint("start.epoch_saved");

  std::vector<std::string> unknown_groups;
  access = AccessPolicy::Make(config.access.read_groups, config.access.admin_groups, uid,
                              &unknown_groups);
  for (const std::string& group : unknown_groups) {
    logger.Write(LogLevel::kInfo, LogLine("unknown_group").Add("group", group));
  }

  auto made_loop = EventLoop::Create(clock);
  if (!made_loop.ok()) return made_loop.status();
  loop = *std::move(made_loop);
  metrics = std::make_unique<Metrics>(BuildInfo{options.version, options.revision, "none"});

  auto made_store = Store::Open(os, options.store_dir, options.state_dir, uid, options.store_view);
  if (!made_store.ok()) return made_store.status();
  store = *std::move(made_store);
  verified = VerifiedFiles::Load(os, state.dir);
  publisher = std::make_unique<Publisher>(*store, verified.get());
  if (auto status = publisher->SweepIncoming(); !status.ok()) {
    logger.Write(LogLevel::kWarning, LogLine("sweep").AddError(status));
  }
  FaultPoint("start.swept");

  const MemoryLimits limits = os.Limits();
  host = std::make_unique<BudgetPool>("host", HostBudget(config, limits));
  memlock = std::make_unique<BudgetPool>(
      "memlock", config.memory.memlock == MemlockPolicy::kOff ? UINT64_MAX : limits.memlock_bytes);
  machine.SetOverrides(config.machine);
  LoaderOptions load_options;
  load_options.verify = config.load.verify;
  load_options.memlock = config.memory.memlock;
  load_options.threads = LoadThreads(config.load.threads);
  load_options.io_priority = config.load.io_priority;
  load_options.pace = config.load.pace;
  const auto in_background = [this] {
    if (auto status = os.MakeThreadBackground(); !status.ok()) {
      logger.Write(LogLevel::kWarning, LogLine("load_priority").AddError(status));
    }
  };
  chunk_pool = std::make_unique<ThreadPool>("mh-chunk", load_options.threads, in_background);
  auto made_indexer = MakeIndexer();
  if (!made_indexer.ok()) return made_indexer.status();
  indexer = *std::move(made_indexer);
  loader = std::make_unique<Loader>(os, clock, *store, *verified, *chunk_pool, regions, *host,
                                    *memlock, *indexer, index_writer, machine, load_options);
  if (const size_t room = FdStoreRoom(); room > 0) {
    Parking::Options parking_options;
    parking_options.epoch = labels->epoch;
    parking_options.builder = absl::StrCat(options.version, " ", options.revision);
    parking_options.most = room;
    parking = std::make_unique<Parking>(os, fd_store, state.dir, parking_options);
    loader->UseFdStore(*parking, restored);
  }
  MakeDevices();
  load_pool = std::make_unique<ThreadPool>("mh-load", kLoadThreads, in_background);
  pool = std::make_unique<ThreadPool>("mh-work", kWorkThreads);
  open_pool = std::make_unique<ThreadPool>("mh-open", kOpenThreads);

  auto made_catalogue = CatalogueWriter::Create(labels->epoch, *labels);
  if (!made_catalogue.ok()) return made_catalogue.status();
  catalogue = *std::move(made_catalogue);
  catalogue->OnFull([this](const std::string& model, const std::string& label) {
    logger.Write(LogLevel::kWarning,
                 LogLine("catalogue_full").Add("model", model).Add("label", label));
  });

  ManagerOptions manager_options;
  manager_options.memlock = config.memory.memlock;
  manager_options.model_policies = config.models;
  manager_options.own_uid = uid;
  manager_options.retry.most = config.load.retries;
  manager_options.max_leases_per_uid = config.access.max_leases_per_uid;
  manager_options.admission_timeout = config.load.admission_timeout;
  manager_options.device_check_interval = config.device.check_interval;
  BrokerOptions broker_options;
  broker_options.max_connections_per_uid = std::min<size_t>(broker_options.max_connections_per_uid,
                                                            config.access.max_connections_per_uid);
  if (store->read_only()) manager_options.file_protection = "read_only_mount";
  manager = std::make_unique<ModelManager>(
      ModelManager::Deps{os, clock, *loop, *load_pool, *pool, *store, *publisher, *loader,
                         *verified, *host, *memlock, *catalogue, state.dir, *access, machine,
                         parking.get(), parking == nullptr ? nullptr : &restored, devices.get()},
      manager_options, *labels);
  broker_options.on_accept_pause = [this](const absl::Status& why) {
    TellOfShortage("handles", why);
  };
  broker = std::make_unique<HandleBroker>(
      HandleBroker::Deps{*loop, *pool, *open_pool, closer, *manager, *catalogue, clock},
      broker_options);

  std::string metrics_address;
  if (options.metrics_listen != "off") {
    auto endpoint = HttpEndpoint::Listen(
        options.metrics_listen, {metrics->registry(), std::make_shared<ProcessCollector>(),
                                 std::make_shared<StateCollector>(*manager, *loop, clock)});
    if (endpoint.ok()) {
      http = *std::move(endpoint);
      metrics_address = http->address();
    } else if (options.metrics_required) {
      return endpoint.status();
    } else {
      logger.Write(LogLevel::kWarning, LogLine("metrics_off").AddError(endpoint.status()));
    }
  }

  reloader = std::make_unique<ConfigReloader>(
      ConfigReloader::Deps{
          *loop, *pool, *manager, machine, logger,
          // Before the first READY systemd waits for that one, and takes no other for it.
          [this] {
            if (told_ready) NotifyReloading();
          },
          [this] {
            if (told_ready && !stopping) NotifyReady(StatusLine());
          }},
      options.config_path, config, FlagEntries());

  ServerInfo info;
  info.version = options.version;
  info.revision = options.revision;
  info.runtime_dir = options.runtime_dir;
  info.metrics_address = metrics_address;
  info.pid = ::getpid();
  info.read_groups = config.access.read_groups;
  info.admin_groups = config.access.admin_groups;
  ControlServer::Interceptors interceptors;
  interceptors.push_back(MakeRpcObserver(*metrics, clock));
  server = std::make_unique<ControlServer>(
      ControlServer::Deps{*manager, *loop, clock, *access, *publisher, health, model_watcher,
                          *reloader},
      info, std::move(interceptors), CallGuard::Options{}, config.access.max_connections_per_uid);
  for (Observer* observer : std::initializer_list<Observer*>{
           &log_observer, metrics.get(), broker.get(), &health, &model_watcher, this}) {
    manager->AddObserver(observer);
  }
  if (auto status = server->Start(); !status.ok()) return status;

  auto handles = Listen("handles", SocketType::kSeqpacket);
  if (!handles.ok()) return handles.status();
  handles_listener.emplace(*std::move(handles));
  auto control = Listen("control", SocketType::kStream);
  if (!control.ok()) return control.status();
  control_listener.emplace(*std::move(control));

  broker->Start(*std::move(handles_listener));
  control_watch =
      loop->Watch(control_listener->fd().get(), EPOLLIN, [this](uint32_t) { AcceptControl(); });
  loop->Watch(options.signals.get(), EPOLLIN, [this](uint32_t) { OnSignal(); });
  auto made_watcher = DirWatcher::Create(*loop, clock, DirWatcher::Options{}, [this] {
    manager->Rescan([](const absl::StatusOr<ModelManager::RescanResult>&) {});
  });
  if (made_watcher.ok()) {
    watcher = *std::move(made_watcher);
  } else {
    logger.Write(LogLevel::kWarning, LogLine("watch_off").AddError(made_watcher.status()));
  }
  DirWatcher::Options desired_options;
  desired_options.contents = true;
  auto made_desired_watcher =
      DirWatcher::Create(*loop, clock, desired_options, [this] { manager->LookAtDesired(); });
  if (made_desired_watcher.ok()) {
    desired_watcher = *std::move(made_desired_watcher);
  } else {
    // The file is looked at every few seconds anyway.
    logger.Write(LogLevel::kWarning, LogLine("watch_off").AddError(made_desired_watcher.status()));
  }
  manager->FollowDesired(config.desired.file);
  // Late: a start that fails before this leaves everything in the store for the next one.
  if (parking != nullptr) {
    restored.Take(os, fd_store, state.dir, std::exchange(options.inherited.stored, {}));
  }
  FaultPoint("start.serving");
  pool->Post([this] {
    devices->Discover();
    loop->Post([this] { TellOfDevices(); });
  });
  manager->Start();
  FeedWatchdog();
  AskForTime();
  logger.Write(LogLevel::kInfo,
               LogLine("start")
                   .Add("version", options.version)
                   .Add("epoch", labels->epoch)
                   .Add("store", options.store_dir)
                   .Add("runtime_dir", options.runtime_dir)
                   .Add("metrics", metrics_address.empty() ? "off" : metrics_address)
                   .Add("host_budget_bytes", host->limit())
                   .Add("load_threads", load_options.threads));
  return absl::OkStatus();
}

// What the command line, or the environment that it is read with, has decided.
std::vector<ConfigEntry> App::Impl::FlagEntries() const {
  std::vector<ConfigEntry> entries;
  const auto add = [&](const char* key, const std::string& value, const char* flag) {
    const bool given = options.given_flags.contains(flag);
    entries.push_back({key, absl::StrCat("\"", value, "\""), given ? flag : "default", false});
  };
  add("store", options.store_dir, "--store");
  add("state", options.state_dir, "--state");
  add("runtime_dir", options.runtime_dir, "--runtime-dir");
  if (!options.store_view.empty()) add("store_view", options.store_view, "--store-view");
  if (options.given_flags.contains("--metrics")) {
    add("metrics.listen", options.metrics_listen, "--metrics");
  }
  return entries;
}

absl::StatusOr<UnixListener> App::Impl::Listen(const std::string& name, SocketType type) {
  auto& sockets = options.inherited.sockets;
  if (const auto it = sockets.find(name); it != sockets.end()) {
    return UnixListener::Adopt(std::move(it->second), type);
  }
  return UnixListener::Bind(absl::StrCat(options.runtime_dir, "/", name, ".sock"), type,
                            kSocketMode);
}

}  // namespace modelhost
