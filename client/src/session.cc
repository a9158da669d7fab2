#include "client/src/session.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "client/src/process.h"
#include "client/src/reference.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kFirstPause{5};
constexpr milliseconds kLongestPause{200};
// A waiting daemon answers this much before the caller's deadline, so that its reason arrives.
constexpr milliseconds kReplyMargin{100};

milliseconds Left(SteadyTime deadline) {
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline - steady_clock::now()));
}

std::string Joined(const std::vector<std::string>& paths) {
  std::string text;
  for (const std::string& path : paths) text += (text.empty() ? "" : " or ") + path;
  return text;
}

Error Interruption(const std::string& what) {
  return Error{Code::kCancelled, what + "interrupted", 0};
}

Error Prefixed(Error error, const std::string& what) {
  error.text = what + error.text;
  return error;
}

}  // namespace

Session::Session(Options options, uint64_t id)
    : options_(std::move(options)),
      id_(id),
      random_(static_cast<uint32_t>(
          id + static_cast<uint64_t>(steady_clock::now().time_since_epoch().count()))) {}

Session::~Session() {
  const MutexLock lock(mutex_);
  if (connection_ != nullptr) CloseConnection();
}

Result<std::shared_ptr<Session>> Session::Connect(Options options) {
  std::shared_ptr<Session> session(new Session(std::move(options), Process::Get().NextSessionId()));
  // Known to the fork handler before it has a socket.
  Process::Get().AddSession(session);
  if (auto connected = session->EnsureConnected(session->DefaultDeadline()); !connected.ok()) {
    Process::Get().RemoveSession(session.get());
    return std::move(connected).error();
  }
  return session;
}

void Session::Close() {
  Process::Get().RemoveSession(this);
  if (forked()) return;
  // Dropped without the lock: they hold live models, and those this session.
  std::vector<Following> followers;
  std::vector<std::unique_ptr<Request>> background;
  const MutexLock lock(mutex_);
  closed_ = true;
  Break(Gone(), /*lost=*/false);
  // The reader waits at the socket, and it alone closes it. The daemon drops the leases now.
  if (connection_ != nullptr) EndChannel(connection_->socket());
  changed_.NotifyAll();
  SignalLocked();
  followers.swap(followers_);
  background.swap(background_);
}

void Session::AbandonAfterFork() {
  forked_.store(true, std::memory_order_relaxed);
  UniqueFd(socket_copy_.exchange(-1)).Reset();
}

SteadyTime Session::DefaultDeadline() const { return steady_clock::now() + options_.deadline; }

Error Session::Gone() const {
  if (forked()) {
    return Error{Code::kFailedPrecondition,
                 "the session stays with the parent after fork (connect again in the child)", 0};
  }
  return Error{Code::kFailedPrecondition, "the client was disconnected (connect again)", 0};
}

Result<Session::State> Session::GetState() {
  if (forked()) return Gone();
  const MutexLock lock(mutex_);
  State state;
  state.socket = socket_.c_str();
  state.epoch = page_->epoch();
  state.connected = connected();
  state.leases = static_cast<uint32_t>(leases_.size());
  state.reconnects = connections_ - 1;
  return state;
}

// --- Being connected
// -------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Connection>> Session::OpenConnection(SteadyTime deadline, bool for_call) {
  const auto give_up = [&] {
    {
      const MutexLock lock(mutex_);
      if (closed_) return true;
    }
    return for_call && Interrupted();
  };
  std::vector<std::string> paths;
  {
    const MutexLock lock(mutex_);
    if (!socket_.empty()) paths.push_back(socket_);
  }
  if (paths.empty()) paths = options_.sockets;
  for (const std::string& path : paths) {
    auto connection = Connection::Open(path, socket_copy_, buffer_, deadline, give_up);
    if (connection.ok()) {
      const MutexLock lock(mutex_);
      if (socket_.empty()) socket_ = path;
      return connection;
    }
    if (connection.error().code == Code::kUnavailable) {
      return Error{Code::kUnavailable,
                   "connect to modelhostd: " + connection.error().text + " (is it running?)", 0};
    }
    if (connection.error().code != Code::kNotFound) return connection;
  }
  return Error{Code::kUnavailable,
               "connect to modelhostd: no socket " + Joined(paths) +
                   " (start modelhostd, or set MODELHOST_RUNTIME_DIR)",
               0};
}

