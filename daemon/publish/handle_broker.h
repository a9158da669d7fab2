// The daemon's end of handles.sock: accepts, checks who is there, and owns the sessions.
//
// Who may not read any model gets one Error frame. Connections and descriptors in flight are
// limited in all and per uid; who is silent before Hello, or does not read its replies, is closed
// in time. So a peer can cost only what the limits say. One uid cannot use up what there is in all:
// there are places for uids with few connections, and a part of what may be in flight. Many uids
// together can.
//
// As an observer it passes label moves to all subscribed sessions (the page that every session maps
// has them too, so they tell nothing new) and kDraining to the holders of a version.
//
// Control thread only; nothing blocks: what peers can make slow to close goes to the FdCloser. Stop
// before destruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/platform/unix_listener.h"
#include "daemon/publish/broker_session.h"
#include "daemon/publish/catalogue_writer.h"
#include "daemon/registry/events.h"
#include "daemon/registry/model_manager.h"

namespace modelhost {

class HandleBroker final : public Observer, private SessionOwner {
 public:
  struct Deps {
    ControlLoop& loop;
    Executor& pool;    // Where the last owner of weights may be dropped.
    Executor& opener;  // Opens files for Fetch; not behind loads.
    FdCloser& closer;
    ModelManager& manager;
    CatalogueWriter& catalogue;
    Clock& clock;
  };

  HandleBroker(Deps deps, BrokerOptions options);
  ~HandleBroker() override;
  HandleBroker(const HandleBroker&) = delete;

  // Serves `listener` from now on; once.
  void Start(UnixListener listener);
  // Tells subscribed clients, ends every session and its leases, and stops listening.
  void Stop();

  const BrokerStats& stats() const { return stats_; }
  size_t connections() const { return sessions_.size(); }

  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;
  void OnDraining(const VersionKey& key) override;
  void OnLease(const Lease& lease, LeaseChange change) override;

 private:
  void Enter(SessionId session, From from, absl::FunctionRef<void(BrokerSession&)> call) override;
  void Closed(SessionId session, const std::string& why) override;
  bool MaySend(uint32_t uid, size_t fds) override;
  void OutOfInFlight() override;
  void InFlightChanged(uint32_t uid, int64_t change) override;

  // Calls on every open session; sessions that end meanwhile stay until the last call returns.
  void ForEach(From from, absl::FunctionRef<void(BrokerSession&)> call);
  // After a call into a session: ends those that closed, now or once the manager has returned.
  void Leave(From from);
  void AcceptAll();
  void Admit(UniqueFd socket);
  // Why this peer gets no connection now; OK: it does.
  absl::Status HasPlace(const Peer& peer) const;
  // Of one uid's sessions or of all: counts what was read since, and closes those that leave
  // descriptors unread for long.
  void SweepUnread(std::optional<uint32_t> uid);
  void PauseAccepting(const absl::Status& why);
  void Reap();

  const Deps deps_;
  const BrokerOptions options_;
  const int64_t most_in_flight_;
  const int64_t most_in_flight_per_uid_;
  BrokerStats stats_;
  std::vector<std::byte> buffer_;
  std::optional<UnixListener> listener_;
  WatchId accept_watch_ = 0;
  TimerId accept_pause_ = 0;
  std::map<SessionId, std::unique_ptr<BrokerSession>> sessions_;
  struct User {
    size_t connections = 0;
    int64_t in_flight_fds = 0;
    absl::Duration settled = -absl::InfiniteDuration();  // When all its sessions were last asked.
  };
  std::map<uint32_t, User> users_;                         // By uid; those with a connection.
  int64_t in_flight_fds_ = 0;                              // Of all.
  absl::Duration settled_ = -absl::InfiniteDuration();     // When all were last asked.
  std::vector<std::pair<SessionId, std::string>> closed_;  // With the reason; to be reaped.
  TimerId reap_timer_ = 0;
  int depth_ = 0;  // Calls into sessions that are on the stack.
};

}  // namespace modelhost
