// Who asks, and may they: the first step of every call, of both services.
//
// The peer is the kernel's, found by the connection; refusals are counted. What is about one model
// is told only to those who may read that model; who reads some model may connect and see the
// daemon's own state. Any thread but the loop's, unless a comment says otherwise.
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/registry/model_manager.h"
#include "daemon/service/call_guard.h"
#include "daemon/service/connection_table.h"

namespace modelhost {

// What GetStatus says about the daemon itself, and the groups that refusals name.
struct ServerInfo {
  std::string version;
  std::string revision;
  std::string runtime_dir;
  std::string metrics_address;  // Empty when off.
  int32_t pid = 0;
  std::vector<std::string> read_groups;
  std::vector<std::string> admin_groups;
};

class Admission {
 public:
  enum class Right { kRead, kCommand };
  // All outlive it.
  struct Deps {
    ModelManager& manager;
    ControlLoop& loop;
    const AccessPolicy& access;
    const ConnectionTable& connections;
    CallGuard& calls;
    const ServerInfo& info;
  };
  explicit Admission(Deps deps) : deps_(deps) {}

  // From now on calls are answered UNAVAILABLE. Any thread.
  void Stop() { stopping_ = true; }
  bool stopping() const { return stopping_; }

  // Who asks, if that peer has the right and there is a place for the call.
  absl::StatusOr<Peer> Admit(const grpc::ServerContextBase& context, Right right,
                             absl::string_view verb, CallGuard::Kind kind);
  // The same on the loop's thread, for a call whose peer is known.
  absl::Status AdmitOnLoop(const grpc::ServerContextBase& context, const Peer& peer, Right right,
                           absl::string_view verb, CallGuard::Kind kind);
  // Who is at the other end. Any thread. UNAUTHENTICATED.
  absl::StatusOr<Peer> PeerOf(const grpc::ServerContextBase& context, absl::string_view verb) const;
  bool MayCommand(const Peer& peer) const { return deps_.access.MayCommand(peer); }
  // Control thread: OK, or PERMISSION_DENIED for the one model.
  absl::Status CheckMayRead(const Peer& peer, const std::string& model) const;
  // OK, CANCELLED (the caller has gone) or UNAVAILABLE (the daemon stops). Any thread.
  absl::Status StillWanted(const grpc::ServerContext& context) const;

 private:
  absl::Status Enter(const grpc::ServerContextBase& context, const Peer& peer, bool may_command,
                     absl::string_view verb, CallGuard::Kind kind);
  absl::Status NoRight(const Peer& peer, Right right, absl::string_view verb) const;

  const Deps deps_;
  std::atomic<bool> stopping_{false};
};

}  // namespace modelhost
