#include "daemon/publish/broker_session.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <limits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "daemon/platform/descriptor.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

// Requests of one client that are read before others get their turn.
constexpr int kRequestsPerTurn = 32;
// Frames read and thrown away before a connection is ended, so that its last reply arrives; not if
// many descriptors come with them.
constexpr int kDrainFrames = 256;
constexpr size_t kDrainFds = 256;
// How soon to look again when descriptors may not be sent yet: nothing tells when they may.
constexpr absl::Duration kRetryDelay = absl::Milliseconds(10);

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

absl::Duration DeadlineOf(const AcquireRequest& acquire) {
  constexpr auto kLongestMs = static_cast<uint64_t>(std::numeric_limits<int32_t>::max());
  return absl::Milliseconds(static_cast<int64_t>(std::min(acquire.deadline_ms, kLongestMs)));
}

AcquireRef::Device ToRefDevice(AcquireRequest::Device device) {
  switch (device) {
    case AcquireRequest::Device::kNone:
      return AcquireRef::Device::kNone;
    case AcquireRequest::Device::kIfAny:
      return AcquireRef::Device::kIfAny;
    case AcquireRequest::Device::kRequired:
      return AcquireRef::Device::kRequired;
  }
  return AcquireRef::Device::kNone;
}

}  // namespace

void RefuseConnection(UniqueFd socket, uint32_t uid, FdCloser& closer, std::span<std::byte> buffer,
                      uint32_t request_id, const absl::Status& why) {
  // A client that does not read does not get it.
  (void)SendFrame(socket, ErrorFrame(request_id, why).bytes, {}, {});
  RefuseInput(socket);
  std::vector<UniqueFd> unwanted;
  for (int i = 0; i < kDrainFrames && unwanted.size() < kDrainFds; ++i) {
    auto frame = ReceiveFrame(socket, buffer, ReceiveWait::kNo, {}, &unwanted);
    if (!frame.ok() && frame.error().code != Code::kInvalidArgument) break;
    if (frame.ok()) std::ranges::move(frame->fds, std::back_inserter(unwanted));
  }
  HangUp(socket);
  unwanted.push_back(std::move(socket));
  closer.Close(uid, std::move(unwanted));
}

void BrokerSession::Start() {
  watched_events_ = EPOLLIN;
  watch_ = deps_.loop.Watch(socket_.get(), watched_events_,
                            [owner = &deps_.owner, id = id_](uint32_t events) {
                              owner->Enter(id, SessionOwner::From::kLoop,
                                           [events](BrokerSession& s) { s.OnReady(events); });
                            });
  hello_timer_ =
      deps_.loop.PostDelayed(deps_.options.hello_timeout, [owner = &deps_.owner, id = id_] {
        owner->Enter(id, SessionOwner::From::kLoop, [](BrokerSession& session) {
          session.hello_timer_ = 0;
          ++session.deps_.stats.hello_timeouts;
          session.Close("hello_timeout");
        });
      });
  ReadRequests();  // A client does not wait between connect and Hello.
}

void BrokerSession::Announce() {
  if (std::exchange(announced_, true)) return;
  deps_.manager.AnnounceSession(id_, CommOf(peer_.pid));
}

void BrokerSession::Close(const std::string& why) {
  if (closed()) return;
  state_ = State::kClosed;
  if (watch_ != 0) deps_.loop.Unwatch(watch_);
  for (const TimerId timer : {hello_timer_, stall_timer_, retry_timer_}) {
    if (timer != 0) deps_.loop.CancelTimer(timer);
  }
  // Frames that were never sent may be the last to hold a version whose lease has ended: unmapping
  // its weights is not for this thread.
  if (!queue_.empty()) {
    deps_.pool.Post([unsent = std::move(queue_)]() mutable { unsent.clear(); });
    queue_.clear();
  }
  if (socket_.valid()) {
    HangUp(socket_);
    deps_.closer.Close(peer_.uid, std::move(socket_));
  }
  deps_.owner.InFlightChanged(peer_.uid, -static_cast<int64_t>(in_flight_.fds()));
  in_flight_ = {};
  leases_.clear();
  deps_.owner.Closed(id_, why);
}

