// doctor: is this machine fit, and if not, what to do?
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "client/modelctl/doctor.h"
#include "client/modelctl/doctor_advice.h"
#include "client/modelctl/render.h"
#include "client/modelctl/upload.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

constexpr char kSystemStore[] = "/var/lib/modelhost/store";

// The finding of an error line without its advice, which has a column of its own.
std::string WithoutAdvice(const std::string& error) { return error.substr(0, error.rfind(" (")); }

Check CheckControl(Context& context, DaemonStatus& daemon) {
  const auto control = context.Control();
  if (!control.ok()) {
    return Found(control.exit().code == ExitCode::kPermission ? Trouble::kNoRightToCommand
                                                              : Trouble::kNoDaemon,
                 WithoutAdvice(control.exit().error));
  }
  auto status =
      context.Call("status", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) {
    return status.exit().code == ExitCode::kPermission
               ? Found(Trouble::kNoRightToRead, WithoutAdvice(status.exit().error))
               : Found(Trouble::kNoAnswer, status.exit().error);
  }
  daemon = *std::move(status);
  const auto sockets = context.sockets();
  return Fine("control.sock", sockets.ok() ? sockets->control : "");
}

Check CheckHandles(Context& context, bool daemon_there) {
  const auto sockets = context.sockets();
  if (!sockets.ok()) return Found(Trouble::kNoHandlesPath, sockets.exit().error);
  const auto connected = ConnectHandles(sockets->handles);
  if (connected.ok()) return Fine("handles.sock", sockets->handles);
  return Found(daemon_there ? Trouble::kHandlesBroken : Trouble::kHandlesDown,
               connected.exit().error);
}

Check CheckDaemon(const v1::GetStatusResponse& status) {
  const std::string finding =
      absl::StrCat("modelhostd ", status.version(), ", epoch ", status.epoch(), ", up ",
                   HumanDuration(ToAbsl(status.uptime())));
  if (!status.store_error().empty()) {
    return Found(Trouble::kStoreBroken, absl::StrCat(finding, "; store: ", status.store_error()));
  }
  if (!status.ready()) {
    std::string why = finding;
    for (const std::string& reason : status.not_ready()) absl::StrAppend(&why, "; ", reason);
    return Found(Trouble::kNotReady, absl::StrCat(why, "; not ready"));
  }
  if (status.invalid_transitions() > 0) {
    return Found(
        Trouble::kInvalidTransitions,
        absl::StrCat(finding, "; ", Plural(status.invalid_transitions(), "invalid transition")));
  }
  return Fine("daemon", absl::StrCat(finding, ", ready"));
}

// The store of the daemon that is or was here: the packaged one's, or what a daemon of this user
// would have.
std::string LikelyStore() {
  if (::getuid() == 0 && ::access(kSystemStore, F_OK) == 0) return kSystemStore;
  const char* data = std::getenv("XDG_DATA_HOME");
  const char* home = std::getenv("HOME");
  std::string own;
  if (data != nullptr && *data == '/')
    own = absl::StrCat(data, "/modelhost/store");
  else if (home != nullptr && *home == '/')
    own = absl::StrCat(home, "/.local/share/modelhost/store");
  const bool system =
      own.empty() || (::access(own.c_str(), F_OK) != 0 && ::access(kSystemStore, F_OK) == 0);
  return system ? kSystemStore : own;
}

// `path`, or the folder above it that exists.
std::string Nearest(std::string path) {
  while (path.size() > 1 && ::access(path.c_str(), F_OK) != 0) {
    const size_t slash = path.rfind('/');
    path.resize(slash == 0 || slash == std::string::npos ? 1 : slash);
  }
  return path;
}

}  // namespace

Exit Doctor(Context& context) {
  DaemonStatus daemon;
  std::vector<Check> checks;
  const Check control = CheckControl(context, daemon);
  const bool forbidden = control.advice == TextOf(Trouble::kNoRightToRead).advice;
  const std::string store = daemon.has_value() ? daemon->store() : LikelyStore();
  checks.push_back(CheckKernel());
  checks.push_back(CheckPopulate());
  checks.push_back(CheckSealing());
  checks.push_back(CheckMemlock(daemon));
  checks.push_back(CheckFileLimit());
  checks.push_back(CheckShmemHugePages());
  checks.push_back(CheckFolios(Nearest(store)));
  checks.push_back(control);
  checks.push_back(CheckHandles(context, daemon.has_value() || forbidden));
  if (daemon.has_value()) checks.push_back(CheckDaemon(*daemon));
  checks.push_back(CheckDisk(store));
  for (Check& check : CheckGpus(daemon)) checks.push_back(std::move(check));

  Verdict worst = Verdict::kOk;
  for (const Check& check : checks) worst = std::max(worst, check.verdict);
  const ExitCode code = worst == Verdict::kFail   ? ExitCode::kOther
                        : worst == Verdict::kWarn ? ExitCode::kDegraded
                                                  : ExitCode::kOk;
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Doctor");
    json.Field("verdict", VerdictName(worst));
    json.Key("checks");
    json.BeginArray();
    for (const Check& check : checks) {
      json.BeginObject();
      json.Field("name", check.name);
      json.Field("verdict", VerdictName(check.verdict));
      json.Field("finding", check.finding);
      json.Field("advice", check.advice);
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (context.names()) {
    for (const Check& check : checks) {
      if (check.verdict != Verdict::kOk) context.PrintLine(check.name);
    }
  } else if (!context.globals().quiet) {
    Table table({{"CHECK"}, {"VERDICT"}, {"FINDING"}, {"WHAT TO DO"}});
    for (const Check& check : checks) {
      table.Add({check.name, Cell(VerdictName(check.verdict), TintOf(VerdictName(check.verdict))),
                 check.finding, check.advice});
    }
    context.Print(table.Render(context.colour()));
  }
  return Exit{code, ""};
}

}  // namespace modelhost::modelctl
