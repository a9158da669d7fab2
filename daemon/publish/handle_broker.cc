#include "daemon/publish/handle_broker.h"

#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr int kAcceptsPerTurn = 64;
// Out of descriptors: connections wait in the socket's queue this long.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// All sessions of a user are asked for what they have read at most this often.
constexpr absl::Duration kSettlePeriod = absl::Milliseconds(10);

// The kernel counts what is in flight against the sender, which is this daemon for all clients.
int64_t MostInFlight(const BrokerOptions& options) {
  constexpr uint64_t kEnough = uint64_t{1} << 30;
  if (options.max_in_flight_fds != 0) {
    return static_cast<int64_t>(std::min(options.max_in_flight_fds, kEnough));
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return abi::kMaxFdsPerFrame;
  // A frame must fit, or nothing is ever sent.
  return static_cast<int64_t>(
      std::clamp<uint64_t>(limit.rlim_cur / 2, 2 * abi::kMaxFdsPerFrame, kEnough));
}

}  // namespace

HandleBroker::HandleBroker(Deps deps, BrokerOptions options)
    : deps_(deps),
      options_(options),
      most_in_flight_(MostInFlight(options)),
      most_in_flight_per_uid_(
          std::min(static_cast<int64_t>(options.max_in_flight_fds_per_uid),
                   std::max<int64_t>(most_in_flight_ / 4 * 3, abi::kMaxFdsPerFrame))),
      buffer_(abi::kMaxFrameBytes) {}

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
  deps_.closer.Close(FdCloser::kNobody, listener_->TakeFd());
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
    if (deps_.closer.waiting() > options_.max_unclosed) {
      PauseAccepting(absl::ResourceExhaustedError("too many descriptors of peers hang in close"));
      return;
    }
    auto socket = listener_->Accept();
    if (socket.ok()) {
      Admit(*std::move(socket));
      continue;
    }
    // Out of descriptors, or something that may pass: the queue is left alone for a while, where a
    // watch would report it again and again.
    if (!absl::IsUnavailable(socket.status())) PauseAccepting(socket.status());
    return;
  }
}

void HandleBroker::PauseAccepting(const absl::Status& why) {
  if (accept_pause_ != 0) return;
  ++stats_.accept_pauses;
  if (options_.on_accept_pause) options_.on_accept_pause(why);
  deps_.loop.ChangeWatch(accept_watch_, 0);
  accept_pause_ = deps_.loop.PostDelayed(kAcceptPause, [this] {
    accept_pause_ = 0;
    deps_.loop.ChangeWatch(accept_watch_, EPOLLIN);
  });
}

absl::Status HandleBroker::HasPlace(const Peer& peer) const {
  const auto user = users_.find(peer.uid);
  const size_t own = user == users_.end() ? 0 : user->second.connections;
  if (own >= options_.max_connections_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat("connect: ", own, " clients of uid ", peer.uid, " are connected already"));
  }
  const size_t all = sessions_.size();
  const size_t reserved = own < options_.few_connections ? 0 : options_.reserved_connections;
  if (all + reserved >= options_.max_connections) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "connect: ", all, " clients are connected already, ", own, " of them of uid ", peer.uid));
  }
  if (deps_.closer.waiting(peer.uid) > options_.max_unclosed_per_uid) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "connect: too many of the descriptors that came from uid ", peer.uid, " cannot be closed"));
  }
  return absl::OkStatus();
}

void HandleBroker::Admit(UniqueFd socket) {
  auto peer = PeerOf(socket);
  if (!peer.ok()) {  // It is gone, or it is no peer that the kernel knows.
    deps_.closer.Close(FdCloser::kNobody, std::move(socket));
    return;
  }
  if (!deps_.manager.MayReadSome(*peer)) {
    ++stats_.refused_access;
    RefuseConnection(std::move(socket), peer->uid, deps_.closer, buffer_, 0,
                     absl::PermissionDeniedError(absl::StrCat(
                         "connect: uid ", peer->uid,
                         " is in no group that may read models (read_groups in modelhostd.toml)")));
    peer->comm = CommOf(peer->pid);
    deps_.manager.ReportRefused(*peer, "connect");
    return;
  }
  if (const absl::Status place = HasPlace(*peer); !place.ok()) {
    ++stats_.refused_full;
    const bool unclosed = deps_.closer.waiting(peer->uid) > options_.max_unclosed_per_uid;
    RefuseConnection(std::move(socket), peer->uid, deps_.closer, buffer_, 0, place);
    peer->comm = CommOf(peer->pid);
    deps_.manager.ReportRefused(*peer, std::string(place.message()),
                                unclosed ? RefusedFor::kDescriptors : RefusedFor::kConnections);
    return;
  }
  ++stats_.accepted;
  ++users_[peer->uid].connections;
  const SessionId id = deps_.manager.BeginSession(*peer, "native");
  const BrokerSession::Deps deps{*this,        deps_.loop,    deps_.pool,      deps_.opener,
                                 deps_.closer, deps_.manager, deps_.catalogue, deps_.clock,
                                 options_,     stats_,        buffer_};
  sessions_.emplace(id,
                    std::make_unique<BrokerSession>(deps, id, *std::move(peer), std::move(socket)));
  Enter(id, From::kLoop, [](BrokerSession& session) {
    session.Start();
    session.Announce();  // Who has not said Hello yet is a session too.
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
  in_flight_fds_ += change;
}

bool HandleBroker::MaySend(uint32_t uid, size_t fds) {
  const auto more = static_cast<int64_t>(fds);
  const auto all_fit = [&] { return in_flight_fds_ + more <= most_in_flight_; };
  const auto own_fit = [&] {
    const auto user = users_.find(uid);  // Gone when its last session was closed below.
    return user != users_.end() && user->second.in_flight_fds + more <= most_in_flight_per_uid_;
  };
  if (all_fit() && own_fit()) return true;
  // Most of what was sent has been received since.
  SweepUnread(all_fit() ? std::optional(uid) : std::nullopt);
  return all_fit() && own_fit();
}

void HandleBroker::OutOfInFlight() { SweepUnread(std::nullopt); }

void HandleBroker::SweepUnread(std::optional<uint32_t> uid) {
  const absl::Duration now = deps_.clock.Monotonic();
  absl::Duration& settled = uid.has_value() ? users_.at(*uid).settled : settled_;
  if (now - settled < kSettlePeriod) return;
  settled = now;
  // Who leaves descriptors unread for long is closed now that others need the room.
  ForEach(From::kLoop, [&](BrokerSession& session) {
    if (uid.has_value() && session.peer().uid != *uid) return;
    session.SettleInFlight();
    if (now - session.unread_since() < options_.send_timeout) return;
    ++stats_.slow;
    session.Close("slow");
  });
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
  Enter(lease.session, From::kManager, [&](BrokerSession& session) {
    session.ForgetLease(lease.id);
    if (change != LeaseChange::kEvicted) return;
    session.SendEvent(abi::EventKind::kEvicted, abi::kNoSlot, 0, lease.key.version, lease.id);
  });
}

}  // namespace modelhost
