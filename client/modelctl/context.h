// What every verb has: the global flags, the daemon's sockets, and the two ways out.
//
// Output for stdout is collected and written when the verb has succeeded, so that a failure leaves
// stdout empty; WriteNow is for verbs that go on (--watch). One thread.
#pragma once

#include <grpcpp/client_context.h>

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/json.h"
#include "client/modelctl/progress.h"
#include "modelhost/v1/control.grpc.pb.h"

namespace modelhost::modelctl {

enum class OutputFormat { kTable, kWide, kJson, kJsonl, kName };

struct Globals {
  std::string runtime_dir;
  std::string target;
  OutputFormat output = OutputFormat::kTable;
  ProgressMode progress = ProgressMode::kAuto;
  std::optional<absl::Duration> timeout;
  bool quiet = false;
  int verbose = 0;
  bool no_color = false;
  bool yes = false;
};

// What the two outputs are connected to.
struct Terminal {
  bool out_is_tty = false;
  bool err_is_tty = false;
  bool in_is_tty = false;
  int columns = 80;
  static Terminal Detect();
};

// "90s", "10m", "1h30m", "500ms", or a bare number of seconds. kUsage otherwise, and when negative.
Outcome<absl::Duration> ParseDurationFlag(absl::string_view flag, absl::string_view text);

// The sockets of one daemon.
struct Sockets {
  std::string runtime_dir;
  std::string control;
  std::string handles;
};
// --target, --runtime-dir, MODELHOST_RUNTIME_DIR, the user's, the system's. A folder below /tmp
// counts only when it belongs to this user: anybody may make one there.
Outcome<Sockets> FindSockets(const Globals& globals);

class Context {
 public:
  Context(Globals globals, Terminal terminal, std::ostream& err);
  ~Context();

  const Globals& globals() const { return globals_; }
  const Terminal& terminal() const { return terminal_; }
  bool json() const {
    return globals_.output == OutputFormat::kJson || globals_.output == OutputFormat::kJsonl;
  }
  bool wide() const { return globals_.output == OutputFormat::kWide; }
  bool names() const { return globals_.output == OutputFormat::kName; }
  bool jsonl() const { return globals_.output == OutputFormat::kJsonl; }
  JsonStyle json_style() const { return jsonl() ? JsonStyle::kOneLine : JsonStyle::kPretty; }
  bool colour() const;  // Of stdout.

  // For stdout, at the end.
  void Print(absl::string_view text) { out_.append(text.data(), text.size()); }
  void PrintLine(absl::string_view text) { Print(text), out_.push_back('\n'); }
  // Straight to stdout. False: nobody reads any more, which is no error.
  bool WriteNow(absl::string_view text);
  std::string TakeOutput() && { return std::move(out_); }

  std::ostream& err() { return err_; }
  void Note(absl::string_view text);     // A line on stderr, not with -q.
  void Warn(absl::string_view text);     // "warning: ...", also with -q.
  void Verbose(absl::string_view text);  // Only with -v.
  Progress MakeProgress(std::string what);

  Outcome<Sockets> sockets();
  // Connects at the first call. kUnreachable within seconds when nobody listens, naming the socket.
  Outcome<v1::Control::StubInterface*> Control();

  // One unary call, at most --timeout or 30 s long.
  template <typename Request, typename Response>
  Outcome<Response> Call(absl::string_view what,
                         grpc::Status (v1::Control::StubInterface::*method)(grpc::ClientContext*,
                                                                            const Request&,
                                                                            Response*),
                         const Request& request) {
    Outcome<v1::Control::StubInterface*> stub = Control();
    if (!stub.ok()) return stub.exit();
    grpc::ClientContext call;
    Arm(call);
    Response response;
    const grpc::Status status = ((*stub)->*method)(&call, request, &response);
    if (!status.ok()) return RpcExit(status, what);
    return response;
  }

  // Sets the deadline of a unary call.
  void Arm(grpc::ClientContext& call) const;

  // FromRpc, and for a daemon that is gone or does not answer the socket's name.
  Exit RpcExit(const grpc::Status& status, absl::string_view what);

 private:
  // "modelhostd 0.1.0", or "this daemon" when it does not say.
  std::string DaemonVersion();

  const Globals globals_;
  const Terminal terminal_;
  std::ostream& err_;
  std::string out_;
  std::optional<Sockets> sockets_;
  std::unique_ptr<v1::Control::StubInterface> control_;
};

// Writes all of `text` to a descriptor. 0, or the errno (EPIPE: the reader has left).
int WriteAll(int fd, absl::string_view text);

}  // namespace modelhost::modelctl
