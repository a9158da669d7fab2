// One connection on handles.sock, from accept to close.
//
//   kNew --Hello--> kOpen --------------------------> kClosed
//     |               |  hang-up, violation, too slow, stop
//     +---------------+-- no Hello in time, violation
//
// Requests are answered in the order they come, except Acquire with kAcquireWait, which is answered
// when the version is there. While replies wait for the client to read, or a file is opened for a
// Fetch, its requests are not read.
// Events never wait: what a slow reader misses becomes one kLookAtPage. A client that does not read
// its replies for send_timeout is closed.
//
// Control thread only. Never blocks: the socket and every descriptor that came from the client are
// closed by the FdCloser. Owned by the broker; a closed session does nothing more.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/fd_closer.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"
#include "daemon/publish/catalogue_writer.h"
#include "daemon/publish/frame_parser.h"
#include "daemon/publish/in_flight.h"
#include "daemon/publish/reply_frames.h"
#include "daemon/registry/model_manager.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct BrokerOptions {
  size_t max_connections = 1100;
  size_t max_connections_per_uid = 1024;
  // The last places of max_connections are for uids that have few connections.
  size_t reserved_connections = 64;
  size_t few_connections = 8;
  // Descriptors from peers that wait to be closed (FdCloser): a uid with more gets no connection,
  // and while there are more in all nobody new is accepted.
  size_t max_unclosed_per_uid = 512;
  size_t max_unclosed = 4096;
  absl::Duration hello_timeout = absl::Seconds(5);
  absl::Duration send_timeout = absl::Seconds(30);
  uint64_t max_in_flight_fds_per_uid = 4096;
  // To all clients together; the kernel refuses more than RLIMIT_NOFILE. A uid may have three
  // quarters of it. 0: half of RLIMIT_NOFILE.
  uint64_t max_in_flight_fds = 0;
  size_t max_queued_frames = 4096;  // Replies of one session; more close it.
  // Called each time that accepting is put off, with the reason; the shortage may last.
  std::function<void(const absl::Status&)> on_accept_pause = nullptr;
};

// Counts since the start.
struct BrokerStats {
  uint64_t accepted = 0;
  uint64_t refused_access = 0;
  uint64_t refused_full = 0;
  uint64_t violations = 0;
  uint64_t hello_timeouts = 0;
  uint64_t slow = 0;              // Closed for not reading.
  uint64_t accept_pauses = 0;     // Out of descriptors.
  uint64_t coalesced_events = 0;  // Events that a slow reader did not get one by one.
};

// The last words on a connection: sends the error, throws away what the client has sent, which
// would otherwise cost it the error, and leaves the closing to `closer`. `buffer` as for
// ReceiveFrame.
void RefuseConnection(UniqueFd socket, uint32_t uid, FdCloser& closer, std::span<std::byte> buffer,
                      uint32_t request_id, const absl::Status& why);

class BrokerSession;

// What a session needs from the broker that owns it.
class SessionOwner {
 public:
  virtual ~SessionOwner() = default;
  // Runs `call` on the session unless it is closed. All callbacks of a session come through here,
  // and say whether they come from the loop or from inside the manager.
  enum class From { kLoop, kManager };
  virtual void Enter(SessionId session, From from,
                     absl::FunctionRef<void(BrokerSession&)> call) = 0;
  // The session is closed: it is to be ended with the manager, and destroyed, when neither it nor
  // the manager is on the stack.
  virtual void Closed(SessionId session, const std::string& why) = 0;
  // Whether `fds` more descriptors may go to clients of this uid now. May close sessions, the
  // caller's too, that hold up the others by not reading.
  virtual bool MaySend(uint32_t uid, size_t fds) = 0;
  // The kernel does not take descriptors any more, from any session. May close sessions as MaySend.
  virtual void OutOfInFlight() = 0;
  // Descriptors in flight to this uid, all sessions together, have changed by `change`.
  virtual void InFlightChanged(uint32_t uid, int64_t change) = 0;
};

class BrokerSession {
 public:
  struct Deps {
    SessionOwner& owner;
    ControlLoop& loop;
    Executor& pool;    // Where the last owner of weights may be dropped.
    Executor& opener;  // Where files are opened.
    FdCloser& closer;
    ModelManager& manager;
    CatalogueWriter& catalogue;
    Clock& clock;
    const BrokerOptions& options;
    BrokerStats& stats;
    std::span<std::byte> buffer;  // For one frame, used within one call.
  };

