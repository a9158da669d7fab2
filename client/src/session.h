// The session of one client with the daemon: calls, leases, events, and coming back after a
// restart.
//
//   application threads   Acquire, Fetch, Release ...   send, then wait for their own reply
//   background thread     OnReadable, Tick              everything that no call waits for
//
// Several requests may be under way. Whoever waits first takes the reader's role, receives frames
// and hands them to the requests that they answer; the others sleep until theirs is done or the
// role is free. Only the holder of the role closes the socket. While any call waits, the socket
// does not wake the background thread.
//
// When the connection ends, calls connect again until their deadline; the background thread does it
// for a session with leases or listeners, after 50 ms to 5 s. Leases are then declared again and
// their labels looked up in the new page.
//
// Thread-safe. The lock is held for short work only, never while waiting for the peer; mapping what
// a frame brought is done under it. After fork every call in the child is FAILED_PRECONDITION.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "client/src/connection.h"
#include "client/src/grant_builder.h"
#include "client/src/housekeeper.h"
#include "client/src/lease.h"
#include "client/src/model.h"
#include "client/src/mutex.h"
#include "proto/handle/error.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// A lease and what it gave.
struct Held {
  std::shared_ptr<Lease> lease;
  std::unique_ptr<Model> model;
  DeviceGrant device;  // What came of device memory; not mapped yet.
};

// Something that follows labels. The session calls it on the background thread alone.
class Follower {
 public:
  virtual ~Follower() = default;
  virtual std::span<const abi::Ref> refs() const = 0;
  virtual const DeviceRequest& device() const = 0;
  // A label has moved on from the newest set that it has, or may have. Under the session's lock.
  virtual bool Behind() const = 0;
  // The daemon is being asked for a newer set. Under the session's lock.
  virtual void OnAsked() = 0;
  // Without the session's lock. False: it is of no use, to be tried again later.
  virtual bool OnAcquired(Result<std::vector<Held>> held) = 0;
  // Time to drop what nobody uses any more.
  virtual void CollectGarbage() = 0;
};

class Session : public std::enable_shared_from_this<Session> {
 public:
  struct Options {
    std::vector<std::string> sockets;  // Tried in this order; the first that exists is kept.
    std::chrono::milliseconds deadline{5000};
    // As of mh_options.
    int (*interrupted)(void* context) = nullptr;
    void* context = nullptr;
  };

  // UNAVAILABLE when there is no daemon until the deadline; errors of Connection::Open.
  static Result<std::shared_ptr<Session>> Connect(Options options);
  ~Session();
  // Ends the connection and with it all leases. Calls that wait and later ones are
  // FAILED_PRECONDITION.
  void Close() MH_EXCLUDES(mutex_);

  uint64_t id() const { return id_; }
  SteadyTime DefaultDeadline() const;

  struct State {
    const char* socket = nullptr;  // Lives as long as the session.
    uint64_t epoch = 0;
    bool connected = false;
    uint32_t leases = 0;
    uint64_t reconnects = 0;
  };
  Result<State> GetState() MH_EXCLUDES(mutex_);

  // All or none. Tries again on a new connection until the deadline. What `device` asks for is
  // attached, but mapped only without its same_addresses.
  Result<std::vector<Held>> Acquire(std::span<const abi::Ref> refs, bool wait, SteadyTime deadline,
                                    const DeviceRequest& device) MH_EXCLUDES(mutex_);
  // Maps what came of device memory. With kDeviceIfAny a version does without what cannot be had.
  // Errors as CudaImage: then the leases are the caller's to release.
  static Result<void> AttachDevices(std::vector<Held>& held, const DeviceRequest& device);
  // Does not wait. The model is the caller's to unmap.
  void Release(const std::shared_ptr<Lease>& lease) noexcept MH_EXCLUDES(mutex_);
  struct Fetched {
    abi::RegionRef ref{};
    UniqueFd fd;
  };
  Result<Fetched> Fetch(const std::shared_ptr<Lease>& lease, uint32_t region, SteadyTime deadline)
      MH_EXCLUDES(mutex_);
  // From the page, without the daemon. NOT_FOUND.
  Result<CatalogueReader::Label> Resolve(const abi::Ref& ref) MH_EXCLUDES(mutex_);

  // The descriptor belongs to the session. RESOURCE_EXHAUSTED.
  Result<int> EventFd() MH_EXCLUDES(mutex_);
  void ClearEvents() MH_EXCLUDES(mutex_);
  void SignalEvents() MH_EXCLUDES(mutex_);

  // From now on the background thread, which it returns, keeps `follower` up to date.
  // RESOURCE_EXHAUSTED.
  Result<std::shared_ptr<Housekeeper>> AddFollower(std::shared_ptr<Follower> follower)
      MH_EXCLUDES(mutex_);
  void RemoveFollower(const Follower* follower) MH_EXCLUDES(mutex_);

