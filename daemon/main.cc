// Flags, signals, exit code; nothing else. 0: stopped as asked. 1: could not start. 2: usage.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "daemon/app.h"
#include "daemon/device_agent/agent_server.h"
#include "daemon/platform/machine_probe.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/platform/systemd.h"

#ifndef MODELHOST_VERSION
#define MODELHOST_VERSION "unknown"
#endif
#ifndef MODELHOST_REVISION
#define MODELHOST_REVISION "unknown"
#endif

namespace modelhost {
namespace {

constexpr unsigned kProbeSeconds = 60;

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The first of a systemd directory list.
std::string FirstOf(const std::string& list) { return list.substr(0, list.find(':')); }

// Under a systemd unit, what StateDirectory= and RuntimeDirectory= made; else the user's own
// places.
std::string DataDir() {
  if (const std::string state = FirstOf(Env("STATE_DIRECTORY")); !state.empty()) return state;
  if (const std::string data = Env("XDG_DATA_HOME"); !data.empty()) return data + "/modelhost";
  const std::string home = Env("HOME");
  return (home.empty() ? absl::StrCat("/tmp/modelhost-", ::getuid()) : home + "/.local/share") +
         "/modelhost";
}

std::string RuntimeDir() {
  if (const std::string runtime = FirstOf(Env("RUNTIME_DIRECTORY")); !runtime.empty()) {
    return runtime;
  }
  const std::string base = Env("XDG_RUNTIME_DIR");
  return (base.empty() ? absl::StrCat("/tmp/modelhost-", ::getuid()) : base) + "/modelhost";
}

std::string ProgramDir() {
  char path[4096];
  const ssize_t bytes = ::readlink("/proc/self/exe", path, sizeof path);
  const std::string program(path, bytes < 0 ? 0 : static_cast<size_t>(bytes));
  const size_t slash = program.rfind('/');
  return slash == std::string::npos ? "." : program.substr(0, slash);
}

// Descriptors are what the daemon hands out: take as many as the hard limit gives.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

UniqueFd BlockSignals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&signals, number);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD,
           SIG_DFL);  // Ignored, it would take the ends of children from who waits for them.
  return UniqueFd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

int Fail(int code, const std::string& text) {
  std::fprintf(stderr, "error: %s\n", text.c_str());
  return code;
}

// A driver that hangs must not leave a process behind, whatever became of the one that waits.
// `answer`: not stdout, where a driver may write what it likes.
int Probe(int answer, bool with_driver) {
  ::alarm(kProbeSeconds);
  ProbeMachine(with_driver, [answer](const std::string& text) {
    absl::string_view rest = text;
    while (!rest.empty()) {
      const ssize_t wrote = ::write(answer, rest.data(), rest.size());
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) ::_exit(1);
      rest.remove_prefix(static_cast<size_t>(wrote));
    }
  });
  // Without the driver's own ways to end a process.
  ::_exit(0);
}