void BrokerSession::OnReady(uint32_t events) {
  if ((events & EPOLLOUT) != 0) Flush();
  if (closed()) return;
  if ((events & EPOLLIN) != 0) {
    ReadRequests();
  } else if ((events & (EPOLLHUP | EPOLLERR)) != 0) {
    Close("closed");  // Nothing is left to read, or the replies that wait have no reader.
  }
}

void BrokerSession::ReadRequests() {
  for (int i = 0; i < kRequestsPerTurn; ++i) {
    if (closed() || !MayRead() || !ReadOne()) break;
  }
  if (!closed()) UpdateWatch();
}

bool BrokerSession::ReadOne() {
  std::vector<UniqueFd> unwanted;
  auto frame = ReceiveFrame(socket_, deps_.buffer, ReceiveWait::kNo, {}, &unwanted);
  if (!frame.ok()) {
    deps_.closer.Close(peer_.uid, std::move(unwanted));
    switch (frame.error().code) {
      case Code::kDeadlineExceeded:
        return false;
      case Code::kInvalidArgument:
        // What lies in the buffer need not be a header.
        Violation(0, ToStatus(frame.error()));
        return false;
      case Code::kResourceExhausted:
        // Descriptors of an upload were lost; the client cannot know which.
        Refuse(0,
               absl::ResourceExhaustedError("upload: the daemon is out of descriptors "
                                            "(raise LimitNOFILE of modelhostd)"),
               "error");
        return false;
      default:
        Close("closed");
        return false;
    }
  }
  const std::span<const std::byte> bytes = deps_.buffer.first(frame->bytes);
  auto request = ParseRequest(bytes, frame->fds.size());
  if (request.ok()) {
    Handle(*std::move(request), frame->fds);
  } else {
    Violation(RequestIdOf(bytes), request.status());
  }
  if (!frame->fds.empty()) {
    deps_.closer.Close(peer_.uid, std::move(frame->fds));
    if (!closed() && deps_.closer.waiting(peer_.uid) > deps_.options.max_unclosed_per_uid) {
      deps_.manager.ReportRefused(peer_, "descriptors: too many cannot be closed",
                                  RefusedFor::kDescriptors);
      Refuse(0,
             absl::ResourceExhaustedError(
                 "too many of the descriptors that came from this user cannot be closed"),
             "error");
    }
  }
  return !closed();
}

void BrokerSession::Handle(Request request, std::vector<UniqueFd>& fds) {
  const uint32_t id = request.request_id;
  const bool is_hello = std::holds_alternative<HelloRequest>(request.body);
  if (is_hello != (state_ == State::kNew)) {
    Violation(id, absl::InvalidArgumentError(is_hello ? "malformed session: a second Hello"
                                                      : "malformed session: Hello comes first"));
    return;
  }
  std::visit(Overloaded{
                 [&](const HelloRequest& hello) { OnHello(id, hello); },
                 [&](AcquireRequest& acquire) { OnAcquire(id, std::move(acquire)); },
                 [&](const FetchRequest& fetch) { OnFetch(id, fetch); },
                 [&](const ReleaseRequest& release) { OnRelease(release); },
                 [&](const SubscribeRequest&) {
                   // The Ack comes before the first event.
                   Reply(AckFrame(id));
                   subscribed_ = true;
                 },
                 [&](const UploadRequest& upload) { OnUpload(id, upload, fds); },
             },
             request.body);
}

void BrokerSession::OnHello(uint32_t request_id, const HelloRequest& hello) {
  const auto abi = NegotiateAbi(hello);
  if (!abi.ok()) {
    Violation(request_id, abi.status());
    return;
  }
  deps_.loop.CancelTimer(std::exchange(hello_timer_, 0));
  state_ = State::kOpen;
  abi_ = *abi;
  Reply(HelloFrame(request_id, *abi, deps_.catalogue.epoch(), deps_.catalogue.fd(),
                   deps_.catalogue.page_bytes()));
  // The name of a client is not worth its waiting for; before its leases, though.
  Announce();
}