  bool forked() const { return forked_.load(std::memory_order_relaxed); }

  // For Housekeeper.
  void OnReadable() MH_EXCLUDES(mutex_);
  // Returns when to be called next at the latest.
  SteadyTime Tick(SteadyTime now) MH_EXCLUDES(mutex_);
  // For Process, in a forked child: closes the socket and touches nothing else.
  void AbandonAfterFork();

 private:
  struct Request {
    enum class Kind : uint8_t { kAcquire, kFetch, kSubscribe, kRedeclare, kFollow };
    Kind kind = Kind::kAcquire;
    uint32_t id = 0;
    bool done = false;
    bool lost = false;  // The connection ended; another may serve.
    // `connections_` when it was sent: its lease ids mean nothing on others.
    uint64_t connection = 0;
    std::optional<Error> error;
    std::optional<GrantBuilder> grants;
    Fetched fetched;
    std::string gpu;  // kAcquire, kFollow: where device memory was asked for.
    // Of requests that the background thread made.
    std::shared_ptr<Lease> lease;
    std::shared_ptr<Follower> follower;
    SteadyTime expires{};
  };
  struct Following {
    std::shared_ptr<Follower> follower;
    bool asked = false;
    SteadyTime retry_at{};
    std::chrono::milliseconds patience{};
  };

  explicit Session(Options options, uint64_t id);

  // session.cc: calls.
  Error Gone() const;
  Result<void> EnsureConnected(SteadyTime deadline) MH_EXCLUDES(mutex_);
  // For a call, which may be interrupted, or for the background.
  Result<std::unique_ptr<Connection>> OpenConnection(SteadyTime deadline, bool for_call)
      MH_EXCLUDES(mutex_);
  // Sends `head` and `tail` for `request` and waits for its end. The request's own `error` and
  // `lost` tell how it went. With a `lease`, its id on that very connection is put into `lease_id`,
  // which is part of `head`; lost when it is not held there.
  void Call(Request& request, abi::FrameHeader& header, std::span<const std::byte> head,
            std::span<const std::byte> tail, SteadyTime deadline, const Lease* lease = nullptr,
            uint64_t* lease_id = nullptr) MH_EXCLUDES(mutex_);
  void Await(Request& request, SteadyTime deadline) MH_REQUIRES(mutex_);
  void BeginCall() MH_REQUIRES(mutex_);
  void EndCall() MH_REQUIRES(mutex_);
  // A call from its being sent to its end, whatever ends it: `request` is the caller's to destroy.
  class CallScope;
  Result<std::vector<Held>> TakeGrants(std::span<const abi::Ref> refs, Request& request)
      MH_REQUIRES(mutex_);
  Result<std::vector<Held>> TakeAcquired(std::span<const abi::Ref> refs, Request& request)
      MH_EXCLUDES(mutex_);
  // Nothing to do for grants of a connection that is gone.
  void ReleaseAll(const Request& request) MH_REQUIRES(mutex_);

  // session_frames.cc: frames in and out.
  // The caller of a call that waits wants it to end. Asks user code: not under the lock.
  bool Interrupted() const MH_EXCLUDES(mutex_);
  // The same under the lock, which it gives up meanwhile.
  bool AskInterrupted() MH_REQUIRES(mutex_);
  // When to ask that at the latest.
  SteadyTime NextAsk(SteadyTime deadline) const;
  bool connected() const MH_REQUIRES(mutex_) { return connection_ != nullptr && !dead_; }
  // Whether what `request` brought is good on the present connection.
  bool Live(const Request& request) const MH_REQUIRES(mutex_) {
    return connected() && request.connection == connections_;
  }
  uint32_t NextId() MH_REQUIRES(mutex_);
  // An Acquire up to its references, and what follows these: nothing where the daemon is too old
  // to be asked for device memory. UNIMPLEMENTED when it must be.
  struct AcquireFrame {
    abi::Acquire head{};
    std::vector<std::byte> tail;
    bool device = false;
  };
  Result<AcquireFrame> MakeAcquire(std::span<const abi::Ref> refs, const std::string& gpu,
                                   bool required) const MH_REQUIRES(mutex_);
  Result<void> Send(std::span<const std::byte> head, std::span<const std::byte> tail)
      MH_REQUIRES(mutex_);
  void SendRelease(uint64_t lease_id) MH_REQUIRES(mutex_);
  void FlushReleases() MH_REQUIRES(mutex_);
  // Receives one frame in the reader's role and dispatches it. False: nothing came.
  bool ReadOne(ReceiveWait wait, SteadyTime deadline) MH_REQUIRES(mutex_);
  Result<void> Dispatch(std::span<const std::byte> bytes, ReceivedFrame& frame) MH_REQUIRES(mutex_);
  Result<void> Answer(Request& request, std::span<const std::byte> bytes, ReceivedFrame& frame)
      MH_REQUIRES(mutex_);
  Result<void> DispatchEvent(std::span<const std::byte> bytes) MH_REQUIRES(mutex_);
  void Finish(Request& request) MH_REQUIRES(mutex_);
  void Forget(Request& request) MH_REQUIRES(mutex_);
  // Fails what is pending and closes the socket, or leaves that to the reader. `lost`: calls may
  // try again.
  void Break(const Error& error, bool lost) MH_REQUIRES(mutex_);
  void CloseConnection() MH_REQUIRES(mutex_);
  void SignalLocked() MH_REQUIRES(mutex_);