int Main(int argc, char** argv) {
  CLI::App cli("Holds machine-learning model weights for a whole machine.", "modelhostd");
  std::string config_path;
  std::string store;
  std::string store_view;
  std::string state;
  std::string runtime;
  std::string metrics;
  std::string log_level = "info";
  bool check = false;
  CLI::App* probe = cli.add_subcommand(
      "probe-machine", "Print what versions may be bound to: platform, TensorRT, GPUs, driver");
  int answer = STDOUT_FILENO;
  bool no_driver = false;
  probe->add_option("--answer", answer, "Number of the open descriptor to write to");
  probe->add_flag("--no-driver", no_driver, "Do not ask the CUDA driver");
  CLI::App* agent = cli.add_subcommand(
      "device-agent", "Make the CUDA calls of one GPU for a daemon, which starts this itself");
  int agent_socket = -1;
  agent->add_option("socket", agent_socket, "Number of the open socket to the daemon")->required();
  cli.add_option("--config", config_path, "Configuration file (modelhostd.toml)");
  cli.add_option("--store", store, "Where the models are kept");
  cli.add_option("--store-view", store_view,
                 "A read-only mount of the store: what clients get is opened through it");
  cli.add_option("--state", state, "Where labels and records are kept");
  cli.add_option("--runtime-dir", runtime, "Where the sockets are made");
  cli.add_option("--metrics", metrics, "ADDRESS:PORT for /metrics, or off");
  cli.add_option("--log-level", log_level, "debug, info, warning or error");
  cli.add_flag("--check-config", check, "Read the configuration, say whether it is good, and end");
  cli.set_version_flag(
      "--version", absl::StrCat("modelhostd ", MODELHOST_VERSION, " (", MODELHOST_REVISION, ")"));
  try {
    cli.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // CLI11's way to say it; it goes no further.
    if (error.get_exit_code() == 0) return cli.exit(error);
    return Fail(2, absl::StrCat(error.what(), " (modelhostd --help)"));
  }

  if (probe->parsed()) return Probe(answer, !no_driver);
  if (agent->parsed()) {
    if (::fcntl(agent_socket, F_GETFD) < 0) {
      return Fail(2, absl::StrCat("device-agent: descriptor ", agent_socket, " is not open"));
    }
    ::_exit(RunDeviceAgent(UniqueFd(agent_socket)));  // Without a driver's own ways to end.
  }
  AppOptions options;
  options.config = DefaultConfig();
  if (!config_path.empty()) {
    auto config = LoadConfig(config_path);
    if (!config.ok()) {
      // What is wrong in the file stays wrong at the next start; what cannot be read may not.
      const bool wrong = check || absl::IsInvalidArgument(config.status());
      return Fail(wrong ? 2 : 1, std::string(config.status().message()));
    }
    options.config = *std::move(config);
  }
  if (check) {
    std::printf("%s: good\n", config_path.empty() ? "built-in configuration" : config_path.c_str());
    return 0;
  }
  const auto level = ParseLogLevel(log_level);
  if (!level.ok()) return Fail(2, std::string(level.status().message()));
  if (!metrics.empty()) {
    if (auto status = CheckListenAddress(metrics); !status.ok()) {
      return Fail(2, absl::StrCat("--metrics: ", status.message()));
    }
  }
  RaiseDescriptorLimit();
  InstallSigbusHandler();
  options.config_path = config_path;
  options.store_dir = store.empty() ? DataDir() + "/store" : store;
  options.store_view = store_view;
  options.state_dir = state.empty() ? DataDir() + "/state" : state;
  options.runtime_dir = runtime.empty() ? RuntimeDir() : runtime;
  options.program_dir = ProgramDir();
  // Opened once: an upgrade that replaces it under a running daemon changes nothing.
  // lint: allow(open) there is no Os yet
  options.program = UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  options.metrics_listen = metrics.empty() ? options.config.metrics.listen : metrics;
  options.metrics_required = !metrics.empty() || options.config.metrics.given;
  for (const auto& [flag, text] :
       {std::pair{"--store", store}, std::pair{"--state", state},
        std::pair{"--store-view", store_view}, std::pair{"--runtime-dir", runtime},
        std::pair{"--metrics", metrics}}) {
    if (!text.empty()) options.given_flags.insert(flag);
  }
  options.log_level = *level;
  options.inherited = TakeInheritedFds({"control", "handles"});
  options.signals = BlockSignals();
  options.version = MODELHOST_VERSION;
  options.revision = MODELHOST_REVISION;
  if (!options.signals.valid()) return Fail(1, "no signal descriptor to be had (ulimit -n)");
  auto app = App::Build(std::move(options));
  if (!app.ok()) return Fail(1, std::string(app.status().message()));
  (*app)->Run();
  return 0;
}

}  // namespace
}  // namespace modelhost

int main(int argc, char** argv) { return modelhost::Main(argc, argv); }