void BrokerSession::OnAcquire(uint32_t request_id, AcquireRequest acquire) {
  const bool device = acquire.device != AcquireRequest::Device::kNone;
  if (device && abi_ < abi::kFrameAbiDevice) {
    Violation(request_id, absl::InvalidArgumentError(absl::StrCat(
                              "malformed session: device memory is asked for in version ", abi_,
                              " of the protocol, which has none")));
    return;
  }
  PendingAcquire pending{request_id, acquire.redeclare, device, deps_.clock.Monotonic(), {}};
  std::vector<AcquireRef> refs;
  refs.reserve(acquire.refs.size());
  for (RequestedRef& ref : acquire.refs) {
    pending.models.push_back(ref.model);
    refs.push_back({std::move(ref.model), std::move(ref.label), ref.version, Digest{ref.digest},
                    ToRefDevice(acquire.device), acquire.gpu});
  }
  if (!acquire.wait) {
    FinishAcquire(pending, deps_.manager.Acquire(id_, refs));
    return;
  }
  // The manager limits how many may wait.
  deps_.manager.AcquireOrWait(
      id_, std::move(refs), DeadlineOf(acquire),
      [owner = &deps_.owner, id = id_,
       pending = std::move(pending)](absl::StatusOr<std::vector<Grant>> grants) {
        owner->Enter(id, SessionOwner::From::kManager,
                     [&](BrokerSession& session) { session.FinishAcquire(pending, grants); });
      },
      acquire.redeclare ? ModelManager::WaitFor::kKnownVersions : ModelManager::WaitFor::kAnything);
}