  // session_background.cc: what nobody waits for.
  void Install(std::unique_ptr<Connection> connection) MH_REQUIRES(mutex_);
  Result<void> AttachHousekeeper() MH_REQUIRES(mutex_);
  void PointAtSlot(Lease& lease, uint32_t hint) MH_REQUIRES(mutex_);
  void PointAtMissingSlots() MH_REQUIRES(mutex_);
  // Something happened that the page need not show: leases that it has no slot for are asked after.
  void LookWithoutSlots() MH_REQUIRES(mutex_);
  void Subscribe() MH_REQUIRES(mutex_);
  bool NeedsConnection() const MH_REQUIRES(mutex_);
  void TryReconnect(SteadyTime now) MH_EXCLUDES(mutex_);
  void DeclareAgain(SteadyTime now) MH_REQUIRES(mutex_);
  void OnDeclared(Request& request) MH_REQUIRES(mutex_);
  void ExpireBackground(SteadyTime now) MH_REQUIRES(mutex_);
  void FinishFollows() MH_EXCLUDES(mutex_);
  void StartFollows(SteadyTime now) MH_EXCLUDES(mutex_);
  void SendFollows(SteadyTime now, std::vector<std::pair<std::shared_ptr<Follower>, Error>>& failed)
      MH_EXCLUDES(mutex_);
  // The page has one of the labels and it names no version that is READY.
  bool NamesNothing(std::span<const abi::Ref> refs) const MH_REQUIRES(mutex_);
  SteadyTime NextTick() const MH_REQUIRES(mutex_);
  std::chrono::milliseconds Jittered(std::chrono::milliseconds pause) MH_REQUIRES(mutex_);

  const Options options_;
  const uint64_t id_;
  std::atomic<bool> forked_{false};
  std::atomic<int> socket_copy_{-1};                              // For the fork handler.
  alignas(8) std::array<std::byte, abi::kMaxFrameBytes> buffer_;  // Of the reader or the connector.

  mutable Mutex mutex_;
  CondVar changed_;  // A request is done, the reader's role is free, or a connection came.
  bool closed_ MH_GUARDED_BY(mutex_) = false;
  bool connecting_ MH_GUARDED_BY(mutex_) = false;  // One thread is opening a connection.
  bool reading_ MH_GUARDED_BY(mutex_) = false;     // One thread has the reader's role.
  uint32_t calls_ MH_GUARDED_BY(mutex_) = 0;
  uint32_t sleepers_ MH_GUARDED_BY(mutex_) = 0;  // On `changed_`.
  std::string socket_ MH_GUARDED_BY(mutex_);     // Set once, at the first connection.
  std::unique_ptr<Connection> connection_ MH_GUARDED_BY(mutex_);
  bool dead_ MH_GUARDED_BY(mutex_) = false;  // `connection_` is to be closed by its reader.
  std::shared_ptr<const CatalogueReader> page_ MH_GUARDED_BY(mutex_);  // The newest.
  uint64_t connections_ MH_GUARDED_BY(mutex_) = 0;
  uint64_t subscribed_ MH_GUARDED_BY(mutex_) = 0;  // `connections_` when events were asked for.
  uint32_t last_id_ MH_GUARDED_BY(mutex_) = 1;
  std::vector<Request*> pending_ MH_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Request>> background_ MH_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Lease>> leases_ MH_GUARDED_BY(mutex_);
  std::vector<uint64_t> unsent_releases_ MH_GUARDED_BY(mutex_);
  std::vector<Following> followers_ MH_GUARDED_BY(mutex_);
  UniqueFd event_fd_ MH_GUARDED_BY(mutex_);
  std::shared_ptr<Housekeeper> housekeeper_ MH_GUARDED_BY(mutex_);
  bool listening_ MH_GUARDED_BY(mutex_) = false;  // Events are wanted.
  bool look_ MH_GUARDED_BY(mutex_) = false;       // The background thread has work.
  SteadyTime reconnect_at_ MH_GUARDED_BY(mutex_){};
  std::chrono::milliseconds backoff_ MH_GUARDED_BY(mutex_){50};
  std::minstd_rand random_ MH_GUARDED_BY(mutex_);
};

}  // namespace modelhost
