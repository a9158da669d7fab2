#include "client/modelctl/context.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ostream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

constexpr char kSystemRuntimeDir[] = "/run/modelhost";
constexpr absl::Duration kConnectLimit = absl::Seconds(3);
constexpr absl::Duration kCallLimit = absl::Seconds(30);
// A daemon with a thousand models has much to say.
constexpr int kMaxMessageBytes = 256 << 20;
// What sockaddr_un holds, with the final NUL.
constexpr size_t kMaxSocketPathBytes = 107;

std::string Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool Exists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

std::string UserRuntimeDir() {
  const std::string xdg = Env("XDG_RUNTIME_DIR");
  if (!xdg.empty()) return absl::StrCat(xdg, "/modelhost");
  const std::string base = absl::StrCat("/tmp/modelhost-", ::getuid());
  struct stat info;
  if (::lstat(base.c_str(), &info) == 0 && (!S_ISDIR(info.st_mode) || info.st_uid != ::getuid())) {
    return "";
  }
  return absl::StrCat(base, "/modelhost");
}

Sockets SocketsIn(absl::string_view dir) {
  dir = absl::StripSuffix(dir, "/");
  return {std::string(dir), absl::StrCat(dir, "/control.sock"), absl::StrCat(dir, "/handles.sock")};
}

}  // namespace