Result<void> Session::EnsureConnected(SteadyTime deadline) {
  milliseconds pause = kFirstPause;
  while (true) {
    {
      const MutexLock lock(mutex_);
      while (!closed_ && !connected() && (connecting_ || connection_ != nullptr)) {
        if (steady_clock::now() >= deadline) {
          return Error{Code::kUnavailable,
                       "connect to modelhostd: no connection to " +
                           (socket_.empty() ? Joined(options_.sockets) : socket_) +
                           " in time (is it running?)",
                       0};
        }
        ++sleepers_;
        changed_.WaitUntil(mutex_, NextAsk(deadline));
        --sleepers_;
        if (!connected() && AskInterrupted()) return Interruption("connect to modelhostd: ");
      }
      if (closed_) return Gone();
      if (connected()) return {};
      connecting_ = true;
    }
    auto opened = OpenConnection(deadline, /*for_call=*/true);
    {
      const MutexLock lock(mutex_);
      connecting_ = false;
      if (sleepers_ != 0) changed_.NotifyAll();
      if (closed_) return Gone();
      if (opened.ok()) {
        Install(*std::move(opened));
        return {};
      }
    }
    const bool again = opened.error().code == Code::kUnavailable;
    const milliseconds left = Left(deadline);
    if (!again || left.count() == 0) return std::move(opened).error();
    std::this_thread::sleep_for(std::min(pause, left));
    if (Interrupted()) return Interruption("connect to modelhostd: ");
    pause = std::min(pause * 2, kLongestPause);
  }
}

// --- Calls
// -------------------------------------------------------------------------------------------------

void Session::BeginCall() {
  if (calls_++ == 0 && housekeeper_ != nullptr && connected()) {
    housekeeper_->Arm(connection_->socket(), id_, /*armed=*/false);
  }
}

void Session::EndCall() {
  if (--calls_ == 0 && housekeeper_ != nullptr && connected()) {
    housekeeper_->Arm(connection_->socket(), id_, /*armed=*/true);
  }
  if (look_ && housekeeper_ != nullptr) {
    look_ = false;
    housekeeper_->Wake();
  }
}

void Session::Await(Request& request, SteadyTime deadline) {
  SteadyTime ask = NextAsk(deadline);  // Not put off by what comes for others.
  while (!request.done) {
    if (!reading_ && connected()) {
      ReadOne(ReceiveWait::kUntilDeadline, ask);
    } else {
      ++sleepers_;
      changed_.WaitUntil(mutex_, ask);
      --sleepers_;
    }
    if (!request.done && steady_clock::now() >= ask) {
      const bool interrupted = AskInterrupted();
      ask = NextAsk(deadline);
      // What was lost meanwhile would be tried again.
      if (interrupted && (!request.done || request.lost)) {
        if (!request.done) Forget(request);
        request.lost = false;
        request.error = Interruption("");
        return;
      }
    }
    if (!request.done && steady_clock::now() >= deadline) {
      Forget(request);
      request.error = Error{Code::kDeadlineExceeded, "modelhostd did not answer in time", 0};
      return;
    }
  }
}

class Session::CallScope {
 public:
  CallScope(Session& session, Request& request) MH_REQUIRES(session.mutex_)
      : session_(session), request_(request) {
    session.pending_.push_back(&request);
    session.BeginCall();
  }
  CallScope(const CallScope&) = delete;
  // The analysis does not see that the lock is held as long as this lives.
  ~CallScope() MH_THREAD_ATTRIBUTE(no_thread_safety_analysis) {
    std::erase(session_.pending_, &request_);
    session_.EndCall();
  }

 private:
  Session& session_;
  Request& request_;
};

void Session::Call(Request& request, abi::FrameHeader& header, std::span<const std::byte> head,
                   std::span<const std::byte> tail, SteadyTime deadline, const Lease* lease,
                   uint64_t* lease_id) {
  while (true) {
    {
      const MutexLock lock(mutex_);
      if (closed_) {
        request.error = Gone();
        return;
      }
      FlushReleases();
      if (!connected()) {
        request.lost = true;
        request.error = Error{Code::kUnavailable, "modelhostd closed the connection", 0};
        return;
      }
      if (lease != nullptr) {
        // Read and sent in one go: another connection would know the number as another lease's.
        if (lease->state != Lease::State::kHeld) {
          request.lost = true;
          request.error =
              Error{Code::kUnavailable, "modelhostd has not given the lease back yet", 0};
          return;
        }
        *lease_id = lease->id;
      }
      request.id = NextId();
      request.connection = connections_;
      header.request_id = request.id;
      auto sent = Send(head, tail);
      if (sent.ok()) {
        if (request.kind == Request::Kind::kAcquire) FaultPoint("client.acquire_sent");
        const CallScope scope(*this, request);
        Await(request, deadline);
        return;
      }
      if (sent.error().code != Code::kResourceExhausted) {
        request.lost = true;
        request.error = std::move(sent).error();
        return;
      }
    }
    // The daemon reads too slowly: its buffer is full.
    if (steady_clock::now() >= deadline) {
      request.error = Error{Code::kDeadlineExceeded, "modelhostd does not read requests", 0};
      return;
    }
    std::this_thread::sleep_for(milliseconds(1));
    if (Interrupted()) {
      request.error = Interruption("");
      return;
    }
  }
}