void BrokerSession::FinishAcquire(const PendingAcquire& pending,
                                  const absl::StatusOr<std::vector<Grant>>& grants) {
  if (!grants.ok()) {
    Reply(ErrorFrame(pending.request_id, grants.status()));
    const absl::Duration took = deps_.clock.Monotonic() - pending.received;
    for (const std::string& model : pending.models) {
      // A name that only the client knows must not become a series of its own.
      const bool known = deps_.manager.Model(model).ok();
      deps_.manager.ReportAttach(known ? model : "", "none", took, grants.status());
    }
    return;
  }
  const auto count = static_cast<uint32_t>(grants->size());
  for (const Grant& grant : *grants) leases_.emplace(grant.lease, grant.key);
  for (uint32_t i = 0; i < count; ++i) {
    for (OutFrame& frame : GrantFrames(pending.request_id, i, count, (*grants)[i],
                                       pending.redeclare, pending.device)) {
      Reply(std::move(frame));
      if (closed()) return;
    }
  }
  const absl::Duration took = deps_.clock.Monotonic() - pending.received;
  for (const Grant& grant : *grants) {
    deps_.manager.ReportAttach(grant.key.model, TransportOf(*grant.resident), took,
                               absl::OkStatus());
  }
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> BrokerSession::ToFetch(
    const FetchRequest& fetch) {
  auto version = deps_.manager.Leased(id_, fetch.lease_id);
  if (!version.ok()) return version.status();
  if (fetch.region >= (*version)->regions.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fetch: region ", fetch.region, " of a version that has ", (*version)->regions.size()));
  }
  return version;
}

void BrokerSession::OnFetch(uint32_t request_id, const FetchRequest& fetch) {
  auto version = ToFetch(fetch);
  if (!version.ok()) {
    Reply(ErrorFrame(request_id, version.status()));
    return;
  }
  fetching_ = true;
  // The store may be on a file system that takes its time. The session may be gone by then; the
  // version is not for the control thread to drop.
  deps_.opener.Post([owner = &deps_.owner, loop = &deps_.loop, id = id_, request_id, fetch,
                     version = *std::move(version)]() mutable {
    auto fd = ReopenReadOnly(version->regions[fetch.region]->fd());
    OutFrame frame =
        fd.ok() ? FetchFrame(request_id, fetch.lease_id, fetch.region, *version, *std::move(fd))
                : ErrorFrame(request_id, fd.status());
    version.reset();
    loop->Post([owner, id, frame = std::move(frame)]() mutable {
      owner->Enter(id, SessionOwner::From::kLoop, [&](BrokerSession& session) {
        session.fetching_ = false;
        session.Reply(std::move(frame));
        if (!session.closed()) session.UpdateWatch();
      });
    });
  });
}

void BrokerSession::OnRelease(const ReleaseRequest& release) {
  leases_.erase(release.lease_id);
  // Not there: it was evicted, or it is another's and nothing happens. Release has no reply.
  (void)deps_.manager.Release(id_, release.lease_id);
}

void BrokerSession::OnUpload(uint32_t request_id, const UploadRequest& upload,
                             std::vector<UniqueFd>& fds) {
  const absl::Status taken =
      deps_.manager.OfferUpload(peer_, upload.ticket, upload.first, std::move(fds), upload.last);
  if (absl::IsPermissionDenied(taken)) {
    deps_.manager.ReportRefused(peer_, "upload", RefusedFor::kTicket);
  }
  Reply(taken.ok() ? AckFrame(request_id) : ErrorFrame(request_id, taken));
}

void BrokerSession::Violation(uint32_t request_id, const absl::Status& why) {
  ++deps_.stats.violations;
  Refuse(request_id, why, "violation");
}

void BrokerSession::Refuse(uint32_t request_id, const absl::Status& why,
                           const std::string& reason) {
  if (closed()) return;
  // It is not to be watched any more once the closer has it.
  if (watch_ != 0) deps_.loop.Unwatch(std::exchange(watch_, 0));
  RefuseConnection(std::move(socket_), peer_.uid, deps_.closer, deps_.buffer, request_id, why);
  Close(reason);
}

void BrokerSession::Reply(OutFrame frame) {
  if (closed()) return;
  if (queue_.empty()) {
    switch (Send(frame)) {
      case SendResult::kSent:
        return;
      case SendResult::kFailed:
        Close("closed");
        return;
      case SendResult::kLater:
        progress_at_ = deps_.clock.Monotonic();
        ArmStallTimer();
        break;
    }
  }
  queue_.push_back(std::move(frame));
  if (queue_.size() > deps_.options.max_queued_frames) {
    ++deps_.stats.slow;
    Close("slow");
    return;
  }
  UpdateWatch();
}

void BrokerSession::Flush() {
  while (!queue_.empty()) {
    const SendResult result = Send(queue_.front());
    if (result == SendResult::kFailed) {
      Close("closed");
      return;
    }
    if (result == SendResult::kLater) break;
    if (queue_.front().keep.use_count() == 1) {
      deps_.pool.Post([sent = std::move(queue_.front())]() mutable { sent.keep.reset(); });
    }
    queue_.pop_front();
    progress_at_ = deps_.clock.Monotonic();
  }
  if (queue_.empty()) {
    if (stall_timer_ != 0) deps_.loop.CancelTimer(std::exchange(stall_timer_, 0));
    if (look_at_page_) SendLookAtPage();
  }
  if (!closed()) UpdateWatch();
}

BrokerSession::SendResult BrokerSession::Send(const OutFrame& frame) {
  if (!frame.fds.empty() && !deps_.owner.MaySend(peer_.uid, frame.fds.size())) {
    if (closed()) return SendResult::kFailed;
    RetryLater();
    return SendResult::kLater;
  }
  return SendNow(frame);
}

BrokerSession::SendResult BrokerSession::SendNow(const OutFrame& frame) {
  SettleInFlight();
  const auto sent = SendFrame(socket_, frame.bytes, {}, frame.fds);
  if (sent.ok()) {
    in_flight_.Sent(frame.bytes.size(), frame.fds.size(), deps_.clock.Monotonic());
    if (!frame.fds.empty()) {
      deps_.owner.InFlightChanged(peer_.uid, static_cast<int64_t>(frame.fds.size()));
    }
    return SendResult::kSent;
  }
  if (sent.error().code != Code::kResourceExhausted) return SendResult::kFailed;
  if (sent.error().sys_errno == ETOOMANYREFS) {
    deps_.owner.OutOfInFlight();
    if (closed()) return SendResult::kFailed;
  }
  // The socket tells when its peer has read, but not when the kernel takes descriptors again, or
  // has memory.
  if (sent.error().sys_errno != EAGAIN) RetryLater();
  return SendResult::kLater;
}

void BrokerSession::SettleInFlight() {
  const uint64_t before = in_flight_.fds();
  if (closed() || before == 0) return;
  in_flight_.Settle(UnreadByPeer(socket_));
  deps_.owner.InFlightChanged(
      peer_.uid, static_cast<int64_t>(in_flight_.fds()) - static_cast<int64_t>(before));
}

void BrokerSession::SendEvent(abi::EventKind kind, uint32_t slot, uint64_t generation,
                              uint64_t version, LeaseId lease) {
  if (closed() || !subscribed_) return;
  if (!queue_.empty() || look_at_page_) {
    look_at_page_ = true;
    ++deps_.stats.coalesced_events;
    return;
  }
  abi::Event event{};
  event.header = MakeHeader(abi::FrameType::kEvent, sizeof(event), 0, 0);
  event.kind = static_cast<uint32_t>(kind);
  event.slot = slot;
  event.generation = generation;
  event.version = version;
  event.lease_id = lease;
  const auto bytes = AsBytes(event);
  switch (SendNow({{bytes.begin(), bytes.end()}, {}, nullptr})) {
    case SendResult::kSent:
      return;
    case SendResult::kFailed:
      Close("closed");
      return;
    case SendResult::kLater:
      look_at_page_ = true;
      ++deps_.stats.coalesced_events;
      UpdateWatch();
  }
}

void BrokerSession::SendLookAtPage() {
  look_at_page_ = false;  // SendEvent sets it again if there still is no room.
  SendEvent(abi::EventKind::kLookAtPage, abi::kNoSlot, 0, 0, 0);
}

void BrokerSession::SendDraining(const VersionKey& key) {
  for (const auto& [lease, held] : leases_) {
    if (closed()) return;  // Closing clears the map.
    if (held == key) {
      SendEvent(abi::EventKind::kDraining, abi::kNoSlot, 0, key.version, lease);
      if (closed()) return;
    }
  }
}

void BrokerSession::UpdateWatch() {
  // Replies that wait for the quota alone are not waiting for the socket: the retry timer has them.
  const bool wait_for_room = retry_timer_ == 0 && (!queue_.empty() || look_at_page_);
  const uint32_t events =
      (MayRead() ? uint32_t{EPOLLIN} : 0) | (wait_for_room ? uint32_t{EPOLLOUT} : 0);
  if (events == watched_events_) return;
  watched_events_ = events;
  deps_.loop.ChangeWatch(watch_, events);
}

void BrokerSession::RetryLater() {
  // It is not this client that keeps its replies waiting: what it does not read counts against it
  // in unread_since().
  progress_at_ = deps_.clock.Monotonic();
  if (retry_timer_ != 0) return;
  retry_timer_ = deps_.loop.PostDelayed(kRetryDelay, [owner = &deps_.owner, id = id_] {
    owner->Enter(id, SessionOwner::From::kLoop, [](BrokerSession& session) {
      session.retry_timer_ = 0;
      session.Flush();
    });
  });
}

void BrokerSession::ArmStallTimer() {
  const absl::Duration left = progress_at_ + deps_.options.send_timeout - deps_.clock.Monotonic();
  stall_timer_ = deps_.loop.PostDelayed(left, [owner = &deps_.owner, id = id_] {
    owner->Enter(id, SessionOwner::From::kLoop, [](BrokerSession& session) {
      session.stall_timer_ = 0;
      const absl::Duration idle = session.deps_.clock.Monotonic() - session.progress_at_;
      if (idle < session.deps_.options.send_timeout) {
        session.ArmStallTimer();
        return;
      }
      ++session.deps_.stats.slow;
      session.Close("slow");
    });
  });
}

}  // namespace modelhost