  BrokerSession(const Deps& deps, SessionId id, Peer peer, UniqueFd socket)
      : deps_(deps), id_(id), peer_(std::move(peer)), socket_(std::move(socket)) {}
  BrokerSession(const BrokerSession&) = delete;

  // Begins to listen, and reads what may be there already.
  void Start();
  // Tells the manager who is here; once. Start does it as soon as Hello is answered.
  void Announce();
  // Sends what a subscribed client wants to know.
  void SendEvent(abi::EventKind kind, uint32_t slot, uint64_t generation, uint64_t version,
                 LeaseId lease);
  // kDraining for every lease on `key`.
  void SendDraining(const VersionKey& key);
  // The lease ended on the manager's side.
  void ForgetLease(LeaseId lease) { leases_.erase(lease); }
  // Ends the session; its leases end soon after. `why` is one of a closed set, for the metrics:
  // closed, violation, hello_timeout, slow, error, stopping.
  void Close(const std::string& why);

  SessionId id() const { return id_; }
  const Peer& peer() const { return peer_; }
  bool closed() const { return state_ == State::kClosed; }

  // Asks the kernel how many descriptors are still on their way to the client.
  void SettleInFlight();
  // Since when it has left descriptors unread (Clock::Monotonic); InfiniteDuration: it has not.
  absl::Duration unread_since() const { return in_flight_.oldest(); }

 private:
  enum class State { kNew, kOpen, kClosed };

  void OnReady(uint32_t events);
  void ReadRequests();
  // False: stop reading now.
  bool ReadOne();
  // `fds`: of an upload; those that nobody took are left in it.
  void Handle(Request request, std::vector<UniqueFd>& fds);
  void OnHello(uint32_t request_id, const HelloRequest& hello);
  void OnAcquire(uint32_t request_id, AcquireRequest acquire);
  void OnFetch(uint32_t request_id, const FetchRequest& fetch);
  // The version to open a region of.
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> ToFetch(const FetchRequest& fetch);
  void OnRelease(const ReleaseRequest& release);
  void OnUpload(uint32_t request_id, const UploadRequest& upload, std::vector<UniqueFd>& fds);

  struct PendingAcquire {
    uint32_t request_id = 0;
    bool redeclare = false;
    bool device = false;  // Device memory was asked for.
    absl::Duration received;
    std::vector<std::string> models;
  };
  void FinishAcquire(const PendingAcquire& pending,
                     const absl::StatusOr<std::vector<Grant>>& grants);

  // The client broke the protocol: says so and ends the connection.
  void Violation(uint32_t request_id, const absl::Status& why);
  void Refuse(uint32_t request_id, const absl::Status& why, const std::string& reason);
  bool MayRead() const { return queue_.empty() && !fetching_; }
  // Sends, or queues behind what waits already.
  void Reply(OutFrame frame);
  // Sends what waits, as far as the client and the quota let it.
  void Flush();
  enum class SendResult { kSent, kLater, kFailed };
  SendResult Send(const OutFrame& frame);
  SendResult SendNow(const OutFrame& frame);
  void SendLookAtPage();
  void UpdateWatch();
  void ArmStallTimer();
  void RetryLater();

  const Deps deps_;
  const SessionId id_;
  const Peer peer_;
  UniqueFd socket_;
  State state_ = State::kNew;
  uint32_t abi_ = 0;  // What the two ends speak, from Hello on.
  bool announced_ = false;
  bool fetching_ = false;  // A file is being opened.
  bool subscribed_ = false;
  bool look_at_page_ = false;  // Events were dropped; the client is told once there is room.
  std::map<LeaseId, VersionKey> leases_;
  std::deque<OutFrame> queue_;
  InFlight in_flight_;
  absl::Duration progress_at_;  // When a queued frame last went out.
  WatchId watch_ = 0;
  uint32_t watched_events_ = 0;
  TimerId hello_timer_ = 0;
  TimerId stall_timer_ = 0;
  TimerId retry_timer_ = 0;
};

}  // namespace modelhost