void Session::ReleaseAll(const Request& request) {
  if (!request.grants.has_value() || !Live(request)) return;
  for (const Grant& grant : request.grants->grants()) SendRelease(grant.head.lease_id);
}

Result<std::vector<Held>> Session::TakeGrants(std::span<const abi::Ref> refs, Request& request) {
  GrantBuilder& grants = *request.grants;
  if (grants.failure().has_value()) {
    ReleaseAll(request);
    return *grants.failure();
  }
  std::vector<Held> held;
  held.reserve(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    Grant& grant = grants.grants()[i];
    const abi::Granted& head = grant.head;
    const bool fits = NameIn(head.model) == NameIn(refs[i].model) &&
                      (refs[i].version == 0 ? NameIn(head.label) == NameIn(refs[i].label)
                                            : refs[i].version == head.version);
    if (!fits || head.version == 0) {
      ReleaseAll(request);
      return Error{Code::kInternal,
                   "acquire " + ReferenceName(refs[i]) + ": modelhostd granted something else", 0};
    }
    auto lease = std::make_shared<Lease>();
    lease->model = NameIn(head.model);
    if (refs[i].version == 0) lease->label = NameIn(head.label);
    lease->generation = head.generation;
    lease->seen.store(head.generation, std::memory_order_relaxed);
    CopyName(lease->model, lease->fixed.model);
    lease->fixed.version = head.version;
    std::memcpy(lease->fixed.digest, head.digest, sizeof(head.digest));
    lease->id = head.lease_id;
    // Granted by a daemon that has gone since: what is mapped is good, and the lease is declared to
    // the next one.
    if (!Live(request)) lease->state = Lease::State::kDue;
    if (!lease->label.empty()) PointAtSlot(*lease, head.slot);
    if (grant.device.mode != abi::DeviceMode::kNone) lease->gpu = request.gpu;
    held.push_back(Held{std::move(lease), std::move(grant.model), std::move(grant.device)});
  }
  leases_.reserve(leases_.size() + held.size());
  for (const Held& each : held) leases_.push_back(each.lease);
  if (!Live(request)) {
    if (connected()) DeclareAgain(steady_clock::now());
    if (housekeeper_ != nullptr) housekeeper_->Wake();
  }
  return held;
}

Result<std::vector<Held>> Session::Acquire(std::span<const abi::Ref> refs, bool wait,
                                           SteadyTime deadline, const DeviceRequest& device) {
  const std::string what =
      "acquire " + ReferenceName(refs[0]) +
      (refs.size() > 1 ? " and " + std::to_string(refs.size() - 1) + " more" : "") + ": ";
  milliseconds pause = kFirstPause;
  while (true) {
    if (forked()) return Gone();
    if (auto there = EnsureConnected(deadline); !there.ok()) return std::move(there).error();
    const milliseconds left = Left(deadline);
    Request request;
    request.kind = Request::Kind::kAcquire;
    AcquireFrame acquire;
    {
      const MutexLock lock(mutex_);
      auto made = MakeAcquire(refs, device.asks() ? device.device->uuid() : "",
                              device.want == DeviceRequest::Want::kDevice);
      if (!made.ok()) return Prefixed(std::move(made).error(), what);
      acquire = *std::move(made);
    }
    if (wait) acquire.head.flags |= abi::kAcquireWait;
    acquire.head.deadline_ms =
        static_cast<uint64_t>((left - std::min(kReplyMargin, left / 4)).count());
    if (acquire.device) request.gpu = device.device->uuid();
    request.grants.emplace(GrantBuilder::Kind::kAcquire, acquire.head.count, acquire.device);
    Call(request, acquire.head.header, AsBytes(acquire.head), acquire.tail, deadline);
    if (!request.error.has_value()) {
      Result<std::vector<Held>> held = TakeAcquired(refs, request);
      if (!held.ok()) return held;
      // The driver may take its time: without the lock.
      if (auto attached = AttachDevices(*held, device); !attached.ok()) {
        for (Held& each : *held) {
          each.model.reset();
          Release(each.lease);
        }
        return Prefixed(std::move(attached).error(), what);
      }
      return held;
    }
    // A daemon that stops, or that is gone: another will be there.
    const bool again = request.lost || request.error->code == Code::kUnavailable;
    if (!again || left.count() == 0) {
      return Prefixed(*std::move(request.error), what);
    }
    std::this_thread::sleep_for(std::min(pause, left));
    if (Interrupted()) return Interruption(what);
    pause = std::min(pause * 2, kLongestPause);
  }
}