Terminal Terminal::Detect() {
  Terminal terminal;
  terminal.out_is_tty = ::isatty(STDOUT_FILENO) == 1;
  terminal.err_is_tty = ::isatty(STDERR_FILENO) == 1;
  terminal.in_is_tty = ::isatty(STDIN_FILENO) == 1;
  winsize size{};
  if (terminal.err_is_tty && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  return terminal;
}

Outcome<absl::Duration> ParseDurationFlag(absl::string_view flag, absl::string_view text) {
  absl::Duration duration;
  double seconds = 0;
  if (absl::SimpleAtod(text, &seconds) && seconds >= 0 && seconds < 1e9) {
    return absl::Seconds(seconds);
  }
  if (absl::ParseDuration(text, &duration) && duration >= absl::ZeroDuration()) return duration;
  return Fail(ExitCode::kUsage, absl::StrCat(flag, ": '", text,
                                             "' is not a duration (write 500ms, 90s, 10m, 1h30m)"));
}

Outcome<Sockets> FindSockets(const Globals& globals) {
  if (!globals.target.empty()) {
    absl::string_view path = globals.target;
    if (!absl::ConsumePrefix(&path, "unix:")) {
      return Fail(ExitCode::kUsage,
                  absl::StrCat("--target ", globals.target,
                               ": this daemon is controlled on its own machine only (give "
                               "unix:PATH of its control.sock, or run modelctl there)"));
    }
    absl::ConsumePrefix(&path, "//");
    const size_t slash = path.rfind('/');
    if (slash == absl::string_view::npos || path.empty() || path[0] != '/') {
      return Fail(ExitCode::kUsage,
                  absl::StrCat("--target ", globals.target, ": not an absolute path"));
    }
    Sockets sockets = SocketsIn(path.substr(0, slash));
    sockets.control = std::string(path);
    return sockets;
  }
  if (!globals.runtime_dir.empty()) return SocketsIn(globals.runtime_dir);
  const std::string from_env = Env("MODELHOST_RUNTIME_DIR");
  if (!from_env.empty()) return SocketsIn(from_env);
  const std::string user = UserRuntimeDir();
  if (!user.empty() && Exists(SocketsIn(user).control)) return SocketsIn(user);
  if (user.empty() || Exists(SocketsIn(kSystemRuntimeDir).control)) {
    return SocketsIn(kSystemRuntimeDir);
  }
  return SocketsIn(user);
}

Context::Context(Globals globals, Terminal terminal, std::ostream& err)
    : globals_(std::move(globals)), terminal_(terminal), err_(err) {}

Context::~Context() = default;

bool Context::colour() const {
  return terminal_.out_is_tty && !globals_.no_color && Env("NO_COLOR").empty() &&
         Env("TERM") != "dumb";
}

bool Context::WriteNow(absl::string_view text) { return WriteAll(STDOUT_FILENO, text) == 0; }

void Context::Note(absl::string_view text) {
  if (!globals_.quiet) err_ << Printable(text) << '\n' << std::flush;
}

void Context::Warn(absl::string_view text) {
  err_ << "warning: " << Printable(text) << '\n' << std::flush;
}

void Context::Verbose(absl::string_view text) {
  if (globals_.verbose > 0) err_ << Printable(text) << '\n' << std::flush;
}

Progress Context::MakeProgress(std::string what) {
  ProgressMode mode = globals_.progress;
  if (mode == ProgressMode::kAuto) {
    mode = globals_.quiet         ? ProgressMode::kNone
           : terminal_.err_is_tty ? ProgressMode::kBar
                                  : ProgressMode::kPlain;
  }
  return Progress(mode, err_, terminal_.columns, std::move(what));
}

Outcome<Sockets> Context::sockets() {
  if (!sockets_.has_value()) {
    Outcome<Sockets> found = FindSockets(globals_);
    if (!found.ok()) return found;
    sockets_ = *std::move(found);
  }
  return *sockets_;
}

Outcome<v1::Control::StubInterface*> Context::Control() {
  if (control_ != nullptr) return control_.get();
  Outcome<Sockets> found = sockets();
  if (!found.ok()) return found.exit();
  const std::string& path = found->control;
  constexpr char kWhatToDo[] = "start modelhostd, or name its folder with --runtime-dir";
  if (path.size() > kMaxSocketPathBytes) {
    return Fail(ExitCode::kUnreachable,
                absl::StrCat("daemon: ", path,
                             ": longer than a socket path may be (107 bytes; "
                             "choose a shorter --runtime-dir)"));
  }
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    const bool denied = errno == EACCES;
    return Fail(denied ? ExitCode::kPermission : ExitCode::kUnreachable,
                absl::StrCat("daemon: ", path, ": ", std::strerror(errno), " (",
                             denied ? "this user may not look there" : kWhatToDo, ")"));
  }
  if (::access(path.c_str(), W_OK) != 0 && errno == EACCES) {
    return Fail(ExitCode::kPermission,
                absl::StrCat("daemon: ", path,
                             ": this user may not connect (join the group that the socket belongs "
                             "to)"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel = grpc::CreateCustomChannel(absl::StrCat("unix:", path),
                                           grpc::InsecureChannelCredentials(), arguments);
  // One attempt: gRPC itself would go on trying for 20 s.
  const absl::Duration limit =
      std::min(kConnectLimit, globals_.timeout.value_or(absl::InfiniteDuration()));
  const auto until = std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit);
  grpc_connectivity_state state = channel->GetState(true);
  while (state != GRPC_CHANNEL_READY && state != GRPC_CHANNEL_TRANSIENT_FAILURE &&
         channel->WaitForStateChange(state, until)) {
    state = channel->GetState(true);
  }
  if (state != GRPC_CHANNEL_READY && state != GRPC_CHANNEL_TRANSIENT_FAILURE &&
      limit < kConnectLimit) {
    return Fail(ExitCode::kTimeout,
                absl::StrCat("daemon: ", path, ": not connected within ", HumanDuration(limit),
                             " (give a longer --timeout)"));
  }
  if (state != GRPC_CHANNEL_READY) {
    return Fail(ExitCode::kUnreachable,
                absl::StrCat("daemon: ", path, ": ",
                             state == GRPC_CHANNEL_TRANSIENT_FAILURE
                                 ? "nobody listens"
                                 : absl::StrCat("no answer within ", HumanDuration(limit)),
                             " (", kWhatToDo, ")"));
  }
  control_ = v1::Control::NewStub(channel);
  return control_.get();
}

std::string Context::DaemonVersion() {
  if (control_ == nullptr) return "this daemon";
  grpc::ClientContext call;
  Arm(call);
  v1::GetStatusResponse status;
  const bool known =
      control_->GetStatus(&call, v1::GetStatusRequest(), &status).ok() && !status.version().empty();
  return known ? absl::StrCat("modelhostd ", status.version()) : "this daemon";
}

Exit Context::RpcExit(const grpc::Status& status, absl::string_view what) {
  const std::string path = sockets_.has_value() ? sockets_->control : "";
  const bool from_daemon = ParseErrorInfo(status.error_details()).has_value();
  if (!from_daemon && status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return Fail(ExitCode::kUnreachable,
                absl::StrCat(what, ": the daemon at ", path,
                             " closed the connection (see its log, then `modelctl status`)"));
  }
  if (!from_daemon && status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return Fail(ExitCode::kUnreachable,
                absl::StrCat(what, ": no answer from ", path, " within ",
                             HumanDuration(globals_.timeout.value_or(kCallLimit)),
                             " (see the daemon's log, or give a longer --timeout)"));
  }
  // Not "no such method" of a daemon that has it: gRPC itself says so.
  if (!from_daemon && status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return Fail(ExitCode::kOther,
                absl::StrCat(what, ": ", DaemonVersion(), " does not know this call; modelctl is ",
                             MODELHOST_VERSION, " (update modelhostd, or use its own modelctl)"));
  }
  if (const auto info = ParseErrorInfo(status.error_details()); info.has_value()) {
    std::string line = absl::StrCat("reason ", info->reason());
    for (const auto& [key, value] : info->metadata()) absl::StrAppend(&line, "  ", key, "=", value);
    Verbose(line);
  }
  return FromRpc(status, what);
}

void Context::Arm(grpc::ClientContext& call) const {
  call.set_deadline(std::chrono::system_clock::now() +
                    absl::ToChronoMilliseconds(globals_.timeout.value_or(kCallLimit)));
}

int WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t wrote = ::write(fd, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return errno;
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return 0;
}

}  // namespace modelhost::modelctl
