#include "daemon/publish/handle_broker.h"

#include <sys/epoll.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr int kAcceptsPerTurn = 64;
// Out of descriptors: connections wait in the socket's queue this long.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// All sessions of a user are asked for what they have read at most this often.
constexpr absl::Duration kSettlePeriod = absl::Milliseconds(10);

}  // namespace

HandleBroker::HandleBroker(Deps deps, BrokerOptions options)
    : deps_(deps), options_(options), buffer_(abi::kMaxFrameBytes) {}

HandleBroker::~HandleBroker() { Stop(); }

void HandleBroker::Start(UnixListener listener) {
  listener_.emplace(std::move(listener));
  accept_watch_ =
      deps_.loop.Watch(listener_->fd().get(), EPOLLIN, [this](uint32_t) { AcceptAll(); });
}

void HandleBroker::Stop() {
  if (!listener_.has_value()) return;
  deps_.loop.Unwatch(std::exchange(accept_watch_, 0));
  if (accept_pause_ != 0) deps_.loop.CancelTimer(std::exchange(accept_pause_, 0));
  listener_.reset();
  ForEach(From::kLoop, [](BrokerSession& session) {
    session.SendEvent(abi::EventKind::kClosing, abi::kNoSlot, 0, 0, 0);
    session.Close("stopping");
  });
  if (reap_timer_ != 0) deps_.loop.CancelTimer(std::exchange(reap_timer_, 0));
  Reap();
}

void HandleBroker::AcceptAll() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    auto socket = listener_->Accept();
    if (socket.ok()) {
      Admit(*std::move(socket));
      continue;
    }
    // Out of descriptors, or something that may pass: the queue is left alone for a while, where a
    // watch would report it again and again.
    if (!absl::IsUnavailable(socket.status())) PauseAccepting();
    return;
  }
}

void HandleBroker::PauseAccepting() {
  if (accept_pause_ != 0) return;
  ++stats_.accept_pauses;
  deps_.loop.ChangeWatch(accept_watch_, 0);
  accept_pause_ = deps_.loop.PostDelayed(kAcceptPause, [this] {
    accept_pause_ = 0;
    deps_.loop.ChangeWatch(accept_watch_, EPOLLIN);
  });
}

void HandleBroker::Admit(UniqueFd socket) {
  auto peer = PeerOf(socket);
  if (!peer.ok()) return;  // It is gone, or it is no peer that the kernel knows.
  if (!deps_.access.MayRead(*peer)) {
    ++stats_.refused_access;
    RefuseConnection(socket, buffer_, 0,
                     absl::PermissionDeniedError(absl::StrCat(
                         "connect: uid ", peer->uid,
                         " is in no group that may read models (read_groups in modelhostd.toml)")));
    peer->comm = CommOf(peer->pid);
    deps_.manager.ReportRefused(*peer, "connect");
    return;
  }
  const auto user = users_.find(peer->uid);
  const size_t own = user == users_.end() ? 0 : user->second.connections;
  const bool full = sessions_.size() >= options_.max_connections;
  if (full || own >= options_.max_connections_per_uid) {
    ++stats_.refused_full;
    RefuseConnection(
        socket, buffer_, 0,
        absl::ResourceExhaustedError(
            full ? absl::StrCat("connect: ", sessions_.size(), " clients are connected already")
                 : absl::StrCat("connect: ", own, " clients of uid ", peer->uid,
                                " are connected already")));
    return;
  }
  ++stats_.accepted;
  ++users_[peer->uid].connections;
  const SessionId id = deps_.manager.BeginSession(*peer, "native");
  const BrokerSession::Deps deps{*this,         deps_.loop,      deps_.pool,
                                 deps_.manager, deps_.catalogue, deps_.clock,
                                 options_,      stats_,          buffer_};
  sessions_.emplace(id,
                    std::make_unique<BrokerSession>(deps, id, *std::move(peer), std::move(socket)));
  Enter(id, From::kLoop, [&](BrokerSession& session) {
    // A client that has said Hello has its answer before /proc is asked for its name.
    session.Start();
    deps_.manager.AnnounceSession(id, CommOf(session.peer().pid));
  });
}

void HandleBroker::Enter(SessionId session, From from,
                         absl::FunctionRef<void(BrokerSession&)> call) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || found->second->closed()) return;
  ++depth_;
  call(*found->second);
  --depth_;
  Leave(from);
}

void HandleBroker::ForEach(From from, absl::FunctionRef<void(BrokerSession&)> call) {
  ++depth_;
  for (const auto& [id, session] : sessions_) {
    if (!session->closed()) call(*session);
  }
  --depth_;
  Leave(from);
}

void HandleBroker::Closed(SessionId session, const std::string& why) {
  closed_.emplace_back(session, why);
  const auto user = users_.find(sessions_.at(session)->peer().uid);
  if (--user->second.connections == 0) users_.erase(user);
}

void HandleBroker::Leave(From from) {
  if (depth_ != 0 || closed_.empty()) return;
  if (from == From::kLoop) {
    Reap();
  } else if (reap_timer_ == 0) {
    // Ending leases changes the books that the manager is in the middle of.
    reap_timer_ = deps_.loop.PostDelayed(absl::ZeroDuration(), [this] {
      reap_timer_ = 0;
      Reap();
    });
  }
}

void HandleBroker::Reap() {
  for (const auto& [session, why] : std::exchange(closed_, {})) {
    sessions_.erase(session);
    deps_.manager.EndSession(session, why);
  }
}

void HandleBroker::InFlightChanged(uint32_t uid, int64_t change) {
  users_.at(uid).in_flight_fds += change;
}

bool HandleBroker::MaySend(uint32_t uid, size_t fds) {
  const auto fits = [&] {
    const auto user = users_.find(uid);  // Gone when its last session was closed below.
    return user != users_.end() && user->second.in_flight_fds + static_cast<int64_t>(fds) <=
                                       static_cast<int64_t>(options_.max_in_flight_fds_per_uid);
  };
  if (fits()) return true;
  const absl::Duration now = deps_.clock.Monotonic();
  absl::Duration& settled = users_.at(uid).settled;
  if (now - settled < kSettlePeriod) return false;
  settled = now;
  // Most of what was sent has been received since. Who leaves descriptors unread for long is closed
  // now that others of its uid need the room.
  ForEach(From::kLoop, [&](BrokerSession& session) {
    if (session.peer().uid != uid) return;
    session.SettleInFlight();
    if (now - session.unread_since() < options_.send_timeout) return;
    ++stats_.slow;
    session.Close("slow");
  });
  return fits();
}

void HandleBroker::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration /*flip*/) {
  for (const LabelChange& change : changes) {
    const uint32_t slot = deps_.catalogue.SlotOf(change.model, change.label);
    ForEach(From::kManager, [&](BrokerSession& session) {
      session.SendEvent(abi::EventKind::kLabelMoved, slot, change.generation, change.to, 0);
    });
  }
}

void HandleBroker::OnDraining(const VersionKey& key) {
  ForEach(From::kManager, [&](BrokerSession& session) { session.SendDraining(key); });
}

void HandleBroker::OnLease(const Lease& lease, LeaseChange change) {
  if (change == LeaseChange::kGranted) return;
  Enter(lease.session, From::kManager,
        [&](BrokerSession& session) { session.ForgetLease(lease.id); });
}

}  // namespace modelhost