Result<std::vector<Held>> Session::TakeAcquired(std::span<const abi::Ref> refs, Request& request) {
  const MutexLock lock(mutex_);
  if (closed_) return Gone();  // Its leases have ended with the connection.
  auto held = TakeGrants(refs, request);
  // Without its thread a session cannot come back by itself, but what was granted is good.
  if (held.ok()) (void)AttachHousekeeper();
  return held;
}

Result<void> Session::AttachDevices(std::vector<Held>& held, const DeviceRequest& device) {
  using Want = DeviceRequest::Want;
  if (device.want == Want::kHost) return {};
  for (Held& each : held) {
    if (!device.asks()) {
      each.model->SetNoDevice(device.why_not);
      continue;
    }
    const bool came = each.device.mode != abi::DeviceMode::kNone;
    auto attached = each.model->AttachDevice(device.device, std::move(each.device),
                                             /*map=*/!device.same_addresses);
    if (attached.ok() && (came || device.want == Want::kDeviceIfAny)) continue;
    if (attached.ok()) {
      return Error{Code::kFailedPrecondition, each.model->Name() + ": " + each.model->no_device(),
                   0};
    }
    // Wrong bytes are wrong for everyone.
    if (device.want == Want::kDevice || attached.error().code == Code::kDataLoss) return attached;
    each.model->SetNoDevice(attached.error().text);
  }
  return {};
}

void Session::Release(const std::shared_ptr<Lease>& lease) noexcept {
  if (forked()) return;
  const MutexLock lock(mutex_);
  const bool held = lease->state == Lease::State::kHeld;
  lease->state = Lease::State::kReleased;
  std::erase(leases_, lease);
  try {
    if (held && connected()) SendRelease(lease->id);
  } catch (const std::bad_alloc&) {
    // The lease then ends with the connection.
  }
  if (!unsent_releases_.empty() && housekeeper_ != nullptr) housekeeper_->Wake();
}

Result<Session::Fetched> Session::Fetch(const std::shared_ptr<Lease>& lease, uint32_t region,
                                        SteadyTime deadline) {
  while (true) {
    if (forked()) return Gone();
    if (auto there = EnsureConnected(deadline); !there.ok()) return std::move(there).error();
    abi::Fetch fetch{};
    fetch.header = MakeHeader(abi::FrameType::kFetch, sizeof(fetch), 0, 0);
    fetch.region = region;
    Request request;
    request.kind = Request::Kind::kFetch;
    {
      const MutexLock lock(mutex_);
      if (closed_) return Gone();
      if (lease->state == Lease::State::kLost) {
        return Error{Code::kFailedPrecondition,
                     "modelhostd no longer has this version (acquire again)", 0};
      }
      if (lease->state != Lease::State::kHeld) {
        // After a restart the lease comes back first. Its answer is for whoever reads.
        if (steady_clock::now() >= deadline) {
          return Error{Code::kUnavailable, "modelhostd has not given the lease back yet", 0};
        }
        const SteadyTime nap = std::min(deadline, steady_clock::now() + kLongestPause);
        BeginCall();
        if (connected() && !reading_) {
          ReadOne(ReceiveWait::kUntilDeadline, nap);
        } else {
          ++sleepers_;
          changed_.WaitUntil(mutex_, nap);
          --sleepers_;
        }
        EndCall();
        if (AskInterrupted()) return Interruption("");
        continue;
      }
    }
    Call(request, fetch.header, AsBytes(fetch), {}, deadline, lease.get(), &fetch.lease_id);
    if (!request.error.has_value()) return std::move(request.fetched);
    if (!request.lost || steady_clock::now() >= deadline) return *std::move(request.error);
  }
}

}  // namespace modelhost
